"""The report page: one HTML file with its data, styles and script inside."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from trl.jsonl import strict
from trl.report.curves import COLOURS, HEIGHT, WIDTH, charts
from trl.report.heatmap import MEASURES, measure_scale
from trl.report.runlog import Run, load_run
from trl.report.table import EvaluationTable

SAMPLE_BYTES = 2_300_000
"""Budget of the embedded samples; with curves and page the file stays below 3 MB."""
LONGEST_QUERY = 900
LONGEST_REPLY = 2_000


def write_report(runs: Sequence[Run], output: str | Path, table: EvaluationTable | None = None) -> Path:
    """Write the page of some runs, making its folder; returns its path."""
    path = Path(output)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(runs, table), encoding="utf-8", errors="xmlcharrefreplace")
    return path


def load_runs(folders: Sequence[str | Path]) -> list[Run]:
    """Runs, named by their folder, with its parent's name where two are equal.

    Raises FileNotFoundError for a folder that is no run's.
    """
    runs = [load_run(folder) for folder in folders]
    names = [run.name for run in runs]
    return [
        run
        if names.count(run.name) == 1
        else Run("/".join(Path(folder).resolve().parts[-2:]), run.metrics, run.samples)
        for run, folder in zip(runs, folders, strict=True)
    ]


def render(runs: Sequence[Run], table: EvaluationTable | None = None) -> str:
    """The page as text; everything that came from a model or a file is escaped."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    main_charts, other_charts = charts(runs)
    samples, shown, total = embedded_samples(runs)
    return environment.get_template("template.html").render(
        runs=[run.name for run in runs],
        colours=len(COLOURS),
        steps=[max((row["step"] for row in run.metrics), default=0) for run in runs],
        table=table,
        charts=main_charts,
        other_charts=other_charts,
        width=WIDTH,
        height=HEIGHT,
        measures=MEASURES,
        samples_shown=shown,
        samples_total=total,
        data=samples,
    )


def embedded_samples(runs: Sequence[Run], budget: int = SAMPLE_BYTES) -> tuple[Markup, int, int]:
    """The samples as JSON that is safe inside ``<script>``, how many it holds and how many there were.

    Beyond the budget, every n-th sample is kept, and each run's best and worst.
    """
    everything = [(index, sample) for index, run in enumerate(runs) for sample in run.samples]
    packed = [_to_script(_pack(index, sample)) for index, sample in everything]
    sizes = [len(row.encode()) for row in packed]
    stride = 1
    while sum(sizes[::stride]) > budget and stride < len(sizes):
        stride += 1
    keep = set(range(0, len(packed), stride))
    if stride > 1:
        keep |= _extremes(everything)
    scales = {}
    for measure in MEASURES:
        scale = measure_scale((sample for _, sample in everything), measure)
        scales[measure] = [scale.centre, scale.limit]
    body = ",\n".join(packed[index] for index in sorted(keep))
    head = _to_script({"runs": [run.name for run in runs], "scales": scales})
    return Markup(f'{head[:-1]},"samples":[\n{body}\n]}}'), len(keep), len(packed)


def _extremes(everything: Sequence[tuple[int, dict[str, Any]]], count: int = 5) -> set[int]:
    chosen: set[int] = set()
    for run in {run for run, _ in everything}:
        scored = [i for i, (owner, s) in enumerate(everything) if owner == run and s.get("score") is not None]
        scored.sort(key=lambda i: everything[i][1]["score"])
        chosen |= {*scored[:count], *scored[-count:]}
    return chosen


def _pack(run: int, sample: dict[str, Any]) -> list[Any]:
    """[run, step, score, query, tokens, spans, reply, status]; numbers at three significant digits."""
    tokens = [
        [token["text"], *(_short(token.get(measure)) for measure in MEASURES)] for token in sample.get("tokens") or ()
    ]
    if not tokens and sample.get("response"):
        tokens = [[sample["response"], None, None, None, None]]
    spans = [[span["text"], span["polarity"], span.get("label")] for span in sample.get("spans") or ()]
    query, reply = str(sample.get("query") or ""), sample.get("reply")
    if len(query) > LONGEST_QUERY:  # a document: its start says which, its end is what the response follows
        query = f"{query[: LONGEST_QUERY // 3]} […] {query[-LONGEST_QUERY * 2 // 3 :]}"
    if reply and len(reply) > LONGEST_REPLY:
        reply = f"{reply[:LONGEST_REPLY]} […]"
    return [run, sample["step"], _short(sample.get("score")), query, tokens, spans, reply, sample.get("status")]


def _short(value: Any) -> float | int | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    short = strict(float(f"{value:.3g}"))
    return int(short) if short is not None and short == int(short) else short


def _to_script(value: Any) -> str:
    """JSON in which no character can end the script element or start markup."""
    text = json.dumps(strict(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
