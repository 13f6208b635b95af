"""Sample efficiency: when a run first reaches the reward at which the baseline ends."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trl.report.arms import Arm, baseline
from trl.report.curves import AXES, REWARD, Axis, moving_mean, progress
from trl.report.runlog import Run

FINAL_SHARE = 0.1
"""A run's final value is the mean over this share of its steps, the last ones."""


@dataclass(frozen=True)
class Reach:
    """One run: the first step at which its smoothed reward is at the target, and where it was then on each axis.

    ``at`` is empty where it never got there.
    """

    run: str
    at: dict[Axis, float]


@dataclass(frozen=True)
class Efficiency:
    """All arms against the baseline's final reward."""

    baseline: Arm
    target: float
    arms: list[tuple[Arm, list[Reach]]]


def final_value(run: Run, key: str) -> float | None:
    """Mean over the last tenth of the steps that have a value (at least one); None without any."""
    _, values = run.series(key)
    if not values:
        return None
    return float(np.mean(values[-max(1, round(FINAL_SHARE * len(values))) :]))


def final_values(arm: Arm, key: str) -> list[float]:
    """`final_value` of the runs that have one."""
    return [value for run in arm.runs if (value := final_value(run, key)) is not None]


def efficiency(arms: Sequence[Arm]) -> Efficiency | None:
    """When every run reaches the baseline's mean final reward; None with fewer than two arms that log rewards."""
    arms = [arm for arm in arms if final_values(arm, REWARD)]
    if len(arms) < 2:
        return None
    base = baseline(arms)
    target = float(np.mean(final_values(base, REWARD)))
    return Efficiency(base, target, [(arm, [reach(run, target) for run in arm.runs]) for arm in arms])


def reach(run: Run, target: float) -> Reach:
    """The first step at which the moving mean of the reward (a run's bold line) is at or above ``target``."""
    steps, values = run.series(REWARD)
    first = next((step for step, value in zip(steps, moving_mean(values), strict=True) if value >= target), None)
    if first is None:
        return Reach(run.name, {})
    row = [row["step"] for row in run.metrics].index(first)
    found = {axis: line[row] for axis in AXES if (line := progress(run, axis)) is not None}
    return Reach(run.name, found)
