"""Whether a reward model's margins mean what they say: predicted probabilities against observed shares."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from trl.report.curves import COLOURS


@dataclass(frozen=True)
class Bin:
    """Pairs whose predicted probability is alike: mean prediction, observed share, and how many."""

    predicted: float
    observed: float
    count: int


def calibration_bins(margins: ArrayLike, bins: int = 10) -> list[Bin]:
    """Bins of equal width over [0, 1] of P(first is better) = σ(margin), without the empty ones.

    ``margins`` (N,) are scores of the better text minus those of the worse one. Each pair is asked both ways round
    (better first, and worse first), since otherwise every answer would be "yes".
    """
    predicted = 1 / (1 + np.exp(-np.asarray(margins, dtype=np.float64).clip(-500, 500)))
    predicted = np.concatenate([predicted, 1 - predicted])
    outcome = np.repeat([1.0, 0.0], len(predicted) // 2)
    number = np.minimum((predicted * bins).astype(int), bins - 1)
    found = [(number == index) for index in range(bins)]
    return [Bin(float(predicted[i].mean()), float(outcome[i].mean()), int(i.sum())) for i in found if i.any()]


def calibration_error(bins: Sequence[Bin]) -> float:
    """Mean distance of prediction and share, weighted by pairs (Guo et al. 2017: expected calibration error)."""
    total = sum(item.count for item in bins)
    return sum(item.count * abs(item.predicted - item.observed) for item in bins) / total


def save_calibration(margins: ArrayLike, path: str | Path) -> Path:
    """Draw the bins as a PNG (or PDF, SVG: by suffix)."""
    from matplotlib.figure import Figure  # not pyplot: it would pick a window system for the whole process

    bins = calibration_bins(margins)
    figure = Figure(figsize=(4.6, 4.8), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1])
    upper.plot([0, 1], [0, 1], color="#8a8f98", linewidth=1, label="perfect")
    upper.plot([b.predicted for b in bins], [b.observed for b in bins], color=COLOURS[0], marker="o", label="model")
    upper.set_ylabel("observed share")
    upper.set_title(f"Calibration (error {calibration_error(bins):.3f})", loc="left", fontweight="bold", fontsize=11)
    upper.legend(frameon=False)
    lower.bar([b.predicted for b in bins], [b.count for b in bins], width=0.06, color=COLOURS[0])
    lower.set_ylabel("pairs")
    lower.set_xlabel("predicted probability, σ(margin)")
    for axis in (upper, lower):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)
    return Path(path)
