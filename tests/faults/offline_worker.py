"""Runs scripts one after the other and writes down how each ended: offline_worker.py JOBS.json RESULTS.json."""

import json
import runpy
import sys
import traceback

jobs, results = sys.argv[1:]
ended = []
with open(jobs) as file:
    commands = json.load(file)
for command in commands:
    sys.argv = command
    try:
        runpy.run_path(command[0], run_name="__main__")
        ended.append("done")
    except SystemExit as stopped:
        ended.append(str(stopped.code))
    except BaseException:  # noqa: BLE001 - whatever it is, it is what the test is told
        ended.append(traceback.format_exc())
with open(results, "w") as file:
    json.dump(ended, file)
