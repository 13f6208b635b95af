"""Keeping prepared folders whole: locked, built aside, checksummed, and published by one rename.

A folder is either complete or absent. A build works in ``.building/NAME``, writes ``manifest.json`` with the
size and SHA-256 of every file, syncs all of it to disk and renames the folder into place; a killed build
leaves only its working folder, which the next one clears.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from trl.builtin.catalog import MANIFEST, Item, folder, home, identity, read_manifest

Waiting = Callable[[Item], None]


def sha256_of(path: Path) -> str:
    """Hex SHA-256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_of_folder(path: Path, pattern: str) -> str:
    """Hex SHA-256 of what ``sha256sum`` lists for the files of a folder that match ``pattern``, sorted by name."""
    files = sorted((file.relative_to(path).as_posix(), file) for file in path.glob(pattern) if file.is_file())
    listing = "".join(f"{sha256_of(file)}  {name}\n" for name, file in files)
    return hashlib.sha256(listing.encode()).hexdigest()


@contextmanager
def locked(item: Item, on_wait: Waiting) -> Iterator[None]:
    """Hold the item's lock across processes; ``on_wait`` is called once if another process holds it."""
    (home() / ".locks").mkdir(parents=True, exist_ok=True)
    lock = FileLock(home() / ".locks" / f"{item.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        on_wait(item)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def is_ready(item: Item, *, deep: bool = False) -> bool:
    """Whether the prepared folder matches its manifest.

    A file whose size and modification time are as recorded is trusted, unless ``deep``; any other is hashed
    (a copied cache folder has other times and the same content).
    """
    manifest = read_manifest(item)
    if manifest is None:
        return False
    return all(_intact(folder(item) / name, entry, deep) for name, entry in manifest["files"].items())


def _intact(path: Path, entry: dict, deep: bool) -> bool:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return False
    if stat.st_size != entry["bytes"]:
        return False
    return (not deep and stat.st_mtime_ns == entry["mtime_ns"]) or sha256_of(path) == entry["sha256"]


def publish(item: Item, build: Callable[[Path], dict[str, float]], seconds: Callable[[], float]) -> None:
    """Run ``build`` in an empty working folder and put the result in place. Call with the lock held.

    ``build`` returns what it measured (sizes, accuracies), which goes into the manifest.
    """
    working = home() / ".building" / item.name
    shutil.rmtree(working, ignore_errors=True)
    working.mkdir(parents=True)
    measured = build(working)
    files = sorted(path for path in working.rglob("*") if path.is_file())
    manifest = {
        "identity": identity(item),
        "measured": measured,
        "seconds": round(seconds(), 1),
        "files": {path.relative_to(working).as_posix(): _describe(path) for path in files},
    }
    target = working / MANIFEST
    target.write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in [*files, target, working]:
        _sync(path)
    final = folder(item)
    if final.exists():
        old = home() / ".building" / f"{item.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        working.rename(final)
        shutil.rmtree(old)
    else:
        working.rename(final)
    _sync(home())


def _describe(path: Path) -> dict[str, object]:
    stat = path.stat()
    return {"bytes": stat.st_size, "mtime_ns": stat.st_mtime_ns, "sha256": sha256_of(path)}


def _sync(path: Path) -> None:
    if path.is_dir() and os.name == "nt":
        return  # Windows can't open a folder to sync it
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
