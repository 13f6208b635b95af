"""What a comparison comes to: each arm's final values, when it reached the baseline's reward, and what it cost."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from trl.report.arms import Arm
from trl.report.curves import AXES, PANELS, REWARD, Axis, logged_metrics, number, progress
from trl.report.efficiency import Efficiency, Reach, final_values
from trl.report.runlog import Run, finite
from trl.report.table import Cell, EvaluationTable

FINAL_NOTE = (
    "Mean over the last tenth of a run's steps; over several seeds: mean ± standard deviation of the runs. "
    "Of the training batches, not of an evaluation, unless it says held-out."
)
COST_NOTE = (
    "Sums over a run; over several seeds the mean. Minutes are those of the training steps. "
    "A critic inside the training process costs no dollars."
)


def mean_and_spread(values: Sequence[float]) -> str:
    """The mean, ± the standard deviation where there are several values; an en dash without any."""
    if not values:
        return "–"
    mean = float(np.mean(values))
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    if not spread:
        return number(mean) if len(values) == 1 else f"{number(mean)} ± 0"
    decimals = min(3, max(0, 1 - math.floor(math.log10(spread))))  # two significant digits of the spread
    return f"{mean:,.{decimals}f} ± {spread:,.{decimals}f}".replace("-", "−")


def final_table(arms: Sequence[Arm]) -> EvaluationTable | None:
    """One row per arm, one column per known metric that was logged; None where none was."""
    keys = [key for key in logged_metrics(arms)[0] if key != "time/step"]
    if not keys:
        return None
    rows: list[list[Cell]] = [
        [arm.name, len(arm.runs), *(mean_and_spread(final_values(arm, key)) for key in keys)] for arm in arms
    ]
    return EvaluationTable(
        ["arm", "seeds", *(PANELS[key][0] for key in keys)], rows, "At the end of training", FINAL_NOTE
    )


def _total(key: str) -> Callable[[Run], float | None]:
    def total(run: Run) -> float | None:
        values = [value for row in run.metrics if (value := finite(row.get(key))) is not None]
        return sum(values) if values else None

    return total


def _last(axis: Axis) -> Callable[[Run], float | None]:
    def last(run: Run) -> float | None:
        line = progress(run, axis)
        return line[-1] if line else None

    return last


def _minutes(run: Run) -> float | None:
    seconds = _total("time/iteration")(run) or _total("time/step")(run)
    return None if seconds is None else seconds / 60


COSTS: dict[str, Callable[[Run], float | None]] = {
    "steps": lambda run: float(run.last_step),
    "samples": _last("samples"),
    "response tokens": _total("tokens/responses"),
    "critic calls": _last("calls"),
    "critic tokens in": _total("critic/tokens_in"),
    "critic tokens out": _total("critic/tokens_out"),
    "critic cost, $": _last("usd"),
    "minutes": _minutes,
}


def cost_table(arms: Sequence[Arm]) -> EvaluationTable:
    """One row per arm: steps, samples, tokens, critic calls, dollars and time of a run."""
    columns: dict[str, list[Cell]] = {}
    for name, cost in COSTS.items():
        values = [[value for run in arm.runs if (value := cost(run)) is not None] for arm in arms]
        if any(value for row in values for value in row):
            columns[name] = [_cost(name, row) for row in values]
    rows: list[list[Cell]] = [[arm.name, *cells] for arm, *cells in zip(arms, *columns.values(), strict=True)]
    return EvaluationTable(["arm", *columns], rows, "Cost of a run", COST_NOTE)


def _cost(name: str, values: Sequence[float]) -> Cell:
    if not values:
        return None
    mean = float(np.mean(values))
    if name == "critic cost, $":
        return f"{mean:,.2f}" if mean >= 1 or not mean else f"{mean:.3g}"
    return f"{mean:,.1f}" if name == "minutes" else f"{mean:,.0f}"


def efficiency_table(found: Efficiency) -> EvaluationTable:
    """One row per arm: how many seeds reached the target, and on each axis where (mean, range over the seeds)."""
    total = _mean_steps(found.baseline)
    shown = [axis for axis in AXES if any(reach.at.get(axis) for _, reaches in found.arms for reach in reaches)]
    rows: list[list[Cell]] = []
    for arm, reaches in found.arms:
        there = [reach for reach in reaches if reach.at]
        share = f"{np.mean([r.at['step'] for r in there]) / total:.0%}" if there else "–"
        rows.append([arm.name, f"{len(there)} of {len(reaches)}", share, *(_range(there, axis) for axis in shown)])
    columns = ["arm", "runs that got there", "share of the baseline's steps"]
    columns += [AXES[axis].lower() if axis != "step" else "steps" for axis in shown]
    note = "The mean of the runs that got there, and their range."
    return EvaluationTable(columns, rows, "Steps to the baseline's final reward", note)


def _range(reaches: Sequence[Reach], axis: Axis) -> str:
    values = [reach.at[axis] for reach in reaches if axis in reach.at]
    if not values:
        return "–"
    mean, low, high = number(float(np.mean(values))), number(min(values)), number(max(values))
    return mean if low == high else f"{mean} ({low}–{high})"


def findings(found: Efficiency) -> dict[str, str]:
    """A sentence per arm beside the baseline, by its name: whether, and how soon, it got where the baseline ends."""
    total = _mean_steps(found.baseline)
    said = {}
    for arm, reaches in found.arms:
        steps = [reach.at["step"] for reach in reaches if reach.at]
        if arm is found.baseline:
            continue
        goal = f"the final reward of {found.baseline.name}"
        if not steps:
            said[arm.name] = f"Did not reach {goal}."
            continue
        mean = float(np.mean(steps))
        average = f", on average, in {len(steps)} of {len(reaches)} runs" if len(reaches) > 1 else ""
        said[arm.name] = f"Reached {goal} after {mean:.0f} of its {total:.0f} steps ({mean / total:.0%}){average}."
    return said


def _mean_steps(arm: Arm) -> float:
    return float(np.mean([run.last_step for run in arm.runs]))


def headline(arm: Arm) -> tuple[str, str]:
    """The page's large figure for an arm, and what it is: the final value of its first metric."""
    key = next((key for key in logged_metrics([arm])[0] if key != "time/step"), None)
    if key is None:
        return "–", "nothing logged yet"
    return mean_and_spread(
        final_values(arm, key)
    ), "final reward" if key == REWARD else f"final {PANELS[key][0].lower()}"
