"""Two gloo processes with half a batch each make the update that one process makes with all of it (fp32)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKER = str(Path(__file__).with_name("two_process_worker.py"))


def run(results: Path, *command: str) -> list[dict]:
    """What each process wrote: files, since two processes' lines may run together in one pipe."""
    results.mkdir()
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }
    done = subprocess.run(
        [sys.executable, *command, str(results)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(file.read_text()) for file in sorted(results.iterdir())]


@pytest.mark.parametrize("kind", ["plain", "trunk cache", "value model"])
def test_two_processes_equal_one(kind, tmp_path):
    [alone] = run(tmp_path / "alone", WORKER, kind)
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    pair = run(tmp_path / "pair", *launcher, WORKER, kind)
    assert [result["world"] for result in pair] == [2, 2]
    assert pair[0]["weights"] == pair[1]["weights"]
    assert pair[0]["sampled"] != pair[1]["sampled"]  # each has random numbers of its own
    assert pair[0]["weights"] == pytest.approx(alone["weights"], rel=1e-6)
    for name, value in alone["stats"].items():
        assert pair[0]["stats"][name] == pytest.approx(value, abs=1e-5), name
