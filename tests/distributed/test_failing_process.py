"""One process of two fails: the run ends with that process's traceback, long before any collective's time-out."""

from pathlib import Path

import pytest

from tests.distributed.launching import accelerate, run, torchrun
from tests.e2e.test_ppo_custom import SCRIPT, flags, task

__all__ = ["task"]  # the fixture

pytestmark = pytest.mark.distributed

REWARD = """
import os

calls = 0

def score(completions, **columns):
    global calls
    calls += 1
    if os.environ["RANK"] == "1" and calls == 2:
        {what}
    return [0.5] * len(completions)
"""
SECONDS = 300
"""A collective waits for 30 minutes by default; the launcher's own patience with a process is 30 s."""


@pytest.mark.parametrize("launcher", ["accelerate", "torchrun"])
def test_its_own_traceback_and_an_end_for_all(launcher: str, task: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD.format(what="raise ZeroDivisionError('the second step of the second')"))
    command = accelerate("multi_cpu") if launcher == "accelerate" else torchrun()
    settings = {"batch_size": 4, "mini_batch_size": 4, "steps": 5}
    arguments = flags(task, f"{tmp_path}/mine.py:score", tmp_path / "run", **settings)
    done = run(*command, SCRIPT, *arguments, check=False, timeout=SECONDS)
    assert done.returncode != 0
    lines = [line.removeprefix("[rank1]: ") for line in done.stderr.splitlines()]
    assert "ZeroDivisionError: the second step of the second" in lines
    assert any("mine.py" in line and line.lstrip().startswith("File") for line in lines)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1


def test_a_killed_process_too(task: Path, tmp_path: Path) -> None:
    """As by the kernel when memory is short: nobody says goodbye."""
    (tmp_path / "mine.py").write_text(REWARD.format(what="os.kill(os.getpid(), 9)"))
    settings = {"batch_size": 4, "mini_batch_size": 4, "steps": 5}
    arguments = flags(task, f"{tmp_path}/mine.py:score", tmp_path / "run", **settings)
    done = run(*accelerate("multi_cpu"), SCRIPT, *arguments, check=False, timeout=SECONDS)
    assert done.returncode != 0
    assert "SIGKILL" in done.stderr
    assert not (tmp_path / "run" / "config.json").exists()
