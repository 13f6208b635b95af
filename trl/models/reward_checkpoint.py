"""Reading public reward-model checkpoints: one pickled state dict of a transformer body and a scalar head.

The known one is the 6B TL;DR reward model: a folder with nothing but ``pytorch_model.bin``, whose keys are
``transformer.*`` (GPT-J without its LM head, sometimes with the causal masks that older `transformers` kept as
buffers) and ``v_head.weight`` (1, D). Files are read with ``weights_only=True`` and mapped into memory, so that a
model in half precision needs its own size once.
"""

import json
import logging
import pickle
import re
from pathlib import Path
from typing import Any, cast
from zipfile import is_zipfile

import torch
from torch import Tensor
from transformers import MODEL_MAPPING, AutoConfig, PreTrainedModel

from trl.models.value_head import find_file

logger = logging.getLogger(__name__)

HEAD_KEY = "v_head.weight"
MISSING_ALLOWED = 0.05
"""Share of the body's weights that a checkpoint may lack; beyond it, the file is of another architecture."""

_OLD_BUFFERS = re.compile(r"\.attn\.(bias|masked_bias)$|\.attention\.(bias|masked_bias)$|rotary_emb\.inv_freq$")
"""Constants that older versions saved: causal masks and rotary frequencies, which are computed today."""


def read_public_state(source: str, hf_kwargs: dict[str, Any]) -> dict[str, Tensor] | None:
    """The tensors of a checkpoint in the public layout, mapped from disk; None if ``source`` is something else.

    ``source`` is a ``.bin`` file, a folder, or a hub repository; shards with an index are put together.
    """
    if source.endswith(".bin") and Path(source).is_file():
        paths: list[str | None] = [source]
    else:
        index = find_file(source, "pytorch_model.bin.index.json", hf_kwargs)
        if index is None:
            names = ["pytorch_model.bin"]
        else:
            weight_map = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"]
            if HEAD_KEY not in weight_map:
                return None
            names = sorted(set(weight_map.values()))
        paths = [find_file(source, name, hf_kwargs) for name in names]
        missing = [name for name, path in zip(names, paths, strict=True) if path is None]
        if index is not None and missing:
            raise OSError(f"{source} lacks {_some(missing)}, which its index names")
    state: dict[str, Tensor] = {}
    for path in paths:
        if path is not None:
            state |= _tensors(path)
    return state if HEAD_KEY in state else None


def _tensors(path: str) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    except pickle.UnpicklingError:
        raise OSError(f"{path} holds more than tensors, such as code; with weights_only it is not loaded") from None
    except (RuntimeError, EOFError) as error:
        reason = f": {error}".splitlines()[0]
        raise OSError(f"{path} is no whole file of weights ({type(error).__name__}{reason})") from None
    if not isinstance(state, dict):
        raise OSError(f"{path} holds a {type(state).__name__}; expected a dict of tensors")
    return state


def load_public_body(
    source: str, state: dict[str, Tensor], dtype: torch.dtype, config_name: str | None, hf_kwargs: dict[str, Any]
) -> PreTrainedModel:
    """The transformer body of ``state`` (which has the head as well), with a report of what didn't fit.

    Weights that are missing or have no place are listed in a warning. Raises ``OSError`` where there is no
    configuration, ``ValueError`` with the keys when the file lacks more than 5 % of the body's weights or some have
    another shape.
    """
    if config_name is None and find_file(source, "config.json", hf_kwargs) is None:
        raise OSError(
            f"{source} is a reward model without a config.json; name the model it was trained from, whose "
            "configuration it has (config_name, for example the SFT checkpoint)"
        )
    config = AutoConfig.from_pretrained(config_name or source)
    body = {key: tensor for key, tensor in state.items() if key != HEAD_KEY and not _OLD_BUFFERS.search(key)}
    model, report = cast(Any, MODEL_MAPPING[type(config)]).from_pretrained(
        None,
        config=config,
        state_dict=body,
        dtype=dtype,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below, with the two shapes
        **hf_kwargs,
    )
    _check(source, report, total=len(model.state_dict()))
    return cast(PreTrainedModel, model)


def _check(source: str, report: dict[str, Any], total: int) -> None:
    missing, unexpected = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    if report["mismatched_keys"]:
        shapes = "; ".join(
            f"{key} is {tuple(found)}, expected {tuple(wanted)}"
            for key, found, wanted in sorted(report["mismatched_keys"])[:10]
        )
        raise ValueError(f"{source} doesn't fit its configuration: {shapes}. Give the config_name it was trained from")
    text = (
        f"{len(missing)} of the model's {total} weights are missing ({_some(missing)}), and {len(unexpected)} of "
        f"the file's have no place ({_some(unexpected)})"
    )
    if len(missing) > MISSING_ALLOWED * total:
        raise ValueError(f"{source} is not a reward model of this configuration: {text}")
    if missing or unexpected:
        logger.warning("%s: %s. What is missing is newly initialised, so scores may be worthless", source, text)


def _some(keys: list[str], most: int = 10) -> str:
    if not keys:
        return "none"
    return ", ".join(keys[:most]) + (f" and {len(keys) - most} more" if len(keys) > most else "")
