"""Learning curves: which metrics, their geometry as inline SVG, and the same as a PNG."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trl.jsonl import DataFileError
from trl.report.runlog import Run

PANELS: dict[str, tuple[str, str]] = {
    "objective/score": ("Environment reward", "mean over the batch's responses"),
    "objective/kl": ("KL from the reference model", "nats per response"),
    "objective/intrinsic": ("Intrinsic reward", "mean, from the critic's spans"),
    "critic/hit_rate": ("Critic hit rate", "share of the critiqued responses with a quoted span"),
    "eval/score": ("Held-out reward", "mean on prompts not trained on"),
    "eval/share_positive": ("Share positive", "of held-out continuations, by the evaluator"),
    "objective/entropy": ("Policy entropy", "nats per token"),
    "time/step": ("Time per step", "seconds"),
}
"""Metric → title and what it is, in the order shown."""

FIGURE_PANELS = ("objective/score", "objective/kl", "objective/intrinsic", "eval/share_positive", "eval/score")
COLOURS = ("#0072b2", "#c44e00", "#007a5a", "#b0508a", "#6b5bb5", "#8a6d00")
DASHES = ("", "7 3", "2 3", "9 3 2 3", "5 2", "1 2")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 420, 230, 46, 12, 10, 30
MOST_POINTS = 240


@dataclass(frozen=True)
class Line:
    """One run's line: point lists for ``<polyline>``, and its first and last value in words."""

    run: str
    colour: int
    dash: str
    raw: str
    smooth: str
    dots: list[tuple[float, float]]
    summary: str


@dataclass(frozen=True)
class Chart:
    """A small SVG chart, ready for the template."""

    key: str
    title: str
    note: str
    lines: list[Line]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    x_range: tuple[float, float]
    y_range: tuple[float, float]


def charts(runs: Sequence[Run]) -> tuple[list[Chart], list[Chart]]:
    """The charts of the known panels, and those of every other metric that was logged."""
    logged = sorted({key for run in runs for row in run.metrics for key in row if key != "step"})
    main = [chart for key, words in PANELS.items() if key in logged and (chart := _chart(runs, key, *words))]
    rest = [chart for key in logged if key not in PANELS and (chart := _chart(runs, key, key, ""))]
    return main, rest


def moving_mean(values: Sequence[float]) -> np.ndarray:
    """Centred moving mean whose window is about a twelfth of the run; windows shrink at the ends."""
    data = np.asarray(values, dtype=np.float64)
    half = len(data) // 24
    if half == 0:
        return data
    sums = np.concatenate([[0.0], np.cumsum(data)])
    centre = np.arange(len(data))
    low, high = np.maximum(centre - half, 0), np.minimum(centre + half + 1, len(data))
    return (sums[high] - sums[low]) / (high - low)


def nice_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Round tick positions (1, 2, 2.5, 5 × a power of ten) within low..high."""
    span = high - low
    power = 10.0 ** np.floor(np.log10(span / most))
    step = next(power * factor for factor in (1, 2, 2.5, 5, 10, 20) if span / (power * factor) <= most)
    first = np.ceil(low / step - 1e-9)
    return [float((first + index) * step) for index in range(int((high - first * step) / step + 1e-9) + 1)]


def number(value: float) -> str:
    """A short number with a real minus sign."""
    text = f"{value:.3g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return ("0" if float(text.replace(",", "")) == 0 else text).replace("-", "−")


def _chart(runs: Sequence[Run], key: str, title: str, note: str) -> Chart | None:
    series = [(index, run.name, *run.series(key)) for index, run in enumerate(runs)]
    series = [entry for entry in series if len(entry[2]) >= 2]
    if not series:
        return None
    x_low, x_high = min(min(s[2]) for s in series), max(max(s[2]) for s in series)
    y_low, y_high = _range([value for s in series for value in s[3]])

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / ((x_high - x_low) or 1)
        up = (y - y_low) / (y_high - y_low)
        return (
            round(LEFT + across * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1),
        )

    lines = []
    for index, name, steps, values in series:
        smooth = moving_mean(values)
        keep = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), MOST_POINTS)).round().astype(int))
        raw = [place(steps[i], values[i]) for i in keep]
        lines.append(
            Line(
                run=name,
                colour=index % len(COLOURS),
                dash=DASHES[index % len(DASHES)],
                raw=" ".join(f"{x:g},{y:g}" for x, y in raw),
                smooth=" ".join("{:g},{:g}".format(*place(steps[i], smooth[i])) for i in keep),
                dots=raw if len(raw) <= 12 else [],
                summary=f"{number(smooth[0])} → {number(smooth[-1])}",
            )
        )
    return Chart(
        key,
        title,
        note,
        lines,
        x_ticks=[(place(x, y_low)[0], number(x)) for x in nice_ticks(x_low, x_high) if x == int(x)],
        y_ticks=[(place(x_low, y)[1], number(y)) for y in nice_ticks(y_low, y_high)],
        x_range=(x_low, x_high),
        y_range=(y_low, y_high),
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    return low - margin, high + margin


def save_figure(runs: Sequence[Run], path: str | Path) -> Path:
    """Write the main curves of the runs as one PNG (or PDF, SVG: by suffix). Raises ValueError without data."""
    import matplotlib
    from matplotlib.figure import Figure  # not pyplot: it would pick a window system for the whole process
    from matplotlib.lines import Line2D

    keys = [key for key in FIGURE_PANELS if any(len(run.series(key)[0]) >= 2 for run in runs)][:4]
    if not keys:
        raise DataFileError(f"nothing to plot: no run logged two steps of {', '.join(FIGURE_PANELS)}")
    columns = 1 if len(keys) == 1 else 2
    style: dict[Any, Any] = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#8a8f98",
        "axes.grid": True,
        "grid.color": "#e6e8eb",
        "axes.axisbelow": True,
        "xtick.color": "#4a4f57",
        "ytick.color": "#4a4f57",
    }
    with matplotlib.rc_context(style):
        rows = -(-len(keys) // columns)
        figure = Figure(figsize=(5.2 * columns, 3.3 * rows + 0.4), layout="constrained")
        axes = figure.subplots(rows, columns, squeeze=False)
        for axis, key in zip(axes.flat, keys, strict=False):
            for index, run in enumerate(runs):
                steps, values = run.series(key)
                if len(steps) < 2:
                    continue
                smooth = moving_mean(values)
                colour, dash = COLOURS[index % len(COLOURS)], DASHES[index % len(DASHES)]
                line_style = (0, tuple(float(part) / 2.4 for part in dash.split())) if dash else "-"
                axis.plot(steps, values, color=colour, alpha=0.25, linewidth=1)
                marker = "o" if len(steps) <= 12 else None
                axis.plot(
                    steps, smooth, color=colour, linewidth=2.2, linestyle=line_style, marker=marker, label=run.name
                )
            title, note = PANELS[key]
            axis.set_title(title, loc="left", fontweight="bold", fontsize=11, pad=18)
            axis.text(0, 1.03, note, transform=axis.transAxes, color="#5b6068", fontsize=9)
            axis.set_xlabel("step", color="#4a4f57")
            axis.margins(x=0.02)
        for axis in axes.flat[len(keys) :]:
            axis.set_axis_off()
        handles, labels = axes.flat[0].get_legend_handles_labels()
        handles.append(Line2D([], [], color="#8a8f98", alpha=0.5, linewidth=1))
        labels.append("single steps (bold: moving mean)")
        figure.legend(handles, labels, loc="outside upper left", ncols=min(4, len(labels)), frameon=False)
        figure.savefig(path, dpi=160)
    return Path(path)
