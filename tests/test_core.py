"""The pure functions of PPO against known numbers, slow twins and properties."""

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from trl.core import (
    LengthSampler,
    entropy_from_logits,
    gae,
    kl_penalty,
    logprobs_from_logits,
    masked_mean,
    masked_var,
    masked_whiten,
    merge_rewards,
    ppo_loss,
    set_seed,
)

KNOWN = json.loads((Path(__file__).parent / "cases" / "ppo.json").read_text())
GARBAGE = 1e6
"""What padding holds in the tests: finite, and large enough to show wherever it leaks."""

lengths = st.lists(st.integers(1, 6), min_size=1, max_size=4)


def ragged(seed: int, sizes: list[int], width: int, fill: float = 0.0) -> tuple[Tensor, Tensor]:
    """Random right-padded rows of the given sizes, and their mask."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.full((len(sizes), width), fill)
    mask = torch.zeros(len(sizes), width, dtype=torch.long)
    for row, size in enumerate(sizes):
        values[row, :size] = torch.randn(size, generator=generator)
        mask[row, :size] = 1
    return values, mask


# --- masked statistics ------------------------------------------------------------------------------------


def test_masked_mean_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0, 99.0], [4.0, 99.0, 99.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert masked_mean(values, mask).item() == pytest.approx(7 / 3)
    torch.testing.assert_close(masked_mean(values, mask, dim=1), torch.tensor([1.5, 4.0]))
    torch.testing.assert_close(masked_mean(values, mask, dim=0)[:2], torch.tensor([2.5, 2.0]))


def test_masked_mean_of_a_row_that_counts_nothing_is_finite() -> None:
    mean = masked_mean(torch.ones(2, 3), torch.tensor([[1, 1, 1], [0, 0, 0]]), dim=1)
    assert torch.isfinite(mean).all()
    assert mean[0] == 1.0


def test_masked_var_by_hand() -> None:
    values, mask = torch.tensor([1.0, 2.0, 6.0, -50.0]), torch.tensor([1, 1, 1, 0])
    assert masked_var(values, mask).item() == pytest.approx(7.0)  # ((−2)² + (−1)² + 3²) / 2
    assert masked_var(values, mask, unbiased=False).item() == pytest.approx(14 / 3)


def test_masked_whiten_gives_mean_zero_and_variance_one() -> None:
    values, mask = ragged(0, [5, 3, 1], 6, fill=GARBAGE)
    whitened = masked_whiten(3 + 10 * values, mask)
    counted = whitened[mask.bool()]
    assert counted.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert counted.var().item() == pytest.approx(1.0, abs=1e-5)


def test_masked_whiten_can_keep_the_mean() -> None:
    values, mask = torch.tensor([1.0, 3.0, 99.0]), torch.tensor([1, 1, 0])
    kept = masked_whiten(values, mask, shift_mean=False)[:2]
    torch.testing.assert_close(kept, torch.tensor([2 - math.sqrt(0.5), 2 + math.sqrt(0.5)]))


@pytest.mark.parametrize("shift_mean", [True, False])
def test_masked_whiten_passes_a_single_token_through(shift_mean: bool) -> None:
    values = torch.tensor([[-3.5, 8.0], [7.0, 7.0]])
    mask = torch.tensor([[1, 0], [0, 0]])
    assert masked_whiten(values, mask, shift_mean=shift_mean)[0, 0].item() == -3.5


def test_masked_whiten_of_equal_values_is_finite() -> None:
    whitened = masked_whiten(torch.full((2, 3), 0.7), torch.ones(2, 3))
    torch.testing.assert_close(whitened, torch.zeros(2, 3))


@given(st.integers(0, 10**6), lengths, st.integers(0, 4))
def test_padding_never_changes_masked_statistics(seed: int, sizes: list[int], extra: int) -> None:
    bare, bare_mask = ragged(seed, sizes, max(sizes))
    padded, mask = ragged(seed, sizes, max(sizes) + extra, fill=GARBAGE)
    for function in (masked_mean, masked_var):
        torch.testing.assert_close(function(padded, mask), function(bare, bare_mask))
    whitened, expected = masked_whiten(padded, mask), masked_whiten(bare, bare_mask)
    torch.testing.assert_close(whitened[mask.bool()], expected[bare_mask.bool()])


def test_nan_in_padding_stays_there() -> None:
    values, mask = torch.tensor([1.0, 2.0, math.nan]), torch.tensor([1, 1, 0])
    assert masked_mean(values, mask).item() == 1.5
    assert masked_var(values, mask).item() == 0.5
    assert torch.isfinite(masked_whiten(values, mask)[:2]).all()


# --- log-probabilities, entropy, KL -----------------------------------------------------------------------


def slow_logprobs(logits: Tensor, labels: Tensor) -> Tensor:
    """One position at a time in double precision."""
    out = torch.empty(labels.shape, dtype=torch.float64)
    for index in torch.cartesian_prod(*(torch.arange(n) for n in labels.shape)).reshape(-1, labels.dim()):
        at = tuple(index.tolist())
        scores = [float(x) for x in logits[at]]
        top = max(scores)
        normaliser = top + math.log(sum(math.exp(x - top) for x in scores))
        out[at] = scores[int(labels[at])] - normaliser
    return out.float()


def slow_entropy(logits: Tensor) -> Tensor:
    """−Σ p log p over the vocabulary, one position at a time in double precision."""
    rows = []
    for row in logits.reshape(-1, logits.shape[-1]).double():
        p = row.softmax(0)
        rows.append(-sum(float(x) * math.log(float(x)) for x in p if x > 0))
    return torch.tensor(rows).reshape(logits.shape[:-1])


@pytest.mark.parametrize("shape", [(5,), (2, 3)])
def test_logprobs_and_entropy_equal_their_slow_twins(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = 5 * torch.randn(*shape, 11, generator=generator)
    labels = torch.randint(11, shape, generator=generator)
    fast = logprobs_from_logits(logits, labels)
    assert fast.shape == labels.shape
    torch.testing.assert_close(fast, slow_logprobs(logits, labels), atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy_from_logits(logits), slow_entropy(logits), atol=1e-5, rtol=0)


def test_logprobs_survive_large_logits() -> None:
    logits = torch.tensor([[1e4, 0.0], [-1e4, -1e4]])
    got = logprobs_from_logits(logits, torch.tensor([0, 1]))
    torch.testing.assert_close(got, torch.tensor([0.0, -math.log(2)]))
    torch.testing.assert_close(entropy_from_logits(logits), torch.tensor([0.0, math.log(2)]))


def test_entropy_of_a_uniform_distribution() -> None:
    assert entropy_from_logits(torch.full((4, 50), 3.0))[2].item() == pytest.approx(math.log(50))


def test_logprobs_carry_the_gradient_of_softmax() -> None:
    logits = torch.tensor([[0.2, -0.4, 1.0]], requires_grad=True)
    logprobs_from_logits(logits, torch.tensor([2])).sum().backward()
    expected = torch.tensor([[0.0, 0.0, 1.0]]) - logits.detach().softmax(-1)
    torch.testing.assert_close(logits.grad, expected)


@pytest.mark.parametrize("kind", ["kl", "abs", "mse"])
def test_kl_of_the_known_case(kind: str) -> None:
    known = KNOWN["kl"]
    got = kl_penalty(torch.tensor(known["logp"]).float(), torch.tensor(known["ref"]).float(), kind)
    torch.testing.assert_close(got, torch.tensor(known[kind]))


def test_kl_default_is_the_plain_difference() -> None:
    assert kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.5])).item() == 0.5


def test_full_kl_by_hand() -> None:
    policy, reference = torch.tensor([[0.5, 0.25, 0.25]]), torch.tensor([[0.25, 0.5, 0.25]])
    got = kl_penalty(policy.log(), reference.log(), "full")
    assert got.shape == (1,)
    assert got.item() == pytest.approx(0.5 * math.log(2) - 0.25 * math.log(2))


@given(st.integers(0, 10**6), st.floats(0.01, 20.0))
def test_full_kl_is_never_negative_and_zero_only_without_a_difference(seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    policy, reference = (scale * torch.randn(2, 3, 9, generator=generator)).log_softmax(-1)
    full = kl_penalty(policy, reference, "full")
    assert full.shape == (3,)
    assert (full >= -1e-6).all()
    torch.testing.assert_close(kl_penalty(policy, policy, "full"), torch.zeros(3))


def test_unknown_kl_kind_is_named() -> None:
    with pytest.raises(ValueError, match=r"'k3'.*kl.*abs.*mse.*full"):
        kl_penalty(torch.zeros(1), torch.zeros(1), "k3")


# --- advantages -------------------------------------------------------------------------------------------


def slow_gae(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    """A_t = Σ_k (γλ)^k δ_{t+k} as written in the paper, for one sample without padding."""
    n = len(values)
    following = [*values[1:], 0.0]
    deltas = [rewards[t] + gamma * following[t] - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


@pytest.mark.parametrize("case", KNOWN["cases"], ids=lambda case: next(iter(case)))
def test_gae_of_the_known_cases(case: dict[str, Any]) -> None:
    rewards = case.get("token_rewards", [0.0, 0.0, case.get("score")])
    advantages, returns = gae(
        torch.tensor([rewards]),
        torch.tensor([KNOWN["values"]]),
        torch.ones(1, 3),
        gamma=KNOWN["gamma"],
        lam=KNOWN["lam"],
    )
    torch.testing.assert_close(advantages, torch.tensor([case["advantages"]]))
    if "returns" in case:
        torch.testing.assert_close(returns, torch.tensor([case["returns"]]))


@given(st.integers(0, 10**6), lengths, st.floats(0.5, 1.0), st.floats(0.0, 1.0))
def test_gae_equals_its_slow_twin(seed: int, sizes: list[int], gamma: float, lam: float) -> None:
    width = max(sizes) + 2
    rewards, mask = ragged(seed, sizes, width, fill=GARBAGE)
    values, _ = ragged(seed + 1, sizes, width, fill=-GARBAGE)
    advantages, returns = gae(rewards, values, mask, gamma, lam)
    for row, size in enumerate(sizes):
        v = values[row, :size]
        slow = torch.tensor(slow_gae(rewards[row, :size].tolist(), v.tolist(), gamma, lam))
        torch.testing.assert_close(advantages[row, :size], slow, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(returns[row, :size], slow + v, atol=1e-5, rtol=1e-5)


@given(st.integers(0, 10**6), st.lists(st.booleans(), min_size=1, max_size=8).filter(any))
def test_a_masked_token_inside_takes_no_discount(seed: int, keep: list[bool]) -> None:
    kept = torch.tensor(keep)
    rewards, values = torch.randn(2, 1, len(keep), generator=torch.Generator().manual_seed(seed))
    junk = torch.full_like(rewards, GARBAGE)
    got, got_returns = gae(torch.where(kept, rewards, junk), torch.where(kept, values, -junk), kept[None], 0.9, 0.8)
    short = kept.sum().item()
    expected, expected_returns = gae(rewards[:, kept], values[:, kept], torch.ones(1, short), 0.9, 0.8)
    torch.testing.assert_close(got[:, kept], expected)
    torch.testing.assert_close(got_returns[:, kept], expected_returns)


def test_padding_side_never_changes_gae() -> None:
    rewards, values = torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(3))
    pad = torch.full((1, 2), GARBAGE)
    ones, zeros = torch.ones(1, 4), torch.zeros(1, 2)
    left, _ = gae(*(torch.cat([pad, x], 1) for x in (rewards, values)), torch.cat([zeros, ones], 1))
    right, _ = gae(*(torch.cat([x, pad], 1) for x in (rewards, values)), torch.cat([ones, zeros], 1))
    torch.testing.assert_close(left[:, 2:], right[:, :4], atol=0, rtol=0)


def test_gae_of_empty_responses() -> None:
    advantages, returns = gae(torch.zeros(2, 0), torch.zeros(2, 0), torch.zeros(2, 0))
    assert advantages.shape == returns.shape == (2, 0)
    advantages, _ = gae(torch.ones(1, 3), torch.ones(1, 3), torch.zeros(1, 3))
    assert torch.isfinite(advantages).all()


def test_gae_leaves_its_inputs_alone() -> None:
    rewards, values = torch.randn(2, 2, 3, generator=torch.Generator().manual_seed(4))
    before = rewards.clone(), values.clone()
    gae(rewards, values, torch.tensor([[1, 1, 0], [1, 1, 1]]))
    assert torch.equal(rewards, before[0])
    assert torch.equal(values, before[1])


# --- loss -------------------------------------------------------------------------------------------------


def hand_case() -> dict[str, Tensor]:
    """Four tokens: ratio above and below the clip range, each with an advantage of either sign."""
    return {
        "logprobs": torch.tensor([[1.5, 1.5, 0.5, 0.5]]).log(),
        "old_logprobs": torch.zeros(1, 4),
        "values": torch.tensor([[0.5, 0.1, 0.5, -0.5]]),
        "old_values": torch.zeros(1, 4),
        "advantages": torch.tensor([[1.0, -1.0, 1.0, -1.0]]),
        "returns": torch.tensor([[1.0, 1.0, -1.0, 1.0]]),
        "mask": torch.ones(1, 4),
    }


def test_ppo_loss_by_hand_with_clipping_on_both_sides() -> None:
    loss, stats = ppo_loss(**hand_case())
    # policy: max(-1.5, -1.2), max(1.5, 1.2), max(-.5, -.8), max(.5, .8)
    assert stats["loss/policy"].item() == pytest.approx((-1.2 + 1.5 - 0.5 + 0.8) / 4)
    # value: (.2-1)² beats (.5-1)²; .1 is inside the range; (.5+1)² beats (.2+1)²; (-.5-1)² beats (-.2-1)²
    assert stats["loss/value"].item() == pytest.approx(0.5 * (0.64 + 0.81 + 2.25 + 2.25) / 4)
    assert loss.item() == pytest.approx(0.15 + 0.1 * 0.74375)
    assert stats["loss/total"].item() == pytest.approx(loss.item())
    assert stats["policy/clipfrac"].item() == pytest.approx(0.5)
    assert stats["val/clipfrac"].item() == pytest.approx(0.25)
    assert stats["policy/ratio"].item() == pytest.approx(1.0)
    logs = [math.log(1.5), math.log(0.5)]
    assert stats["policy/approxkl"].item() == pytest.approx(sum(x * x for x in logs) / 4)
    assert stats["policy/policykl"].item() == pytest.approx(-sum(logs) / 2)


def test_ppo_loss_gradients_stop_where_it_clips() -> None:
    case = hand_case()
    case["logprobs"].requires_grad_()
    case["values"].requires_grad_()
    ppo_loss(**case, vf_coef=0.1)[0].backward()
    torch.testing.assert_close(case["logprobs"].grad, torch.tensor([[0.0, 1.5, -0.5, 0.0]]) / 4)
    torch.testing.assert_close(case["values"].grad, 0.1 * torch.tensor([[0.0, -0.9, 1.5, -1.5]]) / 4)


def test_ppo_loss_coefficients() -> None:
    case = hand_case()
    wide, stats = ppo_loss(**case, cliprange=10.0, cliprange_value=10.0, vf_coef=1.0)
    assert stats["loss/policy"].item() == pytest.approx((-1.5 + 1.5 - 0.5 + 0.5) / 4)
    assert stats["loss/value"].item() == pytest.approx(0.5 * (0.25 + 0.81 + 2.25 + 2.25) / 4)
    assert wide.item() == pytest.approx(stats["loss/policy"].item() + stats["loss/value"].item())
    assert stats["policy/clipfrac"].item() == 0.0


def random_case(seed: int, sizes: list[int], width: int, fill: float) -> dict[str, Tensor]:
    names = ["logprobs", "old_logprobs", "values", "old_values", "advantages", "returns"]
    case = {name: ragged(seed + i, sizes, width, fill)[0] for i, name in enumerate(names)}
    return {**case, "mask": ragged(seed, sizes, width)[1]}


@given(st.integers(0, 10**6), lengths, st.integers(0, 3), st.sampled_from([GARBAGE, -GARBAGE, 80.0]))
def test_padding_never_changes_loss_or_gradients(seed: int, sizes: list[int], extra: int, fill: float) -> None:
    width = max(sizes)
    bare, padded = random_case(seed, sizes, width, 0.0), random_case(seed, sizes, width + extra, fill)
    padded["logprobs"][~padded["mask"].bool()] *= -1  # a ratio of exp(±2e6): overflow or zero
    for case in (bare, padded):
        case["logprobs"].requires_grad_()
        case["values"].requires_grad_()
        case["loss"], case["stats"] = ppo_loss(**case)
        case["loss"].backward()
    torch.testing.assert_close(padded["loss"], bare["loss"])
    torch.testing.assert_close(padded["stats"], bare["stats"])
    keep = padded["mask"].bool()
    for name in ("logprobs", "values"):
        torch.testing.assert_close(padded[name].grad[keep], bare[name].grad[bare["mask"].bool()])
        assert (padded[name].grad[~keep] == 0).all()


@given(st.integers(0, 10**6), st.lists(st.integers(1, 6), min_size=2, max_size=6))
def test_slices_over_one_token_count_add_up_to_the_whole_batch(seed: int, sizes: list[int]) -> None:
    case = random_case(seed, sizes, max(sizes), 0.0)
    whole, _ = ppo_loss(**case)
    tokens = float(sum(sizes))
    parts = [ppo_loss(**{k: v[i : i + 1] for k, v in case.items()}, num_tokens=tokens)[0] for i in range(len(sizes))]
    torch.testing.assert_close(torch.stack(parts).sum(), whole, atol=1e-5, rtol=1e-5)


def test_ppo_loss_of_nothing_is_zero() -> None:
    case = random_case(0, [2], 2, 0.0)
    loss, stats = ppo_loss(**{**case, "mask": torch.zeros(1, 2)})
    assert loss.item() == 0.0
    assert all(torch.isfinite(v).all() for v in stats.values())


# --- precision, scores, sampling --------------------------------------------------------------------------

BF16_CALLS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "logprobs_from_logits": lambda x, m: logprobs_from_logits(x, torch.zeros(x.shape[0], dtype=torch.long)),
    "entropy_from_logits": lambda x, m: entropy_from_logits(x),
    "kl_penalty": lambda x, m: kl_penalty(x, 2 * x),
    "masked_mean": masked_mean,
    "masked_var": masked_var,
    "masked_whiten": masked_whiten,
    "gae": lambda x, m: gae(x, x, m)[0],
    "ppo_loss": lambda x, m: ppo_loss(x, x, x, x, x, x, m)[0],
}


@pytest.mark.parametrize("name", BF16_CALLS)
def test_bf16_input_gives_fp32_output(name: str) -> None:
    x = torch.randn(3, 300, generator=torch.Generator().manual_seed(5)).bfloat16()
    mask = torch.ones(3, 300, dtype=torch.long)
    got = BF16_CALLS[name](x, mask)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, BF16_CALLS[name](x.float(), mask), atol=1e-6, rtol=1e-6)


def test_a_score_and_the_vector_that_ends_with_it_are_the_same_reward() -> None:
    values, mask = torch.tensor([KNOWN["values"]]), torch.ones(1, 3)
    [from_score] = merge_rewards([1.0], [torch.zeros(3)])
    vector = torch.tensor([0.0, 0.0, 1.0])
    assert torch.equal(from_score, vector)
    for a, b in zip(gae(from_score[None], values, mask), gae(vector[None], values, mask), strict=True):
        assert torch.equal(a, b)


def test_merge_rewards_adds_the_score_to_the_last_token() -> None:
    rewards = [torch.tensor([0.5, -0.25]), torch.tensor([]), torch.tensor([1.0])]
    merged = merge_rewards([2.0, 9.0, torch.tensor(-1.0)], rewards, scale=0.5)
    assert [v.tolist() for v in merged] == [[0.5, 0.75], [], [0.5]]
    assert rewards[0].tolist() == [0.5, -0.25]
    with pytest.raises(ValueError, match=r"2 scores.*1 token"):
        merge_rewards([1.0, 2.0], [torch.zeros(1)])


def test_length_sampler_reaches_both_ends_evenly() -> None:
    set_seed(0)
    sampler = LengthSampler(2, 4)
    counts = {n: 0 for n in (2, 3, 4)}
    for _ in range(3000):
        counts[sampler()] += 1  # a KeyError is a draw out of range
    assert all(900 < count < 1100 for count in counts.values())
    assert LengthSampler(7, 7)() == 7
    assert isinstance(sampler(), int)


@pytest.mark.parametrize("bounds", [(5, 4), (0, 3), (-1, 2)])
def test_length_sampler_refuses_impossible_bounds(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"{bounds[0]}.*{bounds[1]}"):
        LengthSampler(*bounds)


def test_set_seed_repeats_every_generator() -> None:
    def draw() -> tuple[float, float, float, int]:
        set_seed(123)
        return random.random(), float(np.random.rand()), torch.rand(()).item(), LengthSampler(1, 1000)()

    assert draw() == draw()
