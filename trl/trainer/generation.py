"""Sampling of responses: batched, left-padded, each response cut to its own length."""

import copy
import logging
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl.generation import eos_ids, neutral_defaults

logger = logging.getLogger(__name__)

_PURE: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "do_sample": True,
    "repetition_penalty": 1.0,
}
_ALSO_BIASING = (
    "min_length",
    "min_new_tokens",
    "typical_p",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "min_p",
)


def biasing_kwargs(generation_kwargs: dict[str, Any]) -> list[str]:
    """Generation settings, as ``name=value``, that make sampling differ from the policy's own distribution."""
    changed = [f"{k}={generation_kwargs[k]}" for k, v in _PURE.items() if generation_kwargs.get(k, v) != v]
    # transformers spells "no top-k filter" as 0 or None
    changed = [text for text in changed if text != "top_k=None"]
    return changed + [f"{k}={generation_kwargs[k]}" for k in _ALSO_BIASING if generation_kwargs.get(k)]


@torch.no_grad()
def sample(
    lm: Any,
    tokenizer: PreTrainedTokenizerBase,
    queries: Sequence[Tensor],
    lengths: Sequence[int | None],
    batch_size: int,
    generation_kwargs: dict[str, Any],
) -> list[Tensor]:
    """Responses (N_i,) to queries (Q_i,), in order, without prompt or padding.

    A response ends at its first end-of-sequence token, which is kept, or at ``lengths[i]`` tokens (None: at
    what ``generation_kwargs`` allow). Sampling is pure (temperature 1, no filters) unless ``generation_kwargs``
    say otherwise; nothing is inherited from the checkpoint's own generation settings but the end tokens.
    """
    for i, query in enumerate(queries):
        if query.dim() != 1 or len(query) == 0:
            raise ValueError(
                f"queries[{i}] has shape {tuple(query.shape)}: expected a 1-D tensor with at least one token "
                "(an empty prompt needs the tokenizer's BOS or EOS token)"
            )
    settings = {**_PURE, "eos_token_id": eos_ids(lm, tokenizer) or None, **generation_kwargs}
    eos = torch.as_tensor(settings["eos_token_id"] if settings["eos_token_id"] is not None else [])
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = int(eos.reshape(-1)[0]) if eos.numel() else 0
    settings.setdefault("pad_token_id", pad)
    responses: list[Tensor] = [torch.empty(0, dtype=torch.long)] * len(queries)
    # similar prompt lengths together, so that little is computed on padding
    order = sorted(range(len(queries)), key=lambda i: len(queries[i]))
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        width = max(len(queries[i]) for i in rows)
        ids = torch.full((len(rows), width), pad, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, i in enumerate(rows):
            ids[row, width - len(queries[i]) :] = queries[i]
            mask[row, width - len(queries[i]) :] = 1
        wanted = [n for i in rows if (n := lengths[i]) is not None]
        if wanted:
            settings["max_new_tokens"] = max(wanted)
        with neutral_defaults(lm):
            out = lm.generate(input_ids=ids.to(lm.device), attention_mask=mask.to(lm.device), **settings)
        for row, i in enumerate(rows):
            responses[i] = _cut(out[row, width:].cpu(), eos, lengths[i])
    return responses


def _cut(new_tokens: Tensor, eos: Tensor, length: int | None) -> Tensor:
    """The response proper: up to ``length``, and up to and including the first end token."""
    response = new_tokens[:length]
    ends = torch.isin(response, eos).nonzero()
    return response[: int(ends[0]) + 1] if len(ends) else response


class HalfPrecisionCopy:
    """A half-precision copy of a language model for sampling, refreshed when trained weights have changed.

    Autocast would convert every fp32 weight again for every generated token.
    """

    def __init__(self, source: PreTrainedModel, dtype: torch.dtype):
        self.source = source
        self.copy = cast(Any, copy.deepcopy(source))
        self.copy.to(dtype).eval().requires_grad_(False)
        self._seen = self._versions()

    def current(self) -> Any:
        """The copy (a PreTrainedModel), with the source's weights as they are now."""
        versions = self._versions()
        if versions != self._seen:
            with torch.no_grad():
                for own, original in zip(self.copy.parameters(), self.source.parameters(), strict=True):
                    if original.requires_grad:
                        own.copy_(original)
            self._seen = versions
        return self.copy

    def _versions(self) -> list[int]:
        # torch counts in-place changes of every tensor, whoever makes them
        return [p._version for p in self.source.parameters() if p.requires_grad]
