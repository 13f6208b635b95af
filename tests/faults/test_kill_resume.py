"""SIGKILL at any moment costs the steps since the last checkpoint and nothing else: the run that goes on is the same.

`benchmarks/kill_resume.py` does the same to the scripts as often as wanted.
"""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from benchmarks.kill_resume import ROOT, Trial, praise_first_word, write_inputs
from tests.fake_openai import FakeOpenAI
from tests.trainer.state_runs import make
from trl.jsonl import DataFileError

WORKER = str(Path(__file__).with_name("kill_worker.py"))


RUNS = ["scalar/1", "critic/1", "lora/1", "value model/1", "scalar/2"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, WORKER, str(folder), *RUNS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_four_steps_are_two_a_kill_and_two_to_the_bit(name: str, results: Path) -> None:
    folder, processes = results / name, range(int(name[-1]))
    for rank in processes:
        whole, resumed = (torch.load(folder / f"{part}-{rank}.pt") for part in ("whole", "resumed"))
        assert whole.keys() == resumed.keys()
        assert [key for key in whole if not torch.equal(whole[key], resumed[key])] == []
        rows = [json.loads((folder / f"{part}-{rank}.json").read_text()) for part in ("whole", "resumed")]
        assert rows[0][2:] == rows[1]
    assert {path.name for path in (folder / "state").glob("process-*")} == {f"process-{i}.pt" for i in processes}


def test_a_state_of_another_number_of_processes_is_refused(results: Path) -> None:
    try:
        with pytest.raises(DataFileError, match=r"other settings \(processes: 2 → 1\)"):
            make("scalar").load_state(results / "scalar/2" / "state")
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def test_a_script_killed_at_random_moments_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    write_inputs(tmp_path)
    with FakeOpenAI(praise_first_word) as server:
        trial = Trial("critic", tmp_path, tmp_path, server.url, steps=6)
        outcome = trial.kill_times(2, random.Random(3))
    assert outcome.kills == 2
    assert outcome.differences == []
    assert len(server.requests) > 6
