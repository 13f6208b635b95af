"""Evaluation metrics for generated text: diversity, conditional perplexity, share positive, intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Array = NDArray[np.float64]

PERPLEXITY_CAP = 1e4
"""Continuations at or above it are left out of the capped statistics (as in DExperts' evaluation)."""


class Interval(NamedTuple):
    mean: float
    low: float
    high: float


def bootstrap_interval(
    values: ArrayLike, *, confidence: float = 0.95, resamples: int = 10_000, seed: int = 0, block: int = 1
) -> Interval:
    """Mean of independent units (one value per prompt) with a percentile-bootstrap interval.

    Efron & Tibshirani, An Introduction to the Bootstrap, §13.3. ``block``: for values in order of time, which are
    alike when they are near, resample runs of so many (the circular block bootstrap, Politis & Romano 1992).
    Raises ValueError on empty or non-finite values: leave out undefined units, and count them, before calling.
    """
    data = np.asarray(values, dtype=np.float64)
    if data.ndim != 1 or data.size == 0 or not np.isfinite(data).all():
        raise ValueError(f"expected a non-empty vector of finite numbers, got shape {data.shape}: {data[:5]}…")
    generator = np.random.default_rng(seed)
    means = np.empty(resamples)
    rows = max(1, 2_000_000 // data.size)  # bounds the index matrix at 16 MB
    for start in range(0, resamples, rows):
        stop = min(start + rows, resamples)
        firsts = generator.integers(0, data.size, (stop - start, -(-data.size // block)))
        units = ((firsts[:, :, None] + np.arange(block)) % data.size).reshape(stop - start, -1)[:, : data.size]
        means[start:stop] = data[units].mean(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return Interval(float(data.mean()), float(low), float(high))


def distinct_n(generations: Sequence[Sequence[str]], n: int) -> Array:
    """dist-n of each prompt: unique n-grams / all n-grams over the prompt's generations.

    Tokens are whitespace-separated words, case kept; n-grams do not run across generations (Li et al.
    2016, arXiv:1510.03055, taken per prompt as in the steering literature, which however often divides by
    the number of words for every n). NaN where no generation has n words.
    """
    values = np.full(len(generations), np.nan)
    for index, texts in enumerate(generations):
        grams = [gram for text in texts for gram in _ngrams(text.split(), n)]
        if grams:
            values[index] = len(set(grams)) / len(grams)
    return values


def _ngrams(words: Sequence[str], n: int) -> list[tuple[str, ...]]:
    return [tuple(words[start : start + n]) for start in range(len(words) - n + 1)]


def share_positive(probabilities: Sequence[Sequence[float]], threshold: float = 0.5) -> Array:
    """Per prompt, the share of its generations with P(positive) > threshold; NaN without generations."""
    return np.array(
        [np.mean(np.asarray(row) > threshold) if len(row) else np.nan for row in probabilities],
        dtype=np.float64,
    )


@dataclass(frozen=True)
class ContinuationNLL:
    """Negative log-likelihood (nats) of each continuation and the number of its scored tokens, both (N,)."""

    nll: Array
    tokens: NDArray[np.int64]

    @property
    def perplexity(self) -> Array:
        """exp(mean NLL per token), (N,); NaN where nothing was scored, inf where it overflows."""
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            return np.where(self.tokens > 0, np.exp(self.nll / np.maximum(self.tokens, 1)), np.nan)


def perplexity_summary(scores: ContinuationNLL, cap: float = PERPLEXITY_CAP) -> dict[str, float | int]:
    """Mean and median over continuations, with and without the cap, and what was left out.

    ``dropped`` counts continuations at or above the cap (left out of ``*_capped`` only), ``empty`` those
    without a scored token and ``undefined`` those whose likelihood is not a number (both left out everywhere).
    ``corpus`` is exp(total NLL / total tokens).
    """
    undefined = np.isnan(scores.nll)
    values = scores.perplexity
    values = values[~np.isnan(values)]
    below = values[values < cap]
    total = int(scores.tokens[~undefined].sum())
    return {
        "mean_capped": float(below.mean()) if below.size else math.nan,
        "median_capped": float(np.median(below)) if below.size else math.nan,
        "mean": float(values.mean()) if values.size else math.nan,
        "median": float(np.median(values)) if values.size else math.nan,
        "corpus": math.exp(min(float(scores.nll[~undefined].sum()) / total, 700.0)) if total else math.nan,
        "dropped": int((values >= cap).sum()),
        "empty": int((scores.tokens == 0).sum()),
        "undefined": int((undefined & (scores.tokens > 0)).sum()),
        "continuations": len(scores.tokens),
    }


def perplexity_intervals(
    scores: ContinuationNLL,
    prompt_of: NDArray[np.int64],
    cap: float = PERPLEXITY_CAP,
    *,
    resamples: int = 2000,
    seed: int = 0,
) -> dict[str, dict[str, float] | None]:
    """95 % bootstrap intervals of `perplexity_summary`'s means and medians; whole prompts are resampled.

    The continuations of one prompt are alike, so they are no independent units (Davison & Hinkley 1997, §3.8).
    ``prompt_of``: the prompt's index of each continuation, (N,). None where nothing was scored.
    """
    values = scores.perplexity
    kept = ~np.isnan(values)
    prompts = np.unique(prompt_of[kept], return_inverse=True)[1]
    order = np.argsort(values[kept])
    ordered, owners = values[kept][order], prompts[order]  # sorted, so that a weighted median is a search
    result: dict[str, dict[str, float] | None] = {}
    for suffix, count in (("_capped", int(np.searchsorted(ordered, cap))), ("", len(ordered))):
        means, medians = _pooled(ordered[:count], owners[:count], resamples, seed)
        for name, draws in (("mean", means), ("median", medians)):
            low, high = np.quantile(draws, [0.025, 0.975]) if draws.size else (np.nan, np.nan)
            result[name + suffix] = {"low": float(low), "high": float(high)} if draws.size else None
    return result


def _pooled(ordered: Array, owners: NDArray[np.int64], resamples: int, seed: int) -> tuple[Array, Array]:
    """Means and medians of the pooled values of resampled owners; resamples without a value are left out."""
    if not ordered.size:
        return np.empty(0), np.empty(0)
    generator = np.random.default_rng(seed)
    size = int(owners.max()) + 1
    means, medians = [], []
    for _ in range(resamples):
        weights = np.bincount(generator.integers(0, size, size), minlength=size)[owners]
        cumulative = np.cumsum(weights)
        total = int(cumulative[-1])
        if total:
            used = weights > 0  # 0 times infinity is not 0
            means.append(float(weights[used] @ ordered[used]) / total)
            middle = np.searchsorted(cumulative, [(total + 1) // 2, total // 2 + 1])
            medians.append(float(ordered[middle].mean()))
    return np.array(means), np.array(medians)


def position_limit(model: "PreTrainedModel") -> int:
    """The most tokens the model can read; models without positions (Mamba, ALiBi) get 2,048 per window."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2048


class _Window(NamedTuple):
    """One forward pass over ``ids``: its tokens from ``first`` on belong to continuation ``sample``."""

    sample: int
    ids: list[int]
    first: int


def continuation_nll(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    continuations: Sequence[str],
    *,
    batch_size: int = 16,
    max_length: int | None = None,
    max_batch_tokens: int = 4096,
) -> ContinuationNLL:
    """Score each continuation given its prompt under a causal language model.

    Prompt + continuation is tokenised once, as the model would read it; a token belongs to the continuation
    when its characters reach beyond the prompt, so one that straddles the border counts. The tokenizer's
    own special tokens are kept; where the first token belongs to the continuation it is preceded by BOS if
    the tokenizer has one, and otherwise it cannot be scored. Inputs longer than ``max_length`` (default: the
    model's positions) run in windows that overlap by half, each continuation token scored once.

    Raises ValueError when the tokenizer gives no character offsets (a slow tokenizer).
    """
    import torch

    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} is a slow tokenizer without character offsets; load the fast one")
    if len(prompts) != len(continuations):
        raise ValueError(f"{len(prompts)} prompts but {len(continuations)} continuations")
    limit = max_length or position_limit(model)
    windows: list[_Window] = []
    for sample, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        ids, first = _tokenise(tokenizer, prompt, continuation)
        windows += _windows(sample, ids, first, limit)
    windows.sort(key=lambda window: len(window.ids), reverse=True)

    nll = np.zeros(len(prompts))
    counts = np.zeros(len(prompts), dtype=np.int64)
    was_training = model.training
    model.eval()
    with torch.inference_mode():
        start = 0
        while start < len(windows):
            size = max(1, min(batch_size, max_batch_tokens // len(windows[start].ids)))
            batch = windows[start : start + size]
            for window, total in zip(batch, _batch_nll(model, batch), strict=True):
                nll[window.sample] += total
                counts[window.sample] += len(window.ids) - window.first
            start += size
    model.train(was_training)
    return ContinuationNLL(nll, counts)


def _tokenise(tokenizer: "PreTrainedTokenizerBase", prompt: str, continuation: str) -> tuple[list[int], int]:
    """Token ids of prompt + continuation and the index of the continuation's first scorable token."""
    encoded = tokenizer(prompt + continuation, return_offsets_mapping=True, truncation=False, verbose=False)
    ids: list[int] = list(encoded["input_ids"])
    ends = [end for _, end in encoded["offset_mapping"]]  # special tokens end at 0
    # An EOS that the tokenizer appends is no part of the text; tokens behind the border are contiguous.
    inside = [index for index, end in enumerate(ends) if end > len(prompt)]
    if not inside:
        return [], 0
    ids = ids[: inside[-1] + 1]
    first = inside[0]
    if first == 0 and tokenizer.bos_token_id is not None:
        return [tokenizer.bos_token_id, *ids], 1
    return ids, max(first, 1)


def _windows(sample: int, ids: list[int], first: int, limit: int) -> list[_Window]:
    windows = []
    while first < len(ids):
        end = min(len(ids), max(first + limit // 2, limit))
        start = max(0, end - limit)
        windows.append(_Window(sample, ids[start:end], first - start))
        first = end
    return windows


def _batch_nll(model: "PreTrainedModel", batch: Sequence[_Window]) -> list[float]:
    """Summed NLL of each window's scored tokens; right padding, which a causal model never looks at."""
    import torch

    longest = max(len(window.ids) for window in batch)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)  # (B, T); id 0 under the mask
    attention = torch.zeros_like(ids)
    scored = torch.zeros(len(batch), longest, dtype=torch.bool)
    for row, window in enumerate(batch):
        ids[row, : len(window.ids)] = torch.tensor(window.ids)
        attention[row, : len(window.ids)] = 1
        scored[row, window.first : len(window.ids)] = True
    ids, attention, scored = (tensor.to(model.device) for tensor in (ids, attention, scored))
    logits: torch.Tensor = model(input_ids=ids, attention_mask=attention, use_cache=False).logits
    target = scored[:, 1:]
    rows = torch.nn.functional.cross_entropy(
        logits[:, :-1][target].float(), ids[:, 1:][target], reduction="none"
    )  # (scored tokens,)
    sums = torch.zeros(len(batch), dtype=torch.float64, device=rows.device)
    sums.index_add_(0, target.nonzero()[:, 0], rows.double())
    return sums.tolist()
