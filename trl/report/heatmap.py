"""Colours for per-token numbers: one diverging scale per measure, and a heat map for the terminal.

Blue above the centre, orange below it: the pair stays apart under the common colour-vision deficiencies and,
in the HTML page, is doubled by solid and dashed underlines.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from unicodedata import category

import numpy as np
from rich.console import Console
from rich.text import Text

Measure = Literal["intrinsic", "kl", "value", "advantage"]
MEASURES: dict[Measure, str] = {
    "intrinsic": "Intrinsic reward",
    "kl": "KL",
    "value": "Value",
    "advantage": "Advantage",
}
_BIDIRECTIONAL = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
POSITIVE_RGB = (0x21, 0x7A, 0xC4)
NEGATIVE_RGB = (0xD9, 0x5F, 0x02)


@dataclass(frozen=True)
class Scale:
    """Maps a number to −1..1: 0 at ``centre``, ±1 at ``centre ± limit``."""

    centre: float
    limit: float

    def position(self, value: float | None) -> float:
        return 0.0 if value is None else min(1.0, max(-1.0, (value - self.centre) / self.limit))


def measure_scale(samples: Iterable[dict[str, Any]], measure: Measure) -> Scale:
    """A scale over all tokens: zero-centred, but value estimates around their mean (they share an offset).

    The limit is the 98th percentile of the distances from the centre, so that one outlier does not
    bleach the rest; where that is zero (sparse rewards), the largest distance.
    """
    numbers = [token.get(measure) for sample in samples for token in sample.get("tokens") or ()]
    data = np.array([number for number in numbers if isinstance(number, int | float)], dtype=np.float64)
    data = data[np.isfinite(data)]
    if not data.size:
        return Scale(0.0, 1.0)
    centre = float(data.mean()) if measure == "value" else 0.0
    distances = np.abs(data - centre)
    # The critic's rewards are a few constants: their largest is no outlier.
    limit = 0.0 if measure == "intrinsic" else float(np.quantile(distances, 0.98))
    return Scale(centre, limit or float(distances.max()) or 1.0)


def heatmap_text(sample: dict[str, Any], measure: Measure, scale: Scale, *, colour: bool = True) -> Text:
    """One line: the query dimmed, then each response token on its colour (without colour: ``[+token]``)."""
    line = Text(visible(str(sample.get("query") or "")), style="dim")
    for token in sample.get("tokens") or ():
        position = scale.position(token.get(measure))
        text = visible(str(token["text"]))
        if abs(position) < 0.05:
            line.append(text, style="not dim")
        elif colour:
            line.append(text, style=f"not dim {_foreground(position)} on {_background(position)}")
        else:
            stripped = text.lstrip(" ")
            mark = "+" if position > 0 else "−"
            line.append(f"{text[: len(text) - len(stripped)]}[{mark}{stripped}]", style="not dim")
    return line


def print_heatmap(
    rows: Sequence[dict[str, Any]], measure: Measure = "intrinsic", console: Console | None = None
) -> None:
    """Print sample rows (as in ``samples.jsonl``) with their tokens coloured by one measure."""
    console = console or Console()
    scale = measure_scale(rows, measure)
    console.print(
        f"{MEASURES[measure]}: orange below, blue above {scale.centre:.3g} (± {scale.limit:.3g})", style="dim"
    )
    for row in rows:
        head = f"{row['score']:+7.2f}  " if isinstance(row.get("score"), int | float) else "         "
        text = heatmap_text(row, measure, scale, colour=console.color_system is not None)
        console.print(Text.assemble((head, "bold"), text), highlight=False)


def visible(text: str) -> str:
    """``text`` on one line, with signs in place of what would move it or its surroundings."""
    text = text.replace("\r", "").replace("\n", "↵").replace("\t", " ")
    # a terminal obeys control characters, and bidirectional ones move the text that follows
    return "".join("�" if category(c) == "Cc" or c in _BIDIRECTIONAL else c for c in text)


def _background(position: float) -> str:
    """From a near-black to the full hue, so that weak tokens stay readable on dark and light terminals."""
    hue = POSITIVE_RGB if position > 0 else NEGATIVE_RGB
    share = 0.35 + 0.65 * abs(position)
    return "#" + "".join(f"{round(0x20 + (part - 0x20) * share):02x}" for part in hue)


def _foreground(position: float) -> str:
    return "#000000" if position < -0.75 else "#ffffff"
