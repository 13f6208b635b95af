"""Folders that are whole or not there: written beside their place, synced to disk, and renamed into it."""

import json
import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from trl.jsonl import DataFileError

logger = logging.getLogger(__name__)

_NAME = re.compile(r"checkpoint-(\d+)")
_LOOKED_FOR = ("config.json", "adapter_config.json")
MARKER = "trainer.json"
"""Written last into a checkpoint, which counts only with it, and with every file as long as it says."""


def working_path(target: Path) -> Path:
    """Where ``target`` is written before it is put in place."""
    return _beside(target, "partial")


def make_working_folder(target: Path) -> Path:
    """Create `working_path`, empty; what a killed run left there is removed."""
    working = working_path(target)
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    return working


@contextmanager
def writing(working: Path) -> Iterator[None]:
    """Write into ``working``; where that fails, it is removed and ``OSError`` says what is the matter.

    The libraries that write weights report a full disk by errors of their own.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        shutil.rmtree(working, ignore_errors=True)
        free = shutil.disk_usage(working.parent).free / 2**20
        raise OSError(
            f"could not write {working.parent} ({str(error).strip().splitlines()[0]}; {free:,.0f} MB are free there); "
            "what was saved before is whole"
        ) from error


def put_in_place(working: Path, target: Path) -> None:
    """Sync ``working`` to disk and rename it to ``target``, which it replaces."""
    for path in [*sorted(working.rglob("*")), working]:
        sync(path)
    if target.exists():
        old = _beside(target, "old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        working.rename(target)
        shutil.rmtree(old)
    else:
        working.rename(target)
    sync(target.parent)


def move_files_into(working: Path, folder: Path) -> None:
    """Sync the files and folders of ``working`` and move them into ``folder``, which may hold others.

    What a loader looks for first goes last, so that it finds all files or none.
    """
    for path in sorted(working.iterdir(), key=lambda path: (path.name in _LOOKED_FOR, path.name)):
        if path.is_dir():
            (folder / path.name).mkdir(exist_ok=True)
            move_files_into(path, folder / path.name)
        else:
            sync(path)
            path.replace(folder / path.name)
    sync(folder)
    working.rmdir()


def write_marker(working: Path, content: Mapping[str, Any]) -> None:
    """Finish a checkpoint: ``content``, and the size of every file that is there."""
    files = {path.relative_to(working).as_posix(): path.stat().st_size for path in working.rglob("*") if path.is_file()}
    text = json.dumps({**content, "files": files}, indent=1) + "\n"
    (working / MARKER).write_text(text, encoding="utf-8")


def read_marker(checkpoint: Path) -> dict[str, Any] | None:
    """What `write_marker` was given; None where the checkpoint is not whole."""
    try:
        content = json.loads((checkpoint / MARKER).read_text(encoding="utf-8"))
        files = content.pop("files").items()
        is_whole = all((checkpoint / name).stat().st_size == size for name, size in files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # no such file, or other content
        return None
    return content if is_whole else None


def checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run folder, oldest first; a warning names those that are damaged."""
    found = []
    for path in folder.glob("checkpoint-*"):
        if _NAME.fullmatch(path.name) and read_marker(path) is not None:
            found.append(path)
        elif _NAME.fullmatch(path.name):
            logger.warning("%s is damaged (files are missing or cut off) and left alone", path)
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
    if read_marker(path) is None:
        raise DataFileError(
            f"{path} is not a whole checkpoint (by its {MARKER}); give a folder called checkpoint-N that a run of "
            "this script saved, or no path for the newest"
        )
    return path


def remove_oldest(folder: Path, keep: int) -> None:
    """Delete all but the ``keep`` newest checkpoints."""
    for path in checkpoints(folder)[:-keep]:
        shutil.rmtree(path)


def _beside(target: Path, state: str) -> Path:
    return target.with_name(f".{target.name}.{state}")


def sync(path: Path) -> None:
    """Have the disk hold a file's content, or a folder's list of names."""
    if path.is_dir() and os.name == "nt":
        return  # Windows can't open a folder to sync it
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
