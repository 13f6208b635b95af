"""Runs that are killed (SIGKILL) in the middle, as an out-of-memory killer or a lost machine would do it."""

import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path


def count_lines(path: Path) -> int:
    """Whole lines of a file that may not be there yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_when_written(line: Sequence[str], file: Path, lines: int, environment: Mapping[str, str]) -> int:
    """Start a command and kill it as soon as ``file`` has ``lines`` lines; returns how many it has then."""
    process = subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while process.poll() is None and count_lines(file) < lines:
            time.sleep(0.001)
    finally:
        process.kill()
        status = process.wait()
    assert status == -signal.SIGKILL, f"it ended by itself ({status}) before {file.name} had {lines} lines"
    return count_lines(file)


def tear_last_line(path: Path, length: int = 9) -> None:
    """Take off the end of the last line, as a kill within a write leaves it."""
    content = path.read_bytes()
    path.write_bytes(content[:-length])
