"""The token heat map as a figure: a run's best and worst samples, each response token on its colour.

For scripts that Matplotlib sets from left to right in its own font (Latin, Greek, Cyrillic); the page shows all.
"""

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from trl.jsonl import Row
from trl.report.curves import number
from trl.report.heatmap import MEASURES, NEGATIVE_RGB, POSITIVE_RGB, Measure, Scale, measure_scale, visible
from trl.report.runlog import Run, finite

WIDTH, LINE, GAP = 10.0, 0.27, 0.2  # inches: the figure, a line of text, and between samples
SIZE = 10.5  # points
DPI = 160  # widths depend on it, since letters are fitted to pixels
LONGEST_QUERY = 120


def extreme_samples(samples: Sequence[Row], count: int = 3) -> tuple[list[Row], list[Row]]:
    """The highest and the lowest scored samples with tokens, of the last quarter of the run if it has enough."""
    scored = [row for row in samples if finite(row.get("score")) is not None and row.get("tokens")]
    last = max((row["step"] for row in samples), default=0)
    late = [row for row in scored if row["step"] >= 0.75 * last]
    ranked = sorted(late if len(late) >= 2 * count else scored, key=lambda row: float(row["score"]))
    half = min(count, len(ranked) // 2)
    return ranked[::-1][:half], ranked[:half]


def save_heatmap(run: Run, path: str | Path, measure: Measure = "intrinsic") -> Path | None:
    """Draw the best and the worst samples of a run (PNG or PDF: by suffix); None, and no file, where it has too few."""
    best, worst = extreme_samples(run.samples)
    if not best:
        return None
    scale = measure_scale(run.samples, measure)
    # laid out twice: the first pass finds how many lines there are
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a box stands for it
        lines = _draw(Figure(figsize=(WIDTH, 10.0), dpi=DPI), run.name, best, worst, scale, measure)
        figure = Figure(figsize=(WIDTH, lines), dpi=DPI)
        _draw(figure, run.name, best, worst, scale, measure)
        figure.savefig(path, dpi=DPI)
    return Path(path)


def _draw(figure: Figure, name: str, best: list[Row], worst: list[Row], scale: Scale, measure: Measure) -> float:
    """Draw all on a figure; returns the height in inches that it takes."""
    FigureCanvasAgg(figure)
    height = figure.get_figheight()
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, WIDTH), ylim=(height, 0))
    axes.set_axis_off()
    _text(axes, 0.3, 0.35, f"{MEASURES[measure]} by token: {name}", weight="bold", size=SIZE + 1.5)
    bounds = f"orange: below {number(scale.centre)}, blue: above (full colour at ± {number(scale.limit)})"
    _text(axes, 0.3, 0.35 + LINE, bounds, color="#5b6068", size=SIZE - 1.5)
    y = 0.35 + 2 * LINE + GAP
    for title, samples in (("Highest scores", best), ("Lowest scores", worst)):
        _text(axes, 0.3, y, title, weight="bold", color="#5b6068")
        y += LINE
        for sample in samples:
            y = _sample(axes, y, sample, scale, measure) + GAP
        y += GAP
    return y - GAP


def _sample(axes: Axes, top: float, sample: Row, scale: Scale, measure: Measure) -> float:
    """A sample from ``top`` downwards; returns where it ends."""
    left, x, y = 1.05, 1.05, top
    _text(axes, 0.9, y, number(float(sample["score"])), weight="bold", ha="right")
    for text, t in _pieces(sample, scale, measure):
        colour = "#6b7079" if t is None else "black"
        drawn = _text(axes, x, y, text, color=colour)
        wide = drawn.get_window_extent().width / axes.figure.dpi if text.strip() else 0.0
        if x + wide > WIDTH - 0.3 and x > left:
            drawn.remove()
            x, y = left, y + LINE
            text = text.lstrip(" ")
            drawn = _text(axes, x, y, text, color=colour)
            wide = drawn.get_window_extent().width / axes.figure.dpi if text.strip() else 0.0
        blank = len(text) - len(text.lstrip(" "))
        if t:
            start = x + blank * SPACE
            axes.add_patch(Rectangle((start, y - 0.16), x + wide - start, 0.21, color=_tint(t), linewidth=0, zorder=0))
        x += wide if text.strip() else blank * SPACE
    return y + LINE


SPACE = 0.318 * SIZE / 72
"""Inches that a space takes in Matplotlib's font, DejaVu Sans."""


def _pieces(sample: Row, scale: Scale, measure: Measure) -> Iterator[tuple[str, float | None]]:
    """Words of the query's end (None), then the response's tokens with their place on the scale, −1..1."""
    query = visible(str(sample.get("query") or ""))
    shown = query if len(query) <= LONGEST_QUERY else f"… {query[-LONGEST_QUERY:]}"
    for index, word in enumerate(shown.split(" ")):
        yield (f" {word}" if index else word), None
    for token in sample["tokens"]:
        yield visible(str(token.get("text", ""))), scale.position(finite(token.get(measure)))


def _text(axes: Axes, x: float, y: float, text: str, **style: Any) -> Text:
    return axes.text(x, y, text, **{"size": SIZE, "parse_math": False, **style})


def _tint(t: float) -> tuple[float, float, float]:
    hue, share = (POSITIVE_RGB if t > 0 else NEGATIVE_RGB), 0.6 * abs(t)
    red, green, blue = (1 - share * (1 - part / 255) for part in hue)
    return red, green, blue
