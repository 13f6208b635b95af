"""The report page: one HTML file with its data, styles and scripts inside."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from trl.report import totals
from trl.report.arms import GROUPING_RULE, Arm, differences, group_runs
from trl.report.curves import (
    AXES,
    COLOURS,
    DASHES,
    MARKERS,
    PANELS,
    REWARD,
    SHARES,
    arm_curve,
    arm_progress,
    logged_metrics,
)
from trl.report.efficiency import Efficiency, efficiency
from trl.report.heatmap import MEASURES
from trl.report.runlog import Run
from trl.report.samples import embedded_samples, short_numbers, to_script
from trl.report.table import EvaluationTable

PAGE_BYTES = 2_900_000
"""What page, curves and samples may take together; samples are left out beyond it."""
HERE = Path(__file__).parent


def write_report(runs: Sequence[Run], output: str | Path, table: EvaluationTable | None = None) -> Path:
    """Write the page of some runs, making its folder; returns its path."""
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(runs, table), encoding="utf-8", errors="xmlcharrefreplace")
    return path


def render(runs: Sequence[Run], table: EvaluationTable | None = None, *, refresh: float | None = None) -> str:
    """The page as text; everything that came from a model or a file is escaped.

    ``refresh``: seconds after which the page asks its server for a newer one (``--live``); None: never.
    """
    environment = Environment(
        loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    arms = group_runs(runs)
    found = efficiency(arms)
    curves = to_script(short_numbers(curve_data(runs, arms, found)))
    parts = {
        name: Markup((HERE / name).read_text("utf-8")) for name in ("page.css", "charts.js", "heatmap.js", "live.js")
    }
    room = PAGE_BYTES - len(curves.encode()) - sum(len(part.encode()) for part in parts.values()) - 40_000
    samples, shown, total = embedded_samples(runs, room)
    return environment.get_template("page.html").render(
        arms=arms,
        runs=runs,
        axes=AXES,
        colours=len(COLOURS),
        dashes=DASHES,
        headlines=[totals.headline(arm) for arm in arms],
        findings=totals.findings(found) if found else {},
        efficiency=totals.efficiency_table(found) if found else None,
        baseline=found.baseline if found else None,
        table=table,
        final=totals.final_table(arms),
        costs=totals.cost_table(arms) if any(run.metrics for run in runs) else None,
        differences=differences(arms),
        rule=GROUPING_RULE,
        measures=MEASURES,
        samples_shown=shown,
        samples_total=total,
        refresh=refresh,
        parts=parts,
        curves=Markup(curves),
        samples=Markup(samples),
    )


def curve_data(runs: Sequence[Run], arms: Sequence[Arm], found: Efficiency | None) -> dict[str, Any]:
    """What the page's script draws: arms with their axes, charts with a line per arm, and the efficiency figure."""
    known, rest = logged_metrics(arms)
    if not known:
        known, rest = rest, []
    owner = {id(run): index for index, arm in enumerate(arms) for run in arm.runs}
    described: list[dict[str, Any]] = []
    for index, arm in enumerate(arms):
        style = {"dash": DASHES[index % len(DASHES)], "marker": MARKERS[index % len(MARKERS)]}
        described.append({"name": arm.name, "colour": index % len(COLOURS), **style, "at": arm_progress(arm)})
    return {
        "axes": {
            axis: label
            for axis, label in AXES.items()
            if axis == "step" or any(max(arm["at"].get(axis, [0])) for arm in described)
        },
        "arms": described,
        "runs": [{"name": run.name, "arm": owner[id(run)]} for run in runs],
        "charts": [chart(arms, key, behind=True) for key in known],
        "others": [chart(arms, key, behind=False) for key in rest],
        "target": None if found is None else {"name": found.baseline.name, "value": found.target, "chart": REWARD},
        "efficiency": []
        if found is None
        else [[{"run": reach.run, "at": reach.at} for reach in reaches] for _, reaches in found.arms],
        "reached": [] if found is None else [arms.index(arm) for arm, _ in found.arms],
    }


def chart(arms: Sequence[Arm], key: str, *, behind: bool) -> dict[str, Any]:
    """A metric's lines, one per arm (None where it has no value); with the single runs ``behind`` them, or without."""
    title, note = PANELS.get(key, (key, ""))
    lines = [
        None
        if (curve := arm_curve(arm, key)) is None
        else {"x": curve.steps, "y": curve.mean, "low": curve.low, "high": curve.high, "seeds": curve.seeds}
        | {"runs": curve.runs if behind or not curve.steps else []}
        for arm in arms
    ]
    return {"key": key, "title": title, "note": note, "most": 1 if key in SHARES else None, "lines": lines}
