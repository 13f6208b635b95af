"""Folders that are whole or not there: written beside their place, synced to disk, and renamed into it."""

import os
import re
import shutil
from pathlib import Path

from trl.jsonl import DataFileError

_NAME = re.compile(r"checkpoint-(\d+)")
MARKER = "trainer.json"
"""Written last into a checkpoint, which counts only with it."""


def working_path(target: Path) -> Path:
    """Where ``target`` is written before it is put in place."""
    return _beside(target, "partial")


def make_working_folder(target: Path) -> Path:
    """Create `working_path`, empty; what a killed run left there is removed."""
    working = working_path(target)
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    return working


def put_in_place(working: Path, target: Path) -> None:
    """Sync ``working`` to disk and rename it to ``target``, which it replaces."""
    for path in [*sorted(working.rglob("*")), working]:
        _sync(path)
    if target.exists():
        old = _beside(target, "old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        working.rename(target)
        shutil.rmtree(old)
    else:
        working.rename(target)
    _sync(target.parent)


def move_files_into(working: Path, folder: Path, last: str = "config.json") -> None:
    """Sync the files of ``working`` and move them into ``folder``, which may hold others; ``last`` goes last.

    A loader looks for ``last`` first, so that it finds all files or none.
    """
    for path in sorted(working.iterdir(), key=lambda path: path.name == last):
        _sync(path)
        path.replace(folder / path.name)
    _sync(folder)
    working.rmdir()


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run folder, oldest first."""
    found = [path for path in folder.glob("checkpoint-*") if _NAME.fullmatch(path.name) and (path / MARKER).exists()]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    """The N of ``checkpoint-N``."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not called checkpoint-N")
    return int(match[1])


def find_checkpoint(folder: Path, wanted: str, latest: str) -> Path | None:
    """The checkpoint ``wanted``, a path, or the newest in ``folder`` if it is the word ``latest`` (None without one).

    Raises ``DataFileError`` where a path is no whole checkpoint.
    """
    if wanted == latest:
        return next(reversed(checkpoints(folder)), None)
    path = Path(wanted)
    if not (path / MARKER).exists():
        raise DataFileError(
            f"{path} is not a whole checkpoint (it has no {MARKER}); give a folder called checkpoint-N that "
            "--save_steps wrote, or no path for the newest"
        )
    return path


def remove_oldest(folder: Path, keep: int) -> None:
    """Delete all but the ``keep`` newest checkpoints."""
    for path in checkpoints(folder)[:-keep]:
        shutil.rmtree(path)


def _beside(target: Path, state: str) -> Path:
    return target.with_name(f".{target.name}.{state}")


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows can't open a folder to sync it
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
