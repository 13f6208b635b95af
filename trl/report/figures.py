"""The page's figures for papers and READMEs, as PNG and PDF: learning curves, sample efficiency, a heat map."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl.jsonl import DataFileError
from trl.report.arms import group_runs
from trl.report.curves import COLOURS, DASHES, PANELS, REWARD, Curve, arm_curve, number
from trl.report.efficiency import Efficiency, efficiency
from trl.report.runlog import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIGURE_PANELS = (REWARD, "objective/kl", "objective/intrinsic", "eval/share_positive", "eval/score", "loss", "accuracy")
MOST_PANELS = 4
SUFFIXES = (".png", ".pdf")
MPL_MARKERS = ("o", "s", "^", "D", "x", "+")
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#8a8f98",
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "axes.axisbelow": True,
    "xtick.color": "#4a4f57",
    "ytick.color": "#4a4f57",
    "axes.titlelocation": "left",
    "pdf.fonttype": 42,  # text stays text
}


def save_figures(runs: Sequence[Run], folder: str | Path) -> list[Path]:
    """Write ``curves``, with two arms or more ``efficiency``, and ``heatmap`` as PNG and PDF; returns the paths.

    The heat map is of the first run of the last arm that asks a critic; without one there is none.

    Raises DataFileError when no run logged one of `FIGURE_PANELS`.
    """
    from trl.report.heatmap_figure import save_heatmap

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = [save_curves(runs, folder / f"curves{suffix}") for suffix in SUFFIXES]
    arms = group_runs(runs)
    found = efficiency(arms)
    if found:
        paths += [save_efficiency(found, folder / f"efficiency{suffix}") for suffix in SUFFIXES]
    critics = [arm for arm in arms if arm.asks_critic]
    heatmaps = [save_heatmap(critics[-1].runs[0], folder / f"heatmap{suffix}") for suffix in SUFFIXES if critics]
    return paths + [path for path in heatmaps if path is not None]


def save_curves(runs: Sequence[Run], path: str | Path) -> Path:
    """The arms' main curves over steps, seeds as bands (PNG, PDF or SVG: by suffix)."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot: it would pick a window system for the whole process

    arms = group_runs(runs)
    panels = {key: [arm_curve(arm, key) for arm in arms] for key in FIGURE_PANELS}
    panels = {key: curves for key, curves in panels.items() if any(curves)}
    if not panels:
        raise DataFileError(f"nothing to plot: no run logged any of {', '.join(FIGURE_PANELS)}")
    keys = list(panels)[:MOST_PANELS]
    columns = min(2, len(keys))
    rows = -(-len(keys) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2 * columns, 3.3 * rows + 0.4), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis, key in zip(axes.flat, keys, strict=False):
            for index, curve in enumerate(panels[key]):
                if curve:
                    _draw(axis, index, curve, arms[index].name)
            title, note = PANELS[key]
            axis.set_title(title, fontweight="bold", fontsize=11, pad=18)
            axis.text(0, 1.03, note, transform=axis.transAxes, color="#5b6068", fontsize=9)
            axis.set_xlabel("step", color="#4a4f57")
            axis.margins(x=0.02)
        for axis in axes.flat[len(keys) :]:
            axis.set_axis_off()
        named = {
            label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        several = any(curve and curve.low for curves in panels.values() for curve in curves)
        rest = "thin: each seed; band: ± 1 standard deviation" if several else "thin: single steps; bold: moving mean"
        figure.legend(
            named.values(),
            named,
            title=rest,
            title_fontsize=9,
            alignment="left",
            loc="outside upper left",
            ncols=min(5, len(named)),
            frameon=False,
        )
        figure.savefig(path, dpi=160)
    return Path(path)


def _draw(axis: "Axes", index: int, curve: Curve, name: str) -> None:
    colour, dash = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]
    style: Any = (0, tuple(float(part) / 2.4 for part in dash.split())) if dash else "-"
    for steps, values in curve.runs:
        axis.plot(steps, values, color=colour, alpha=0.28, linewidth=1)
    if curve.low:
        axis.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.16, linewidth=0)
    axis.plot(
        curve.steps,
        curve.mean,
        color=colour,
        linewidth=2.2,
        linestyle=style,
        marker=MPL_MARKERS[index % len(MPL_MARKERS)],
        markevery=max(1, len(curve.steps) // 6),
        markersize=5,
        label=name,
    )


def save_efficiency(found: Efficiency, path: str | Path) -> Path:
    """Steps until the baseline's final reward: a bar per arm (mean of the runs that got there), a mark per run."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE | {"axes.spines.left": False}):
        figure = Figure(figsize=(6.4, 0.75 * len(found.arms) + 1.4), layout="constrained")
        axis = figure.subplots()
        for index, (_, reaches) in enumerate(found.arms):
            colour, steps = COLOURS[index % len(COLOURS)], [reach.at["step"] for reach in reaches if reach.at]
            if steps:
                axis.barh(index, sum(steps) / len(steps), height=0.28, color=colour, alpha=0.35)
            marker = MPL_MARKERS[index % len(MPL_MARKERS)]
            axis.plot(steps, [index] * len(steps), marker, color=colour, markersize=6)
            if len(steps) < len(reaches):
                missed = f" {len(reaches) - len(steps)} of {len(reaches)} never"
                axis.text(max(steps, default=0), index + 0.36, missed, color="#5b6068", fontsize=9)
        axis.set_yticks(range(len(found.arms)), [textwrap.fill(arm.name, 26) for arm, _ in found.arms])
        axis.invert_yaxis()
        axis.tick_params(axis="y", length=0)
        axis.grid(axis="y", visible=False)
        axis.set_xlim(left=0)
        axis.set_xlabel("step", color="#4a4f57")
        title = f"Steps to the final reward of {found.baseline.name} ({number(found.target)})"
        # over the names too: a title of the axes alone would be cut where names are long
        figure.suptitle(textwrap.fill(title, 68), x=0.01, ha="left", fontweight="bold", fontsize=11)
        figure.savefig(path, dpi=160)
    return Path(path)
