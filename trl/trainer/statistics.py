"""Statistics of a PPO step: sums and counts reduced over processes, weighted by token."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trl.trainer.rollout import Rollout, Sequences

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over all processes."""


def padded(vectors: Sequence[Tensor], mask: Tensor) -> Tensor:
    """CPU vectors (N_i,) laid out as (B, N) on the mask's device; 0 where the mask is not set."""
    out = torch.zeros(mask.shape)
    for i, vector in enumerate(vectors):
        out[i, : len(vector)] = vector
    return torch.where(mask, out.to(mask.device), 0.0)


def _moments(values: Tensor, mask: Tensor, reduce: Reduce) -> tuple[float, float, float]:
    """Mean, sum of squared deviations and count over the masks of all processes."""
    chosen = values[mask].double()
    total, count = reduce(torch.stack([chosen.sum(), mask.sum().double()])).tolist()
    mean = total / max(count, 1)
    return mean, float(reduce((chosen - mean).square().sum().view(1))[0]), count


def whiten(values: Tensor, mask: Tensor, reduce: Reduce, shift_mean: bool = True) -> Tensor:
    """`trl.core.masked_whiten` over the whole batch of all processes; 0 outside the mask if shifted."""
    mean, squares, count = _moments(values, mask, reduce)
    if count < 2:
        return values
    whitened = (values - mean) * (squares / (count - 1) + 1e-8) ** -0.5
    if not shift_mean:
        return whitened + mean
    return torch.where(mask, whitened, 0.0)


def of_rollout(
    rollout: Rollout,
    rewards: Tensor,
    returns: Tensor,
    mask: Tensor,
    raw: Sequence[Tensor],
    scaled: Sequence[Tensor],
    counted: Sequence[bool],
    kl_coef: float,
    sequences: Sequences,
    reduce: Reduce,
) -> dict[str, float]:
    """The ``objective/*``, value and token statistics of one step.

    Sequence means run over the ``counted`` samples (with a verdict and at least one trained token), token
    means over the mask. ``objective/kl`` is nats per sequence, ``objective/entropy`` nats per token.
    """
    rows = torch.tensor(counted, device=mask.device)

    def mean_over_samples(per_sample: Tensor) -> float:
        total, count = reduce(torch.stack([per_sample[rows].double().sum(), rows.sum().double()])).tolist()
        return total / max(count, 1)

    def totals(vectors: Sequence[Tensor]) -> Tensor:
        return torch.stack([v.sum() for v in vectors]).to(mask.device)

    sequence_kl = (rollout.kl * mask).sum(1)
    scores = totals(scaled)
    entropy, _, tokens = _moments(rollout.entropy, mask, reduce)
    value_mean, value_squares, _ = _moments(rollout.values, mask, reduce)
    return_mean, return_squares, _ = _moments(returns, mask, reduce)
    _, error_squares, _ = _moments(returns - rollout.values, mask, reduce)
    samples = reduce(torch.tensor([len(sequences)])).item()
    lengths = torch.tensor([sum(sequences.query_lengths), sum(sequences.response_lengths)])
    query_tokens, response_tokens = reduce(lengths).tolist()
    return {
        "objective/kl": mean_over_samples(sequence_kl),
        "objective/kl_coef": kl_coef,
        "objective/entropy": entropy,
        "objective/score": mean_over_samples(totals(raw)),
        "objective/rlhf_reward": mean_over_samples(scores - kl_coef * sequence_kl),
        "ppo/mean_non_score_reward": mean_over_samples(-kl_coef * sequence_kl),
        "ppo/returns/mean": return_mean,
        "ppo/returns/var": return_squares / max(tokens - 1, 1),
        "ppo/val/mean": value_mean,
        "ppo/val/var": value_squares / max(tokens - 1, 1),
        "ppo/val/var_explained": 1 - error_squares / return_squares if return_squares > 0 else 0.0,
        "reward/token_mean": _moments(rewards, mask, reduce)[0],
        "tokens/queries": query_tokens,
        "tokens/responses": response_tokens,
        "tokens/trained": tokens,
        "tokens/queries_len_mean": query_tokens / samples,
        "tokens/responses_len_mean": response_tokens / samples,
    }


def flat(config: dict[str, Any]) -> dict[str, Any]:
    """A configuration that every tracker takes: scalars as they are, the rest as text."""
    return {k: v if isinstance(v, int | float | str | bool) else str(v) for k, v in config.items()}
