"""Settings of the reward model's trainer. Imports nothing heavy."""

import math
from dataclasses import dataclass
from typing import Literal

from trl.trainer.supervised_config import SupervisedConfig


@dataclass
class RewardConfig(SupervisedConfig):
    """Hyperparameters of a reward model that learns from pairs; a row is a pair."""

    loss_mode: Literal["span_nopad", "span", "last"] = "span_nopad"
    """Where values are compared: from the first different token to the shorter text's end (span_nopad) or to the
    longer one's (span, as DeepSpeed-Chat), or at the texts' last tokens only (last)."""
    margin: float = 0.0
    """Difference in score that the loss asks for."""
    center_coef: float = 0.0
    """Weight of (score of chosen + score of rejected) squared, which keeps scores around 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss_mode not in ("span_nopad", "span", "last"):
            raise ValueError(f"loss_mode must be span_nopad, span or last, got {self.loss_mode!r}")
        if not math.isfinite(self.margin):
            raise ValueError(f"margin must be a finite number, got {self.margin}")
        if not self.center_coef >= 0:
            raise ValueError(f"center_coef must not be negative, got {self.center_coef}")
