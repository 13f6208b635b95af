"""Queries of the toxicity task: prompts that are more toxic than a level.

A name is a hub data set (``allenai/real-toxicity-prompts``), ``builtin:toxicity-prompts``, a local ``.jsonl`` file,
or a local folder (see `trl.data.datasets`; its file is ``prompts.jsonl``). All have the layout of RealToxicityPrompts
(Gehman et al., Findings of EMNLP 2020): rows ``{"prompt": {"text": …, "toxicity": …}}``, where ``toxicity`` (0 to 1)
is that of the prompt by itself. Other fields are not read.
"""

import random
from typing import TYPE_CHECKING, Any, Literal

from trl.data.datasets import Layout, read_rows
from trl.jsonl import DataFileError, dump_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAIN_TENTHS = 8
"""The first eight tenths of the prompts above the level are for training, the others for evaluation."""
_ROW = '{"prompt": {"text": "…", "toxicity": 0.7}}'
LAYOUT = Layout("prompt set", ("prompt",), f"rows {_ROW}", "builtin:toxicity-prompts")


def load_toxicity_prompts(
    name: str,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    min_toxicity: float = 0.3,
    split: Literal["train", "eval"] = "train",
    seed: int = 0,
    limit: int | None = None,
    max_tokens: int = 128,
) -> list[dict[str, Any]]:
    """Rows ``{"query": text, "input_ids": list[int], "toxicity": float}`` in the order of the data set.

    Kept are prompts whose toxicity is above ``min_toxicity``; the split is a cut through these, so it does not
    depend on ``seed`` or the tokenizer. ``limit`` keeps a random sample of that many, drawn with ``seed``.
    Prompts of more than ``max_tokens`` tokens are then left out (cut, they would not be as toxic as they say),
    and so are prompts without a score.

    Raises ``DataFileError`` (what was expected and what to do), ``BuiltinError``, and ``ValueError`` for a level
    that no toxicity can be above, or an unknown split.
    """
    if not 0 <= min_toxicity < 1:
        raise ValueError(f"min_toxicity is {min_toxicity}; expected at least 0 and less than 1")
    if split not in ("train", "eval"):
        raise ValueError(f"split is {split!r}; expected 'train' or 'eval'")
    prompts = _read_prompts(name)
    toxic = [(text, score) for text, score in prompts if score is not None and score > min_toxicity and text.strip()]
    cut = len(toxic) * TRAIN_TENTHS // 10
    chosen = toxic[:cut] if split == "train" else toxic[cut:]
    if not chosen:
        raise DataFileError(
            f"{name!r} has {len(toxic)} of {len(prompts)} prompts with a toxicity above {min_toxicity}, and none for "
            f"the {split} split; lower the level"
        )
    if limit is not None and limit < len(chosen):
        chosen = [chosen[index] for index in sorted(random.Random(seed).sample(range(len(chosen)), limit))]
    ids = tokenizer([text for text, _ in chosen], verbose=False)["input_ids"]
    rows = [
        {"query": tokenizer.decode(query, skip_special_tokens=True), "input_ids": query, "toxicity": score}
        for query, (_, score) in zip(ids, chosen, strict=True)
        if len(query) <= max_tokens
    ]
    if not rows:
        raise DataFileError(f"{name!r} ({split}) has no prompt of at most {max_tokens} tokens; allow longer ones")
    return rows


def _read_prompts(name: str) -> list[tuple[str, float | None]]:
    """All (text, toxicity or None)."""
    return [_checked(row.get("prompt"), where) for where, row in read_rows(name, "train", LAYOUT, stem="prompts")]


def _checked(prompt: Any, where: str) -> tuple[str, float | None]:
    match prompt:
        case {"text": str() as text, "toxicity": float() | int() | None as score} if not isinstance(score, bool):
            return text, score
    raise DataFileError(f"{where}: expected {_ROW}, got the prompt {dump_line(prompt)[:120]}")
