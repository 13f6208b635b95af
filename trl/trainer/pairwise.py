"""A reward model's loss on pairs of texts of which one is preferred (Bradley and Terry 1952; Stiennon et al. 2020).

Pure tensor functions; B pairs, padded to L positions. Computed in fp32.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trl.models.reward_model import last_positions

LossMode = Literal["span_nopad", "span", "last"]


@dataclass
class PairLoss:
    """Per pair, each (B,): ``loss``, and the end scores of the two texts."""

    loss: Tensor
    chosen: Tensor
    rejected: Tensor

    @property
    def margin(self) -> Tensor:
        """Score of the chosen text minus that of the rejected one."""
        return self.chosen - self.rejected

    @property
    def accuracy(self) -> Tensor:
        """1 where the chosen text scores higher, ½ where both score the same."""
        return (self.margin.sign() + 1) / 2


def pair_loss(
    chosen_values: Tensor,
    rejected_values: Tensor,
    chosen_ids: Tensor,
    rejected_ids: Tensor,
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    *,
    mode: LossMode = "span_nopad",
    margin: float | Tensor = 0.0,
    center_coef: float = 0.0,
) -> PairLoss:
    """The loss of each pair: the mean of −log σ(c − r − margin) over the positions that its mode compares.

    All tensors are (B, L): values c and r, token ids, and masks of 1 at real tokens, which say what is padding (an
    id can't: pad is often EOS). Rows may be padded on either side; positions count from a row's first token.

    - ``span_nopad``: from the first position where the texts differ to the shorter one's end.
    - ``span``: to the longer one's end, where the shorter one's values at its padding are compared, as
      DeepSpeed-Chat does; the rows must be padded on the right.
    - ``last``: only the two end scores.

    Where that is empty (one text begins with the other, or both are the same), the end scores are compared.
    ``margin``, a number or (B,), asks for a larger difference. ``center_coef`` · (c_end + r_end)² is added, which
    keeps scores around 0 (Eisenstein et al. 2023).
    """
    if mode not in ("span_nopad", "span", "last"):
        raise ValueError(f"mode must be span_nopad, span or last, got {mode!r}")
    shapes = {tuple(t.shape) for t in (chosen_values, chosen_ids, chosen_mask)}
    shapes |= {tuple(t.shape) for t in (rejected_values, rejected_ids, rejected_mask)}
    if len(shapes) != 1 or chosen_values.dim() != 2:
        raise ValueError(f"pair_loss takes tensors of one shape (B, L), got {sorted(shapes)}; pad both texts alike")
    chosen_ids, chosen_values, chosen_mask = _from_the_left(chosen_ids, chosen_values.float(), chosen_mask, mode)
    rejected_ids, rejected_values, rejected_mask = _from_the_left(
        rejected_ids, rejected_values.float(), rejected_mask, mode
    )
    chosen = chosen_values.gather(1, last_positions(chosen_mask)[:, None]).squeeze(1)
    rejected = rejected_values.gather(1, last_positions(rejected_mask)[:, None]).squeeze(1)

    span = compared_positions(chosen_ids, rejected_ids, chosen_mask, rejected_mask, mode)
    ends_only = ~span.any(dim=1)
    margin = torch.as_tensor(margin, dtype=torch.float32, device=chosen.device)
    # masked before the logarithm: what stands at other positions must reach neither the loss nor its gradient
    difference = torch.where(span, chosen_values - rejected_values, 0.0)
    losses = torch.where(span, -F.logsigmoid(difference - margin.reshape(-1, 1)), 0.0)
    over_span = losses.sum(dim=1) / span.sum(dim=1).clamp(min=1)
    loss = torch.where(ends_only, -F.logsigmoid(chosen - rejected - margin), over_span)
    if center_coef:
        loss = loss + center_coef * (chosen + rejected).square()
    return PairLoss(loss, chosen, rejected)


def compared_positions(
    chosen_ids: Tensor, rejected_ids: Tensor, chosen_mask: Tensor, rejected_mask: Tensor, mode: LossMode
) -> Tensor:
    """Bool (B, L): where values are compared, for right-padded rows; see `pair_loss`."""
    if mode == "last":
        return torch.zeros_like(chosen_mask, dtype=torch.bool)
    both, either = (chosen_mask & rejected_mask).bool(), (chosen_mask | rejected_mask).bool()
    differs = either & ((chosen_ids != rejected_ids) | ~both)
    after_divergence = differs.long().cumsum(dim=1) > 0
    return after_divergence & (both if mode == "span_nopad" else either)


def _from_the_left(ids: Tensor, values: Tensor, mask: Tensor, mode: LossMode) -> tuple[Tensor, Tensor, Tensor]:
    """Rows moved so that their first token is at position 0; unchanged where they are right-padded."""
    mask = mask.long()
    padding = mask.argmax(dim=1)
    if not bool(padding.any()):
        return ids, values, mask
    if mode == "span":
        raise ValueError("mode='span' compares values at the padding behind a text; pad the rows on the right")
    width = mask.shape[1]
    source = (torch.arange(width, device=mask.device) + padding[:, None]) % width
    return ids.gather(1, source), values.gather(1, source), mask.gather(1, source)
