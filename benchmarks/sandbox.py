"""Calls per second through the sandbox, against a new Python process for every call, in the same run.

    python -m benchmarks.sandbox

The snippets: one that compares texts, and one that uses numpy and sympy. Beside them a loop that starts
`python -I -c` with the same snippet for every call, without any guard; it runs on as many threads as the sandbox has
workers. Prints seconds, calls per second, their ratio, and whether the target (1,000 calls in less than 20 s on
2 cores) is met.
Not covered: snippets that compute for long, where the sandbox's own share no longer counts.
"""

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from trl.rewards.sandbox import Sandbox, usable_cores

TARGET = 20.0
CHEAP = """
def evaluate(example, response):
    answer = example["references"]["answer"]
    return 1.0 if response["parts"][0]["text"].strip() == answer else 0.0
"""
LIBRARIES = """
import numpy
import sympy

def evaluate(example, response):
    difference = sympy.sympify(response["parts"][0]["text"]) - sympy.sympify(example["references"]["answer"])
    return float(numpy.exp(-abs(float(difference))))
"""
PLAIN = "\nimport json, sys\nprint(float(evaluate(*json.load(sys.stdin))))"


def new_process(snippet: str, call: tuple[dict, dict]) -> float:
    command = [sys.executable, "-I", "-c", snippet + PLAIN]
    return float(subprocess.run(command, input=json.dumps(call), capture_output=True, text=True, check=True).stdout)


def cpu_of_children() -> float:
    """Seconds, of the processes that have ended; other work on the machine hardly changes them."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def compare(name: str, snippet: str, calls: int, processes: int, workers: int) -> float:
    """Seconds of `calls` calls through the sandbox; prints the comparison."""
    asked = [({"references": {"answer": "4"}}, {"parts": [{"text": str(i % 5)}]}) for i in range(calls)]
    begin, cpu_begin = time.perf_counter(), cpu_of_children()
    with Sandbox(snippet, workers=workers) as sandbox:
        sandbox.evaluate(asked[:workers])
        started = time.perf_counter() - begin
        begin = time.perf_counter()
        outcomes = sandbox.evaluate(asked)
        seconds = time.perf_counter() - begin
        guards = sandbox.guards
    cpu = cpu_of_children() - cpu_begin
    begin = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        plain = list(pool.map(partial(new_process, snippet), asked[:processes]))
    plain_seconds = time.perf_counter() - begin
    if not all(math.isclose(outcome.value, value) for outcome, value in zip(outcomes, plain, strict=False)):
        raise SystemExit("error: the two ways disagree")
    rate, plain_rate = calls / seconds, processes / plain_seconds
    print(f"{name}: {calls} calls in {seconds:.2f} s after {started:.2f} s to start, on {workers} workers")
    print(f"  {1000 * cpu / calls:.1f} ms of CPU per call, the start included")
    print(f"  {rate:.0f} calls/s; a new process per call ({processes} of them): {plain_rate:.1f} calls/s")
    print(f"  ratio {rate / plain_rate:.1f}; guards: {', '.join(guards)}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--processes", type=int, default=40, help="calls of the comparison")
    parser.add_argument("--workers", type=int, default=min(2, usable_cores()))
    args = parser.parse_args()
    seconds = [
        compare(name, snippet, args.calls, args.processes, args.workers)
        for name, snippet in (("text comparison", CHEAP), ("numpy and sympy", LIBRARIES))
    ]
    verdict = "met" if max(seconds) < TARGET * args.calls / 1000 else "missed"
    print(f"target of {TARGET:g} s for 1,000 calls on 2 cores: {verdict}")


if __name__ == "__main__":
    main()
