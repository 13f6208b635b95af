"""Learning curves as numbers: which metrics, what they are drawn over, and how the seeds of an arm are averaged."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

from trl.report.arms import Arm
from trl.report.runlog import MATCH_RATE, Run, finite

REWARD = "objective/score"
PANELS: dict[str, tuple[str, str]] = {
    REWARD: ("Environment reward", "mean over the batch's responses"),
    "eval/score": ("Held-out reward", "mean on prompts not trained on"),
    "eval/share_positive": ("Share positive", "of held-out continuations, by the evaluator"),
    "objective/kl": ("KL from the reference model", "nats per response"),
    "objective/intrinsic": ("Intrinsic reward", "mean per response, from the critic's spans"),
    "critic/hit_rate": ("Critic hit rate", "share of the critiqued responses with a quoted span in them"),
    MATCH_RATE: ("Span match rate", "share of the critic's quoted spans that are in the text"),
    "objective/entropy": ("Policy entropy", "nats per token"),
    "loss": ("Loss", "supervised training"),
    "accuracy": ("Pairwise accuracy", "share of pairs in the right order"),
    "time/step": ("Time per step", "seconds"),
}
"""Metric → title and what it is, in the order shown."""
SHARES = frozenset({"eval/share_positive", "critic/hit_rate", MATCH_RATE, "accuracy"})
"""Metrics that can't be above 1."""

Axis = Literal["step", "samples", "calls", "usd"]
AXES: dict[Axis, str] = {"step": "Step", "samples": "Samples", "calls": "Critic calls", "usd": "Critic cost, $"}
"""What curves can be drawn over: PPO steps, and since the start of the run responses, critic requests, dollars."""

COLOURS = ("#0072b2", "#c44e00", "#007a5a", "#b0508a", "#6b5bb5", "#8a6d00")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 2", "1 2")
MARKERS = ("circle", "square", "triangle", "diamond", "cross", "plus")
MOST_POINTS = 160


@dataclass(frozen=True)
class Curve:
    """An arm's line over steps: the mean of its seeds' smoothed values and, of several seeds, ± one deviation.

    ``runs`` are the single lines behind it: of one seed its unsmoothed values, of several each seed's smoothed ones.
    """

    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    runs: list[tuple[list[int], list[float]]]
    seeds: int


def logged_metrics(arms: Sequence[Arm]) -> tuple[list[str], list[str]]:
    """Metrics with at least one number: the known ones in the order of `PANELS`, and all others by name."""
    found: set[str] = set()
    for row in (row for arm in arms for run in arm.runs for row in run.metrics):
        found |= {key for key, value in row.items() if key not in found and finite(value) is not None}
    found.discard("step")
    return [key for key in PANELS if key in found], sorted(found - PANELS.keys())


def moving_mean(values: ArrayLike) -> np.ndarray:
    """Centred moving mean whose window is about a twelfth of the run; windows shrink at the ends."""
    data = np.asarray(values, dtype=np.float64)
    half = len(data) // 24
    if half == 0:
        return data
    sums = np.concatenate([[0.0], np.cumsum(data)])
    centre = np.arange(len(data))
    low, high = np.maximum(centre - half, 0), np.minimum(centre + half + 1, len(data))
    return (sums[high] - sums[low]) / (high - low)


def arm_curve(arm: Arm, key: str) -> Curve | None:
    """The arm's line of one metric, at the steps that all of its seeds have; None without a single value.

    Seeds with fewer values than half of the fullest (just begun, or broken off) are drawn and not averaged.
    """
    series = [(steps, values) for run in arm.runs for steps, values in [run.series(key)] if steps]
    if not series:
        return None
    most = max(len(steps) for steps, _ in series)
    smooth = [(steps, moving_mean(values)) for steps, values in series]
    averaged = [dict(zip(steps, values, strict=True)) for steps, values in smooth if 2 * len(steps) >= most]
    common = sorted(set.intersection(*(set(points) for points in averaged)))
    behind = series if len(series) == 1 else [(steps, list(values)) for steps, values in smooth]
    if len(series) == 1 and series[0][1] == list(smooth[0][1]):
        behind = []  # the same line
    if not common:
        return Curve([], [], [], [], [_thin(*line) for line in behind], 0)
    table = np.array([[points[step] for step in common] for points in averaged])  # (seeds, steps)
    mean = table.mean(0)
    spread = table.std(0, ddof=1) if len(table) > 1 else None
    at = _kept(len(common))
    return Curve(
        [common[i] for i in at],
        [float(mean[i]) for i in at],
        [] if spread is None else [float(mean[i] - spread[i]) for i in at],
        [] if spread is None else [float(mean[i] + spread[i]) for i in at],
        [_thin(*line) for line in behind],
        len(averaged),
    )


def _kept(count: int) -> list[int]:
    """At most `MOST_POINTS` indices, evenly spread, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, MOST_POINTS)).round().astype(int)).tolist()


def _thin(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    at = _kept(len(steps))
    return [steps[i] for i in at], [float(values[i]) for i in at]


def progress(run: Run, axis: Axis) -> list[float] | None:
    """How far the run was on an axis after each of its metrics rows; None where that was not recorded.

    A critic in the same process costs no dollars; one behind an endpoint does, and how many is known only with
    prices (``--critic_prices``).
    """
    if axis == "step":
        return [float(row["step"]) for row in run.metrics]
    amounts = [_amount(row, axis) for row in run.metrics]
    if axis == "samples" and not any(amounts):
        return None
    if axis == "usd" and not any(amounts) and any(row.get("critic/http_requests") for row in run.metrics):
        return None
    return np.cumsum(amounts).tolist()


def _amount(row: dict[str, object], axis: Axis) -> float:
    if axis == "samples":  # the trainer logs the queries' tokens and their mean
        tokens, mean = finite(row.get("tokens/queries")), finite(row.get("tokens/queries_len_mean"))
        return float(round(tokens / mean)) if tokens and mean else 0.0
    return finite(row.get("critic/requests" if axis == "calls" else "critic/cost_usd")) or 0.0


def arm_progress(arm: Arm) -> dict[Axis, list[float]]:
    """Per axis, how far the arm was at some steps (those under "step"): the mean of the seeds that got there.

    An axis that one of its runs did not record is left out.
    """
    steps = sorted({row["step"] for run in arm.runs for row in run.metrics})
    steps = [steps[i] for i in _kept(len(steps))] if steps else []
    found: dict[Axis, list[float]] = {}
    for axis in AXES:
        known = [progress(run, axis) for run in arm.runs if run.metrics]
        if known and None not in known:
            points = [
                dict(zip((row["step"] for row in run.metrics), line or [], strict=True))
                for run, line in zip([run for run in arm.runs if run.metrics], known, strict=True)
            ]
            found[axis] = [float(np.mean([p[step] for p in points if step in p])) for step in steps]
    return found


def number(value: float) -> str:
    """A short number with a real minus sign."""
    text = f"{value:.3g}" if abs(value) < 1e3 else f"{value:,.0f}"
    return ("0" if float(text.replace(",", "")) == 0 else text).replace("-", "−")
