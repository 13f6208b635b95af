"""The pair loss: hand-checked numbers, and equality with a loop over samples in every mode and edge case."""

import math
import random

import pytest
import torch
from torch import Tensor

from trl.trainer.pairwise import pair_loss

MODES = ["span_nopad", "span", "last"]
LN2 = math.log(2)


def lengths_mask(rows: list[int], width: int) -> Tensor:
    return torch.tensor([[int(j < n) for j in range(width)] for n in rows])


def slow(c: Tensor, r: Tensor, chosen: list[int], rejected: list[int], mode: str, margin: float, center: float):
    """Loss of one pair, written from its definition; c and r are values at right-padded positions."""
    end_c, end_r = c[len(chosen) - 1], r[len(rejected) - 1]
    pairs = []
    if mode != "last":
        longer, shorter = max(len(chosen), len(rejected)), min(len(chosen), len(rejected))
        divergence = 0
        while divergence < shorter and chosen[divergence] == rejected[divergence]:
            divergence += 1
        stop = longer if mode == "span" else shorter
        pairs = [(c[t], r[t]) for t in range(divergence, stop)]
        if len(chosen) == len(rejected) == divergence:
            pairs = []
    terms = [-torch.log(torch.sigmoid(a - b - margin)) for a, b in pairs or [(end_c, end_r)]]
    return sum(terms) / len(terms) + center * (end_c + end_r) ** 2


def pad(rows: list[list[int]], width: int, value: int) -> Tensor:
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


# --- hand-checked -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "expected"), [("span", 0.180925), ("span_nopad", 0.313262), ("last", 0.313262)])
def test_hand_checked(mode, expected):
    chosen, rejected = torch.tensor([[5, 6, 7, 8, 0]]), torch.tensor([[5, 6, 9, 0, 0]])
    c = torch.tensor([[9.0, 9.0, 1.5, 2.0, 9.0]])
    r = torch.tensor([[-9.0, 3.0, 0.5, -1.0, 7.0]])
    if mode == "last":
        c[0, 3] = 1.5  # end scores 1.5 and .5
    result = pair_loss(c, r, chosen, rejected, lengths_mask([4], 5), lengths_mask([3], 5), mode=mode)
    assert result.loss.item() == pytest.approx(expected, abs=1e-6)
    assert result.chosen.item() == c[0, 3]
    assert result.rejected.item() == 0.5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("side", ["right", "left"])
def test_an_identical_pair_costs_ln_2_with_finite_gradients(mode, side):
    if mode == "span" and side == "left":
        return  # refused, see below
    ids = torch.tensor([[5, 6, 7, 0]])
    mask = torch.tensor([[1, 1, 1, 0] if side == "right" else [0, 1, 1, 1]])
    c = torch.tensor([[math.inf, 2.0, 3.0, math.nan]] if side == "left" else [[1.0, 2.0, 3.0, math.inf]])
    c[0, mask[0] == 1] = torch.tensor([1.0, 2.0, 3.0])
    r = c.clone()
    c.requires_grad_(), r.requires_grad_()
    result = pair_loss(c, r, ids, ids, mask, mask, mode=mode)
    assert result.loss.item() == pytest.approx(LN2, abs=1e-6)
    assert result.accuracy.item() == 0.5
    result.loss.sum().backward()
    assert c.grad.isfinite().all()
    assert c.grad.sum().item() == pytest.approx(-0.5)
    assert r.grad.sum().item() == pytest.approx(0.5)


def test_margin_and_centring():
    one = torch.ones(1, 1, dtype=torch.long)
    c, r = torch.tensor([[2.0]]), torch.tensor([[1.0]])
    with_margin = pair_loss(c, r, one, 2 * one, one, one, margin=1.0)
    assert with_margin.loss.item() == pytest.approx(LN2, abs=1e-6)
    per_pair = pair_loss(c, r, one, one, one, one, margin=torch.tensor([3.0]))
    assert per_pair.loss.item() == pytest.approx(math.log(1 + math.e**2), abs=1e-5)
    centred = pair_loss(c, r, one, 2 * one, one, one, center_coef=0.1)
    assert centred.loss.item() == pytest.approx(0.313262 + 0.1 * 9, abs=1e-5)


# --- edge cases -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chosen", "rejected"),
    [
        ([1, 2, 3], [9, 2, 3]),  # divergence 0
        ([1], [2]),
        ([5, 6, 7, 8], [5, 6]),  # one begins with the other
        ([5, 6], [5, 6, 7, 8]),
        ([5, 6, 0], [5, 6]),  # ... by a token that is also the padding
        ([0, 0], [0]),
        ([5, 6, 7], [5, 6, 7]),
        ([5, 0, 7], [5, 0, 8]),  # padding's id inside of a text
        ([5, 6, 7], [5, 9, 7]),  # same again after the difference
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_edge_cases_equal_the_loop(chosen, rejected, mode):
    width = max(len(chosen), len(rejected)) + 1
    generator = torch.Generator().manual_seed(1)
    c, r = torch.randn(2, 1, width, generator=generator, dtype=torch.float64).float()
    result = pair_loss(
        c, r, pad([chosen], width, 0), pad([rejected], width, 0),
        lengths_mask([len(chosen)], width), lengths_mask([len(rejected)], width), mode=mode,
    )  # fmt: skip
    assert result.loss.item() == pytest.approx(slow(c[0], r[0], chosen, rejected, mode, 0, 0).item(), abs=1e-6)
    assert result.chosen.item() == c[0, len(chosen) - 1]
    assert result.rejected.item() == r[0, len(rejected) - 1]


# --- random batches ---------------------------------------------------------------------------------------


def random_batch(seed: int, count: int = 17) -> tuple[list[list[int]], list[list[int]]]:
    draw = random.Random(seed)
    chosen, rejected = [], []
    for _ in range(count):
        shared = [draw.randrange(4) for _ in range(draw.randrange(6))]
        ends = [[draw.randrange(4) for _ in range(draw.randrange(5))] for _ in range(2)]
        chosen.append(shared + ends[0] or [1])
        rejected.append(shared + ends[1] or [2])
    return chosen, rejected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(8))
def test_loss_and_gradients_equal_the_loop(mode, seed):
    chosen, rejected = random_batch(seed)
    width = 12
    c, r = 3 * torch.randn(2, len(chosen), width, generator=torch.Generator().manual_seed(seed))
    leaves = [t.clone().requires_grad_() for t in (c, r, c, r)]
    fast = pair_loss(
        leaves[0], leaves[1], pad(chosen, width, 0), pad(rejected, width, 0),
        lengths_mask([len(x) for x in chosen], width), lengths_mask([len(x) for x in rejected], width),
        mode=mode, margin=0.3, center_coef=0.01,
    ).loss  # fmt: skip
    loop = torch.stack(
        [slow(leaves[2][i], leaves[3][i], chosen[i], rejected[i], mode, 0.3, 0.01) for i in range(len(chosen))]
    )
    torch.testing.assert_close(fast, loop, atol=1e-5, rtol=1e-5)
    fast.mean().backward()
    loop.mean().backward()
    torch.testing.assert_close(leaves[0].grad, leaves[2].grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(leaves[1].grad, leaves[3].grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("mode", ["span_nopad", "last"])
def test_left_padding_gives_the_loss_of_right_padding(mode):
    chosen, rejected = random_batch(5)
    width = 12
    c, r = torch.randn(2, len(chosen), width, generator=torch.Generator().manual_seed(5))

    def shifted(t: Tensor, rows: list[list[int]]) -> Tensor:
        return torch.stack([row.roll(width - len(x)) for row, x in zip(t, rows, strict=True)])

    masks = [lengths_mask([len(x) for x in rows], width) for rows in (chosen, rejected)]
    ids = [pad(rows, width, 0) for rows in (chosen, rejected)]
    right = pair_loss(c, r, *ids, *masks, mode=mode)
    rows = (chosen, rejected)
    left = pair_loss(
        shifted(c, chosen), shifted(r, rejected), *[shifted(t, x) for t, x in zip(ids, rows, strict=True)],
        *[shifted(t, x) for t, x in zip(masks, rows, strict=True)], mode=mode,
    )  # fmt: skip
    torch.testing.assert_close(left.loss, right.loss)
    assert torch.equal(left.chosen, right.chosen)
    assert torch.equal(left.rejected, right.rejected)


def test_numbers_at_positions_that_do_not_count_change_nothing():
    chosen, rejected = random_batch(2)
    width = 12
    masks = [lengths_mask([len(x) for x in rows], width) for rows in (chosen, rejected)]
    ids = [pad(rows, width, 0) for rows in (chosen, rejected)]
    c, r = torch.randn(2, len(chosen), width, generator=torch.Generator().manual_seed(2))
    clean = pair_loss(c, r, *ids, *masks)
    dirty = [torch.where(mask.bool(), t, math.nan).requires_grad_() for t, mask in zip((c, r), masks, strict=True)]
    result = pair_loss(*dirty, *ids, *masks)
    assert torch.equal(result.loss, clean.loss)
    result.loss.sum().backward()
    assert dirty[0].grad.isfinite().all()


def test_half_precision_values_are_compared_in_fp32():
    ids, mask = torch.tensor([[1, 2]]), torch.ones(1, 2, dtype=torch.long)
    c, r = torch.tensor([[0.0, 3.0]], dtype=torch.bfloat16), torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16)
    result = pair_loss(c, r, ids, ids + 1, mask, mask)
    assert result.loss.dtype == torch.float32
    assert result.loss.item() == pytest.approx((LN2 + 0.126928) / 2, abs=1e-6)


# --- what is refused --------------------------------------------------------------------------------------


def test_what_is_refused():
    ids, mask, values = torch.ones(1, 3, dtype=torch.long), torch.tensor([[0, 1, 1]]), torch.zeros(1, 3)
    with pytest.raises(ValueError, match="pad the rows on the right"):
        pair_loss(values, values, ids, ids, mask, mask, mode="span")
    with pytest.raises(ValueError, match="mode must be"):
        pair_loss(values, values, ids, ids, mask, mask, mode="all")
    with pytest.raises(ValueError, match="one shape"):
        pair_loss(values[:, :2], values, ids, ids, mask, mask)
    with pytest.raises(ValueError, match="hold no token"):
        pair_loss(values, values, ids, ids, mask, torch.zeros_like(mask))
