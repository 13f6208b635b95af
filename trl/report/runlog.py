"""A run's record on disk: ``metrics.jsonl`` and ``samples.jsonl``, and how they are read back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trl.jsonl import DataFileError, Row, cut_torn_line, dump_line, open_for_append, read_jsonl

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class RunLog:
    """Appends metrics and samples to a run folder, flushed per call; reopening continues the files.

    A sample row is ``{query, response, score, tokens, spans, reply, status}`` with
    ``tokens = [{text, intrinsic, kl, value, advantage}, …]`` (one per response token) and
    ``spans = [{text, polarity, label}, …]``; the step is added here. NaN is written as null.
    """

    def __init__(self, output_dir: str | Path) -> None:
        self.output_dir = Path(output_dir)
        self.output_dir.mkdir(parents=True, exist_ok=True)
        for name in (METRICS_FILE, SAMPLES_FILE):
            cut_torn_line(self.output_dir / name)
        self._metrics = open_for_append(self.output_dir / METRICS_FILE)
        self._samples = open_for_append(self.output_dir / SAMPLES_FILE)

    def log_metrics(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one row. Values are numbers (Python, numpy, or one-element tensors)."""
        self._metrics.write(dump_line({"step": step, **metrics}) + "\n")
        self._metrics.flush()

    def log_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Append the samples of a step."""
        self._samples.write("".join(dump_line({"step": step, **sample}) + "\n" for sample in samples))
        self._samples.flush()

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
    """What a run folder holds, in order of steps."""

    name: str
    metrics: list[Row]
    samples: list[Row]

    def series(self, key: str) -> tuple[list[int], list[float]]:
        """Steps and values of one metric, without the steps where it is missing or null."""
        points = [(row["step"], row[key]) for row in self.metrics if isinstance(row.get(key), int | float)]
        return [step for step, _ in points], [float(value) for _, value in points]


def load_run(folder: str | Path) -> Run:
    """Read a run folder. Raises FileNotFoundError when it has neither of the two files.

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
    return Run(folder.resolve().name, list(merged.values()), samples)


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
