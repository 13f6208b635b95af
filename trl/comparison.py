"""Paired comparison of runs: the same prompts under two models, or the same steps of two trainings.

A run is a generation file (JSON lines, `trl.jsonl.read_prompts`) with whatever scores the evaluation scripts have put
on its generations, the scores.csv of summ_eval.py, or the run folder of a training. Its units are prompts, posts or
steps. Differences are taken unit by unit, which removes what the units themselves differ in.
"""

import csv
import io
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trl.jsonl import DataFileError, Row, read_prompts
from trl.metrics import bootstrap_interval, distinct_n
from trl.report.runlog import Run, load_run

Kind = Literal["generation file", "summary table", "run folder"]
UNITS: dict[Kind, str] = {"generation file": "prompts", "summary table": "posts", "run folder": "steps"}
Unit = tuple[str, int]
"""A prompt and which of its occurrences; of a run folder ("step", n)."""
Text = tuple[Any, str, int]
"""Step (None but in a training), prompt, and which of its occurrences."""

_NLL = {"nll", "tokens", "perplexity"}
_TRAINING = ("objective/", "eval/")


@dataclass(frozen=True)
class Measured:
    """One run: the metrics of every unit, and the texts that a judge can compare."""

    name: str
    kind: Kind
    units: dict[Unit, dict[str, float]]
    texts: dict[Text, str]
    per_prompt: int = 1
    """Generations of every prompt."""


@dataclass(frozen=True)
class Difference:
    """One metric of a run against the baseline's, over the units that both have it for."""

    units: int
    baseline: float
    run: float
    difference: float
    """Mean of run - baseline, with its 95 % bootstrap interval."""
    low: float
    high: float
    effect: float | None
    """The mean difference in standard deviations of the differences (d_z of Lakens 2013); None where they are equal."""


def read_runs(paths: Sequence[Path]) -> list[Measured]:
    """Every run, named by its file or folder, with more of the path where two are equal.

    Raises DataFileError and OSError: what is wrong with which file, and what to do.
    """
    names = [path.resolve().stem if path.is_file() else path.resolve().name for path in paths]
    longer = [f"{path.resolve().parent.name}/{name}" for path, name in zip(paths, names, strict=True)]
    if len(set(longer)) < len(longer):
        longer = [str(path) for path in paths]
    shown = [name if names.count(name) == 1 else full for name, full in zip(names, longer, strict=True)]
    runs = [_read(path, name) for path, name in zip(paths, shown, strict=True)]
    for run in runs[1:]:
        if run.kind != runs[0].kind:
            raise DataFileError(
                f"{runs[0].name} is a {runs[0].kind} and {run.name} a {run.kind}: compare runs of one kind"
            )
    return runs


def differences(
    baseline: Measured, run: Measured, *, metrics: Sequence[str] = (), last: int | None = None, seed: int = 0
) -> dict[str, Difference]:
    """Each metric that both runs have, in the run's order; ``metrics`` picks some.

    ``last``: of a training, the last so many of the steps that both logged. Its neighbouring steps are alike, so runs
    of n^(1/3) steps are resampled; what another seed would do is not in these intervals.

    Raises DataFileError where the runs' prompts differ, or where a metric of ``metrics`` is missing.
    """
    units = paired_units(baseline, run)
    is_training = baseline.kind == "run folder"
    if is_training and last is not None:
        units = units[-last:]
    known = dict.fromkeys(name for unit in units for name in run.units[unit] if name in baseline.units[unit])
    missing = [name for name in metrics if name not in known]
    if missing:
        raise DataFileError(
            f"{baseline.name} and {run.name} have no {' or '.join(missing)} in common; they have {', '.join(known)}"
        )
    if not metrics:
        metrics = [name for name in known if not is_training or name.startswith(_TRAINING)]
    result = {}
    for name in metrics:
        pairs = [
            (a, b)
            for unit in units
            if math.isfinite(a := baseline.units[unit].get(name, math.nan))
            and math.isfinite(b := run.units[unit].get(name, math.nan))
        ]
        if pairs:
            result[name] = _difference(np.array(pairs), is_training, seed)
    return result


def _difference(pairs: np.ndarray, is_training: bool, seed: int) -> Difference:
    """Of ``pairs`` (n, 2): baseline and run."""
    each = pairs[:, 1] - pairs[:, 0]
    block = max(1, round(len(each) ** (1 / 3))) if is_training else 1
    mean, low, high = bootstrap_interval(each, seed=seed, block=block)
    deviation = float(each.std(ddof=1)) if len(each) > 1 else 0.0
    before, after = (float(value) for value in pairs.mean(axis=0))
    return Difference(len(each), before, after, mean, low, high, mean / deviation if deviation > 0 else None)


def paired_units(baseline: Measured, run: Measured) -> list[Unit]:
    """The units of both runs, in the baseline's order. Raises DataFileError where they can't be paired."""
    if baseline.kind == "run folder":
        _check_queries(baseline, run)
        common = [unit for unit in baseline.units if unit in run.units]
        if not common:
            raise DataFileError(f"{baseline.name} and {run.name} have logged no step in common")
        return common
    for one, other in ((baseline, run), (run, baseline)):
        alone = [unit for unit in one.units if unit not in other.units]
        if alone:
            raise DataFileError(
                f"{baseline.name} and {run.name} can't be paired: {len(alone)} of the {len(one.units)} prompts of "
                f"{one.name} are not in {other.name} (first: {alone[0][0]!r:.80}); evaluate both on the same prompts"
            )
    if baseline.per_prompt != run.per_prompt:
        raise DataFileError(
            f"{baseline.name} has {baseline.per_prompt} generations per prompt and {run.name} {run.per_prompt}: maxima "
            "and diversity depend on their number; give both the same"
        )
    return list(baseline.units)


def paired_texts(baseline: Measured, run: Measured) -> list[tuple[str, str, str]]:
    """(prompt, baseline's text, run's text), one per prompt; of trainings, those of the last step that both kept."""
    paired_units(baseline, run)
    keys = [key for key in baseline.texts if key in run.texts]
    if baseline.kind == "run folder" and keys:
        last = max(key[0] for key in keys)
        keys = [key for key in keys if key[0] == last]
    if not keys:
        raise DataFileError(f"{baseline.name} and {run.name} have no texts in common that a judge could compare")
    return [(key[1], baseline.texts[key], run.texts[key]) for key in keys]


def _check_queries(baseline: Measured, run: Measured) -> None:
    """Two trainings of one seed and data saw the same queries at every step."""
    queries: list[defaultdict[int, Counter[str]]] = []
    for one in (baseline, run):
        queries.append(defaultdict(Counter))
        for step, query, _ in one.texts:
            queries[-1][step][query] += 1
    for step in sorted(queries[0].keys() & queries[1].keys()):
        if queries[0][step] != queries[1][step]:
            raise DataFileError(
                f"{baseline.name} and {run.name} can't be paired: their queries of step {step} differ; compare "
                "trainings with the same --seed, data and batch size, or generations for one prompt file"
            )


# ---------------------------------------------------------------------- reading


def _read(path: Path, name: str) -> Measured:
    if path.is_dir():
        return _read_training(load_run(path), name)
    if path.suffix == ".csv":
        return _read_summaries(path, name)
    return _read_generations(path, name)


def _numbered(prompts: Iterable[str]) -> list[Unit]:
    """Each prompt with how often it came before."""
    seen: Counter[str] = Counter()
    units = []
    for prompt in prompts:
        units.append((prompt, seen[prompt]))
        seen[prompt] += 1
    return units


def _read_generations(path: Path, name: str) -> Measured:
    rows = read_prompts(path, with_generations=True)
    counts = {len(row["generations"]) for row in rows}
    if counts == {0}:
        raise DataFileError(f"{path}: expected generations, every row's list is empty")
    keys = _numbered(row["prompt"]["text"] for row in rows)
    fields = _fields(rows)
    diversity = {n: distinct_n([[item["text"] for item in row["generations"]] for row in rows], n) for n in (1, 2, 3)}
    units = {}
    for index, (key, row) in enumerate(zip(keys, rows, strict=True)):
        units[key] = _of_generations(row["generations"], fields)
        units[key] |= {f"dist-{n}": float(values[index]) for n, values in diversity.items()}
    texts = {
        (None, *key): row["generations"][0]["text"] for key, row in zip(keys, rows, strict=True) if row["generations"]
    }
    return Measured(name, "generation file", units, texts, max(counts))


def _fields(rows: Sequence[Row]) -> dict[str, bool]:
    """Numeric fields of the generations, and whether all values are in [0, 1], as probabilities are."""
    ranges: dict[str, tuple[float, float]] = {}
    for item in (item for row in rows for item in row["generations"]):
        for field, value in item.items():
            if _is_number(value):
                low, high = ranges.get(field, (value, value))
                ranges[field] = (min(low, value), max(high, value))
    return {field: low >= 0 and high <= 1 for field, (low, high) in ranges.items()}


def _of_generations(items: Sequence[Mapping[str, Any]], fields: Mapping[str, bool]) -> dict[str, float]:
    """A prompt's metrics: means of its fields; of probabilities also the maximum and the share above one half."""
    result: dict[str, float] = {}
    has_nll = fields.keys() >= _NLL
    for field, is_probability in fields.items():
        values = [float(item[field]) for item in items if _is_number(item.get(field))]
        if not values or (has_nll and field in _NLL):
            continue
        result[field] = sum(values) / len(values)
        if is_probability:
            result[f"{field} > 0.5"] = sum(value > 0.5 for value in values) / len(values)
            result[f"{field}, maximum"] = max(values)
    if has_nll:  # the mean perplexity is mostly that of its worst few texts
        each = [item["nll"] / item["tokens"] for item in items if _is_number(item["nll"]) and item["tokens"]]
        result |= {"log perplexity": sum(each) / len(each)} if each else {}
    result["words"] = sum(len(item["text"].split()) for item in items) / len(items) if items else math.nan
    return result


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _read_summaries(path: Path, name: str) -> Measured:
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"), newline="")))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataFileError(f"{path}: expected the CSV of summ_eval.py, in UTF-8 ({error})") from error
    if not rows or not {"pred", "post"} <= rows[0].keys():
        raise DataFileError(f"{path}: expected the CSV of summ_eval.py, with the columns pred and post and a row")
    keys = _numbered(row["post"] for row in rows)
    units: dict[Unit, dict[str, float]] = {}
    for number, (key, row) in enumerate(zip(keys, rows, strict=True), start=1):
        scores = {column: cell for column, cell in row.items() if column not in ("pred", "truth", "post") and cell}
        try:
            units[key] = {column: float(cell) for column, cell in scores.items()}
        except (TypeError, ValueError) as error:
            raise DataFileError(
                f"{path}, row {number}: expected numbers behind pred, truth and post ({error})"
            ) from None
        units[key]["words"] = float(len(row["pred"].split()))
    return Measured(name, "summary table", units, {(None, *k): row["pred"] for k, row in zip(keys, rows, strict=True)})


def _read_training(run: Run, name: str) -> Measured:
    units = {
        ("step", row["step"]): {key: float(v) for key, v in row.items() if key != "step" and _is_number(v)}
        for row in run.metrics
    }
    texts: dict[Text, str] = {}
    seen: Counter[tuple[int, str]] = Counter()
    for row in run.samples:
        step, query = row["step"], str(row.get("query"))
        texts[step, query, seen[step, query]] = str(row.get("response") or "")
        seen[step, query] += 1
    return Measured(name, "run folder", units, texts)
