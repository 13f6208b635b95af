"""What a model's name stood for when it was used, so that a resumed job can't mix the results of two models."""

import hashlib
from pathlib import Path

from huggingface_hub import try_to_load_from_cache

from trl.builtin import is_builtin
from trl.builtin.catalog import find_item, read_manifest
from trl.builtin.store import sha256_of

_WEIGHTS = {".safetensors", ".bin", ".gguf", ".model"}
_SETTINGS = {"adapter_config.json", "config.json", "tokenizer.json"}


def model_version(name: str) -> str:
    """16 hex digits of the content of a local folder or ``builtin:`` name; the commit of a hub id that was loaded.

    A training run that saves to the same folder again changes it, and so may another preparation of a built-in.
    """
    if is_builtin(name):
        files = (read_manifest(find_item(name)) or {"files": {}})["files"]
        return _short({file: entry["sha256"] for file, entry in files.items()})
    if Path(name).is_dir():
        files = [file for file in Path(name).iterdir() if file.suffix in _WEIGHTS or file.name in _SETTINGS]
        return _short({file.name: sha256_of(file) for file in files})
    for file in ("config.json", "adapter_config.json"):
        cached = try_to_load_from_cache(name, file)
        if isinstance(cached, str):
            return Path(cached).parent.name[:16]
    return ""


def _short(digests: dict[str, str]) -> str:
    listing = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(listing.encode()).hexdigest()[:16]
