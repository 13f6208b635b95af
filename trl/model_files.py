"""A model's folder: whether its files are whole, found out without loading them, and its tokenizer.

A copy that broke off, or a full disk, leaves files whose loaders fail with an error that names no file.
"""

import json
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl.jsonl import DataFileError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_JSON = (
    "config.json",
    "adapter_config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "*.safetensors.index.json",
    "pytorch_model.bin.index.json",
)
_LONGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""


def check_model_files(folder: Path) -> None:
    """Raise DataFileError, naming the file, where a file of weights or settings in ``folder`` is cut or damaged.

    Of weights in safetensors, header and length are checked; pickled ones say so themselves when they are loaded.
    """
    for pattern in _JSON:
        for path in folder.glob(pattern):
            written = _read_json(path)
            missing = [name for name in _shards(written) if not (path.parent / name).exists()]
            if missing:
                raise DataFileError(f"{path} names {missing[0]}, which is not there; {_AGAIN}")
    for path in folder.glob("*.safetensors"):
        _check_safetensors(path)


_AGAIN = "copy or download the model again"


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataFileError(f"{path} is cut or damaged ({error}); {_AGAIN}") from None


def _shards(written: object) -> set[str]:
    """The files that an index of weights names; none where it is no index."""
    weights = written.get("weight_map") if isinstance(written, dict) else None
    return set(map(str, weights.values())) if isinstance(weights, dict) else set()


def _check_safetensors(path: Path) -> None:
    """The layout: 8 bytes, the header's length; the header, JSON with each tensor's place; the tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _LONGEST_HEADER
        header = file.read(length) if length < _LONGEST_HEADER else b""
    try:
        entries = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, RecursionError, AttributeError, TypeError, LookupError):
        raise DataFileError(f"{path} is no whole file of weights; {_AGAIN}") from None
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise DataFileError(f"{path} has {size:,} bytes instead of {expected:,}: it is cut or damaged; {_AGAIN}")


def load_language_model(source: str, **hf_kwargs: Any) -> "PreTrainedModel":
    """The causal LM of a hub id or local folder; ``hf_kwargs`` go to `transformers`.

    Raises DataFileError where the files are of no model that `transformers` knows, or don't fit each other.
    """
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(source, **hf_kwargs)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0]
        raise DataFileError(f"{source} can't be loaded as a language model: {reason}") from error
    except RuntimeError as error:
        if "mismatched" not in str(error):
            raise
        raise DataFileError(f"{source}: the weights have other shapes than its config.json says") from error


def load_tokenizer(source: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a hub id or local folder. Raises DataFileError where there is none, OSError as elsewhere."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source)
    except ValueError as error:
        reason = str(error).strip().splitlines()[0].rstrip(": ")
        raise DataFileError(
            f"{source} has no tokenizer that can be loaded ({reason}); save the one that the model was trained with "
            "beside it"
        ) from error
