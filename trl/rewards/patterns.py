"""Regular expressions in Python's syntax that can't hang, whatever thread asks.

They run in processes of their own, which the system ends when a search takes too long. What else was tried: the
``regex`` library has a time limit, but counts the time of all threads, and building its tables for a long periodic
literal takes minutes without looking at the limit; RE2 is fast on every pattern, but has no look-around and no
back-references, which are Python's syntax too.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

from trl.rewards.pattern_worker import SECONDS

_WORKER = Path(__file__).with_name("pattern_worker.py")


class PatternError(RuntimeError):
    """A search has no result; the message says why."""


class Patterns:
    """Searches; threads that ask at the same time get a process each. Processes are kept until ``close``."""

    def __init__(self) -> None:
        self._idle: list[subprocess.Popen[bytes]] = []
        self._all: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        self._finish = weakref.finalize(self, _end_all, self._all, os.getpid())  # also at the interpreter's end

    def contains(self, pattern: str, text: str) -> bool:
        """Whether the pattern matches anywhere. Raises PatternError."""
        return bool(self._ask("contains", pattern, text))

    def last_match(self, pattern: str, text: str) -> str | None:
        """The first group, or all if there is none, of the pattern's last match; None without one.

        A group that took no part in the match is no match. Raises PatternError.
        """
        found: str | None = self._ask("last_match", pattern, text)
        return found

    def close(self) -> None:
        """End the processes."""
        self._finish()

    def _ask(self, what: str, pattern: str, text: str, *, fresh: bool = False) -> Any:
        worker = self._take(fresh)
        try:
            kind, result = _exchange(worker, json.dumps([what, pattern, text]).encode() + b"\n")
        except (OSError, ValueError):
            _end(worker)
            with self._lock:
                self._all.remove(worker)
            if worker.returncode == -signal.SIGPROF:
                raise PatternError(f"the regular expression took more than {SECONDS:g} s") from None
            if not fresh:  # something else ended it, while it was idle perhaps
                return self._ask(what, pattern, text, fresh=True)
            raise PatternError(f"a process for regular expressions ended (exit code {worker.returncode})") from None
        with self._lock:
            self._idle.append(worker)
        if kind == "error":
            raise PatternError(result)
        return result

    def _take(self, fresh: bool) -> "subprocess.Popen[bytes]":
        with self._lock:
            if not self._finish.alive:
                raise PatternError("the reward is closed")
            if self._idle and not fresh:
                return self._idle.pop()
            worker = subprocess.Popen(
                [sys.executable, "-I", "-S", str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the parent
            )
            self._all.append(worker)
            return worker


def _exchange(worker: "subprocess.Popen[bytes]", line: bytes) -> Any:
    """The reply to one request. Raises OSError or ValueError where the process has ended."""
    if worker.stdin is None or worker.stdout is None:
        raise ValueError("the process has no pipes")
    worker.stdin.write(line)
    worker.stdin.flush()
    return json.loads(worker.stdout.readline())


def _end(worker: "subprocess.Popen[bytes]") -> None:
    """Reap a process; one that has not ended by itself is killed."""
    try:
        worker.wait(timeout=1)  # its pipes close a little before it has ended
    except subprocess.TimeoutExpired:
        worker.kill()
        worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # what was not sent can't be sent any more
                pipe.close()


def _end_all(workers: "list[subprocess.Popen[bytes]]", owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork of the process that the workers belong to
    for worker in list(workers):
        worker.kill()
        worker.wait()
