"""The samples inside the page: packed, cut to a size, and safe inside ``<script>``."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from trl.jsonl import Row, strict
from trl.report.heatmap import MEASURES, measure_scale
from trl.report.runlog import Run, finite

LONGEST_QUERY = 900
LONGEST_REPLY = 2_000


def embedded_samples(runs: Sequence[Run], budget: int) -> tuple[str, int, int]:
    """JSON of ``{"scales", "samples"}`` in at most about ``budget`` bytes, the samples it holds, and all there were.

    Beyond the budget, evenly spread samples are kept, and each run's best and worst.
    """
    everything = [(index, sample) for index, run in enumerate(runs) for sample in run.samples]
    packed = [to_script(_pack(index, sample)) for index, sample in everything]
    sizes = [len(row.encode()) + 2 for row in packed]
    extremes = _extremes(everything)
    count, keep = len(packed), set(range(len(packed)))
    while count and sum(sizes[index] for index in keep) > budget:
        count = int(0.95 * count)
        keep = set(np.linspace(0, len(packed) - 1, count).astype(int).tolist()) | extremes
    scales = {}
    for measure in MEASURES:
        scale = measure_scale((sample for _, sample in everything), measure)
        scales[measure] = [scale.centre, scale.limit]
    body = ",\n".join(packed[index] for index in sorted(keep))
    return f'{to_script({"scales": scales})[:-1]},"samples":[\n{body}\n]}}', len(keep), len(packed)


def _extremes(everything: Sequence[tuple[int, Row]], count: int = 5) -> set[int]:
    chosen: set[int] = set()
    for run in {run for run, _ in everything}:
        scored = [
            (s, i)
            for i, (own, row) in enumerate(everything)
            if own == run and (s := finite(row.get("score"))) is not None
        ]
        scored.sort()
        chosen |= {i for _, i in (*scored[:count], *scored[-count:])}
    return chosen


def _pack(run: int, sample: Row) -> list[Any]:
    """[run, step, score, query, tokens, spans, reply, status]; numbers at three significant digits."""
    tokens = [
        [str(token.get("text", "")), *(_short(token.get(measure)) for measure in MEASURES)]
        for token in _dicts(sample.get("tokens"))
    ]
    if not tokens and sample.get("response"):
        tokens = [[str(sample["response"]), None, None, None, None]]
    spans = [
        [str(span.get("text", "")), str(span.get("polarity", "")), _text(span.get("label"))]
        for span in _dicts(sample.get("spans"))
    ]
    query, reply = _text(sample.get("query")) or "", _text(sample.get("reply"))
    if len(query) > LONGEST_QUERY:  # a document: its start says which, its end is what the response follows
        query = f"{query[: LONGEST_QUERY // 3]} […] {query[-LONGEST_QUERY * 2 // 3 :]}"
    if reply and len(reply) > LONGEST_REPLY:
        reply = f"{reply[:LONGEST_REPLY]} […]"
    score = _short(sample.get("score"))
    return [run, sample["step"], score, query, tokens, spans, reply, _text(sample.get("status"))]


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _short(value: Any, digits: int = 3) -> float | int | None:
    number = finite(value)
    if number is None:
        return None
    short = float(f"{number:.{digits}g}")
    return int(short) if short == int(short) else short


def short_numbers(value: Any, digits: int = 4) -> Any:
    """``value`` with all its floats, however nested, cut to some significant digits."""
    if isinstance(value, dict):
        return {key: short_numbers(item, digits) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [short_numbers(item, digits) for item in value]
    return _short(value, digits) if isinstance(value, float) else value


def to_script(value: Any) -> str:
    """JSON in which no character can end the script element or start markup."""
    text = json.dumps(strict(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
