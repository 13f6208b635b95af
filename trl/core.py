"""Pure tensor functions of PPO with token-level rewards. No I/O, no models, no state.

Conventions: B samples, N response tokens, V vocabulary; a mask of 1 means "this position counts".
Statistics are computed in fp32 whatever the dtype of the inputs.
"""

import random
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor


def set_seed(seed: int) -> None:
    """Seed the generators of python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class LengthSampler:
    """Draws response lengths uniformly from ``min_value`` to ``max_value``, both inclusive.

    Uses torch's global generator, so that a checkpoint of its state restores the draws.
    """

    def __init__(self, min_value: int, max_value: int):
        if not 1 <= min_value <= max_value:
            raise ValueError(f"LengthSampler needs 1 <= min <= max, got min={min_value} and max={max_value}")
        self.min_value = min_value
        self.max_value = max_value

    def __call__(self) -> int:
        return int(torch.randint(self.min_value, self.max_value + 1, (1,)).item())


def _fp32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Half-precision tensors in fp32; others as they are."""
    return tuple(t.float() if t.is_floating_point() and t.element_size() < 4 else t for t in tensors)


def masked_mean(values: Tensor, mask: Tensor, dim: int | None = None) -> Tensor:
    """Mean of ``values`` where ``mask`` is 1, over all positions or along ``dim``; 0 where nothing counts."""
    (values,) = _fp32(values)
    mask = mask.to(values.dtype)
    # where, not multiplication: a NaN or inf at a masked position must not leak in
    kept = torch.where(mask.bool(), values, torch.zeros_like(values))
    if dim is None:
        return kept.sum() / mask.sum().clamp(min=1)
    return kept.sum(dim) / mask.sum(dim).clamp(min=1)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Variance of ``values`` where ``mask`` is 1 (Bessel-corrected if ``unbiased``); 0 for fewer than 2."""
    (values,) = _fp32(values)
    count = mask.sum()
    if count < 2:
        return torch.zeros((), dtype=values.dtype, device=values.device)
    variance = masked_mean((values - masked_mean(values, mask)) ** 2, mask)
    return variance * count / (count - 1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """``values`` scaled to unit variance over the mask, and to mean 0 if ``shift_mean``.

    A single counted value passes through unchanged: it has no spread to be scaled by.
    """
    (values,) = _fp32(values)
    if mask.sum() < 2:
        return values
    mean, variance = masked_mean(values, mask), masked_var(values, mask)
    whitened = (values - mean) * torch.rsqrt(variance + 1e-8)
    return whitened if shift_mean else whitened + mean


def logprobs_from_logits(logits: Tensor, labels: Tensor) -> Tensor:
    """Log-probability of each label, fp32. logits (..., V), labels (...) -> (...)."""
    flat = F.cross_entropy(logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1), reduction="none")
    return -flat.view(labels.shape)


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy in nats of the distributions given by logits (..., V) -> (...), fp32."""
    logprobs = F.log_softmax(logits.float(), dim=-1)
    # clamped, since an impossible token (logit -inf) has no entropy, while 0 * -inf is NaN
    return -torch.sum(logprobs.exp() * logprobs.clamp(min=torch.finfo(logprobs.dtype).min), dim=-1)


def kl_penalty(logprobs: Tensor, ref_logprobs: Tensor, kind: str = "kl") -> Tensor:
    """Per-token divergence of the policy from the reference (Ziegler et al. 2019, section 2.2).

    ``kl`` lp - ref, ``abs`` |lp - ref|, ``mse`` (lp - ref)^2 / 2: inputs and result have one shape.
    ``full``: both inputs are full log-distributions (..., V); the result (...) is sum_v p log(p/q) >= 0.
    """
    logprobs, ref_logprobs = _fp32(logprobs, ref_logprobs)
    if kind == "kl":
        return logprobs - ref_logprobs
    if kind == "abs":
        return (logprobs - ref_logprobs).abs()
    if kind == "mse":
        return 0.5 * (logprobs - ref_logprobs).square()
    if kind == "full":
        terms = F.kl_div(ref_logprobs, logprobs, log_target=True, reduction="none")
        return terms.masked_fill(logprobs == -torch.inf, 0.0).sum(-1)  # where p is 0, so is p log(p/q)
    raise ValueError(f"unknown kl_penalty {kind!r}: expected one of 'kl', 'abs', 'mse', 'full'")


def gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float = 1.0, lam: float = 0.95) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation (Schulman et al. 2015, eq. 16), right to left, no bootstrap.

    rewards, values, mask: (B, N). A masked position is stepped over: it takes no discount and gets
    advantage and return 0. Returns (advantages, returns), with returns = advantages + values.
    """
    rewards, values = _fp32(rewards, values)
    keep = mask.bool()
    advantages = torch.zeros_like(values)
    next_value = values.new_zeros(values.shape[0])
    carried = values.new_zeros(values.shape[0])
    for t in reversed(range(values.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        carried = torch.where(keep[:, t], delta + gamma * lam * carried, carried)
        next_value = torch.where(keep[:, t], values[:, t], next_value)
        advantages[:, t] = torch.where(keep[:, t], carried, 0.0)
    return advantages, torch.where(keep, advantages + values, 0.0)


def ppo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    values: Tensor,
    old_values: Tensor,
    advantages: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    cliprange: float = 0.2,
    cliprange_value: float = 0.2,
    vf_coef: float = 0.1,
    num_tokens: Tensor | float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Clipped PPO objective with clipped value loss (Schulman et al. 2017, eq. 7 and 9).

    All tensors have one shape. Sums over the mask are divided by ``num_tokens``, by default the mask's own
    count; pass the count of the whole optimizer step to accumulate slices of it. ``stats`` holds detached
    scalars with the same division: loss/policy, loss/value, loss/total, policy/ratio, policy/clipfrac,
    policy/approxkl (half the squared log-ratio), policy/policykl (old - new), val/clipfrac, val/error.
    """
    logprobs, old_logprobs, values, old_values = _fp32(logprobs, old_logprobs, values, old_values)
    advantages, returns = _fp32(advantages, returns)
    keep = mask.bool()
    denominator = keep.sum().clamp(min=1) if num_tokens is None else num_tokens

    def average(per_token: Tensor) -> Tensor:
        return torch.where(keep, per_token, 0.0).sum() / denominator

    # masked positions get log-ratio 0, so that exp never overflows there and no NaN enters the gradient
    log_ratio = torch.where(keep, logprobs - old_logprobs, 0.0)
    ratio = log_ratio.exp()
    unclipped = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - cliprange, 1.0 + cliprange)
    policy_loss = average(torch.maximum(unclipped, clipped))

    clipped_values = old_values + (values - old_values).clamp(-cliprange_value, cliprange_value)
    error, clipped_error = (values - returns).square(), (clipped_values - returns).square()
    value_loss = 0.5 * average(torch.maximum(error, clipped_error))

    loss = policy_loss + vf_coef * value_loss
    with torch.no_grad():
        value_moved = (values - old_values).abs() > cliprange_value
        stats = {
            "loss/policy": policy_loss.detach(),
            "loss/value": value_loss.detach(),
            "loss/total": loss.detach(),
            "policy/ratio": average(ratio),
            "policy/clipfrac": average((clipped > unclipped).float()),
            "policy/approxkl": average(0.5 * log_ratio.square()),
            "policy/policykl": average(-log_ratio),
            # old + (new - old) rounds: only a value that was moved counts
            "val/clipfrac": average((value_moved & (clipped_error > error)).float()),
            "val/error": average(error),
        }
    return loss, stats


def merge_rewards(
    scores: Sequence[float | Tensor], token_rewards: Sequence[Tensor], scale: float = 1.0
) -> list[Tensor]:
    """Pseudo-token reward plus intrinsic rewards: each score, times ``scale``, joins its last token's reward.

    scores: B sequence scores; token_rewards: B vectors (N_i,). Returns B fp32 vectors (N_i,), the kind of
    score that ``PPOTrainer.step`` takes. A NaN score ("no verdict") makes its whole vector no verdict.
    """
    if len(scores) != len(token_rewards):
        raise ValueError(f"got {len(scores)} scores but {len(token_rewards)} token reward vectors")
    merged = []
    for score, rewards in zip(scores, token_rewards, strict=True):
        vector = rewards.detach().float().cpu().clone()
        if len(vector):
            vector[-1] += float(score) * scale
        merged.append(vector)
    return merged
