"""A run's record on disk: ``metrics.jsonl``, ``samples.jsonl`` and ``run.json``, and how they are read back."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trl.jsonl import DataFileError, Row, append_rows, cut_torn_line, dump_line, read_jsonl

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"
SETTINGS_FILE = "run.json"
MATCH_RATE = "critic/match_rate"
"""Share of the quoted spans that are in the text; derived from what was logged."""


class RunLog:
    """Appends metrics and samples to a run folder, in whole lines; reopening continues the files.

    Where the disk is full, an OSError names the file, which keeps its earlier rows.

    A sample row is ``{query, response, score, tokens, spans, reply, status}`` with
    ``tokens = [{text, intrinsic, kl, value, advantage}, …]`` (one per response token) and
    ``spans = [{text, polarity, label}, …]``; the step is added here. NaN is written as null.
    """

    def __init__(self, output_dir: str | Path) -> None:
        self.output_dir = Path(output_dir)
        self.output_dir.mkdir(parents=True, exist_ok=True)
        for name in (METRICS_FILE, SAMPLES_FILE):
            cut_torn_line(self.output_dir / name)
        self._metrics = FileIO(self.output_dir / METRICS_FILE, "a")
        self._samples = FileIO(self.output_dir / SAMPLES_FILE, "a")

    def log_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one row. Values are numbers (Python, numpy, or one-element tensors)."""
        append_rows(self._metrics, [{"step": step, **metrics}])

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append the samples of a step."""
        append_rows(self._samples, ({"step": step, **sample} for sample in samples))

    def close(self) -> None:
        self._metrics.close()
        self._samples.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True)
class Run:
    """What a run folder holds, in order of steps; ``settings`` are those of ``run.json``."""

    name: str
    metrics: list[Row]
    samples: list[Row]
    settings: dict[str, Any] = field(default_factory=dict)
    folder: Path = Path()

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, without the steps where it is missing or no finite number."""
        points = [(row["step"], value) for row in self.metrics if (value := finite(row.get(key))) is not None]
        return [step for step, _ in points], [value for _, value in points]

    @property
    def last_step(self) -> int:
        """0 before the first step."""
        return max((row["step"] for row in self.metrics), default=0)

    @property
    def seed(self) -> int | None:
        """The recorded one."""
        found = self.settings.get("seed", self.settings.get("ppo_config", {}).get("seed"))
        return found if isinstance(found, int) else None


def finite(value: Any) -> float | None:
    """``value`` as a finite number; None for all else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def load_runs(folders: Sequence[str | Path], *, started_only: bool = False) -> list[Run]:
    """Runs, named by their folder, with as many of its parents' names as tell it from the others.

    Raises FileNotFoundError for a folder that is no run's; with ``started_only`` it is left out (not yet begun).
    """
    paths = list(dict.fromkeys(Path(folder).resolve() for folder in folders))
    if started_only:
        paths = [path for path in paths if any((path / name).exists() for name in (METRICS_FILE, SAMPLES_FILE))]
    parts = 1
    while len({path.parts[-parts:] for path in paths}) < len(paths):
        parts += 1
    return [load_run(path, "/".join(path.parts[-parts:])) for path in paths]


def load_run(folder: str | Path, name: str | None = None) -> Run:
    """Read a run folder, also one that is being written. Raises FileNotFoundError when it has neither of the two files.

    Where a run was resumed from an earlier checkpoint, the steps that it repeated replace the first ones.
    """
    folder = Path(folder)
    paths = [folder / METRICS_FILE, folder / SAMPLES_FILE]
    if not any(path.exists() for path in paths):
        raise FileNotFoundError(f"{folder} is no run folder: it has neither {METRICS_FILE} nor {SAMPLES_FILE}")
    metrics, samples = (_without_repeats(_steps(path)) if path.exists() else [] for path in paths)
    merged: dict[int, Row] = {}
    for row in metrics:
        merged.setdefault(row["step"], {}).update(row)
    rows = [row | _match_rate(row) for row in merged.values()]
    return Run(name or folder.resolve().name, rows, samples, _settings(folder / SETTINGS_FILE), folder.resolve())


def _match_rate(row: Row) -> Row:
    matched, unmatched = finite(row.get("critic/matched")), finite(row.get("critic/unmatched"))
    if matched is None or unmatched is None or not matched + unmatched:
        return {}
    return {MATCH_RATE: matched / (matched + unmatched)}


def _settings(path: Path) -> dict[str, Any]:
    """The recorded settings and, as ``script``, what ran; empty without a file, or with one that is half written."""
    try:
        recorded = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    match recorded:
        case {"args": dict(settings), "command": [_, str(script), *_]}:
            return {"script": Path(script).name, **settings}
        case {"args": dict(settings)}:
            return settings
    return {}


def _steps(path: Path) -> list[Row]:
    rows = read_jsonl(path)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("step"), int):
            raise DataFileError(f"{path}, row {number}: expected a whole number called step, got {dump_line(row)[:80]}")
    return rows


def _without_repeats(rows: Sequence[Row]) -> list[Row]:
    """Where the step goes back, drop the earlier rows of that step and of later ones."""
    kept: list[Row] = []
    for row in rows:
        if kept and kept[-1]["step"] > row["step"]:
            kept = [old for old in kept if old["step"] < row["step"]]
        kept.append(row)
    return kept
