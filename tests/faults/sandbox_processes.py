"""What sandboxes leave running."""

import os
import time
from collections.abc import Callable

import psutil


def processes_of(parent: int) -> list[psutil.Process]:
    """Workers and their calls, also those that left the family: they keep the worker's command line."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if len(line) > 2 and line[-3].endswith("sandbox_worker.py") and line[-1] == str(parent):
            found.append(process)
    return found


def assert_only_idle_workers(workers: int) -> None:
    mine = [process for process in psutil.Process().children(recursive=True) if process.status() == "zombie"]
    assert mine == []
    left = processes_of(os.getpid())
    assert len(left) == workers, left
    assert all(process.ppid() == os.getpid() and not process.children() for process in left)


def wait_until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
