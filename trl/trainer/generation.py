"""Sampling of responses: batched, left-padded, each response cut to its own length."""

import copy
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl.generation import eos_ids, neutral_defaults, whole_head_input

logger = logging.getLogger(__name__)

_PURE: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "do_sample": True,
    "repetition_penalty": 1.0,
}
_ALSO_BIASING: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("min_length", "min_new_tokens"), (-1,)),
    **dict.fromkeys(("typical_p", "num_beams", "guidance_scale", "encoder_repetition_penalty", "top_h"), (1,)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_p"), ()),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty"), ()),
    **dict.fromkeys(("bad_words_ids", "sequence_bias", "suppress_tokens", "begin_suppress_tokens"), ()),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id", "logits_processor", "watermarking_config"), ()),
}
"""Other settings that change the distribution, with their values that don't (None, 0 and empty never do)."""
_RESHAPING: dict[str, Any] = {"num_return_sequences": 1, "return_dict_in_generate": False}
"""Settings under which the result is no longer one sequence of ids per query, with the values that are fine."""


def biasing_kwargs(generation_kwargs: dict[str, Any]) -> list[str]:
    """Generation settings, as ``name=value``, that make sampling differ from the policy's own distribution."""
    changed = [f"{k}={generation_kwargs[k]}" for k, v in _PURE.items() if generation_kwargs.get(k, v) != v]
    # transformers spells "no top-k filter" as 0 or None
    changed = [text for text in changed if text != "top_k=None"]
    others = {k: generation_kwargs[k] for k in _ALSO_BIASING if k in generation_kwargs}
    return changed + [f"{k}={v}" for k, v in others.items() if v and v not in _ALSO_BIASING[k]]


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
    for name, usual in _RESHAPING.items():
        if generation_kwargs.get(name, usual) not in (usual, None):
            raise ValueError(
                f"{name}={generation_kwargs[name]}: generate gives one response per query; for several, repeat the "
                "query"
            )
    settings = {**_PURE, "eos_token_id": eos_ids(lm, tokenizer), **generation_kwargs}
    _check_room(lm, queries, lengths, settings.get("max_new_tokens"))
    eos = torch.as_tensor([] if settings["eos_token_id"] is None else settings["eos_token_id"]).reshape(-1).long()
    eos = eos[eos >= 0]  # -1 is the classic way to say "none"
    settings["eos_token_id"] = eos.tolist() or None
    pad = settings.setdefault("pad_token_id", tokenizer.pad_token_id)
    if pad is None or pad >= lm.get_input_embeddings().num_embeddings:  # a token added without an embedding
        pad = settings["pad_token_id"] = int(eos[0]) if len(eos) else 0
    stops_early = bool(settings.get("stopping_criteria") or settings.get("stop_strings"))
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
        with neutral_defaults(lm), whole_head_input(lm), _named_if_not_finite(rows):
            out = lm.generate(input_ids=ids.to(lm.device), attention_mask=mask.to(lm.device), **settings)
        for row, i in enumerate(rows):
            responses[i] = _cut(out[row, width:].cpu(), eos, lengths[i])
            if stops_early and pad not in eos:  # padding fills up the rows that ended without an end token
                real = (responses[i] != pad).nonzero()
                responses[i] = responses[i][: int(real[-1]) + 1 if len(real) else 0]
    return responses


@contextmanager
def _named_if_not_finite(rows: Sequence[int]) -> Iterator[None]:
    """torch's sampler refuses NaN with words that name no model and no way out."""
    try:
        yield
    except RuntimeError as error:
        if "probability tensor contains" not in str(error):
            raise
        raise FloatingPointError(
            f"policy logits are not finite while sampling for samples {min(rows)} to {max(rows)} of the batch. Lower "
            "the learning rate, or resume from the last checkpoint."
        ) from error


def _check_room(lm: Any, queries: Sequence[Tensor], lengths: Sequence[int | None], max_new_tokens: int | None) -> None:
    new = max([n for n in lengths if n is not None], default=max_new_tokens or 0)
    limit = context_length(lm)
    for i, query in enumerate(queries):
        if limit is not None and len(query) + new > limit:
            raise ValueError(
                f"queries[{i}] has {len(query)} tokens: with {new} new ones they exceed the {limit} positions of "
                f"{type(lm).__name__}; shorten the query from the left, or generate less"
            )


def context_length(lm: Any) -> int | None:
    """The most tokens that a causal LM (a PreTrainedModel) has positions for; None if it states no limit."""
    # GPT-2's n_positions answers to this name too
    limit: int | None = getattr(lm.config.get_text_config(), "max_position_embeddings", None)
    return limit


def _cut(new_tokens: Tensor, eos: Tensor, length: int | None) -> Tensor:
    """The response proper: up to ``length``, and up to and including the first end token."""
    response = new_tokens[:length]
    ends = torch.isin(response, eos).nonzero()
    return response[: int(ends[0]) + 1] if len(ends) else response


@contextmanager
@torch.no_grad()
def merged_adapters(lm: nn.Module) -> Iterator[None]:
    """LoRA's products added to the weights they adapt, for the block: sampling then runs none of its small layers.

    Afterwards the weights are the same bits as before, which subtracting the products again would not give. Adapters
    that are switched off, and those on quantised or partitioned weights, stay as they are.
    """
    layers = [m for m in lm.modules() if isinstance(m, LoraLayer) and isinstance(m, nn.Module)]
    layers = [layer for layer in layers if not layer.disable_adapters and not layer.merged]
    kept = [(p, p.detach().clone()) for layer in layers for p in layer.get_base_layer().parameters(recurse=False)]
    if not all(p.is_floating_point() and p.numel() for p, _ in kept):
        yield
        return
    for layer in layers:
        layer.merge()
    try:
        yield
    finally:
        for layer in layers:
            layer.unmerge()
        for parameter, original in kept:
            parameter.copy_(original)


class HalfPrecisionCopy:
    """A half-precision copy of a language model for sampling, with the trained weights as they are at each use.

    Autocast would convert every fp32 weight again for every generated token.
    """

    def __init__(self, source: PreTrainedModel, dtype: torch.dtype):
        self.source = source
        self.copy = cast(Any, copy.deepcopy(source))
        self.copy.to(dtype).eval().requires_grad_(False)

    @torch.no_grad()
    def current(self) -> Any:
        """The copy (a PreTrainedModel). Always refreshed: a fused optimizer leaves tensors' version counters alone."""
        for own, original in zip(self.copy.parameters(), self.source.parameters(), strict=True):
            if original.requires_grad:
                own.copy_(original)
        return self.copy
