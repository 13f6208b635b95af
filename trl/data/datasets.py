"""Rows of a data set, whatever it is named by.

A name is a hub data set, a ``builtin:`` name, a local file (``.jsonl``; ``.csv`` where the task's rows are flat), or
a local folder: with one such file per split (``train.jsonl``, ``test.jsonl``), a copy of a hub repository, or a data
set that ``save_to_disk`` wrote.
"""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from trl.builtin import is_builtin, resolve
from trl.builtin.catalog import Kind
from trl.jsonl import DataFileError, is_text, read_numbered

Row = dict[str, Any]


@dataclass(frozen=True)
class Layout:
    """What a task reads.

    ``rows`` says in words what a row must hold ("a text column"), ``example`` names the built-in that does.
    """

    kind: Kind
    columns: tuple[str, ...]
    rows: str
    example: str
    suffixes: tuple[str, ...] = (".jsonl",)

    @property
    def files(self) -> str:
        """The file types in words."""
        return " or ".join(self.suffixes)


def read_rows(
    name: str,
    split: str,
    layout: Layout,
    *,
    stem: str | None = None,
    limit: int | None = None,
    streaming: bool = False,
) -> Iterator[tuple[str, Row]]:
    """(where it stands, row) for the rows of a split, in order; the first ``limit`` of them.

    ``stem`` is the name of a folder's file if that isn't the split's. Of a hub or saved data set, only
    ``layout.columns`` are read, and all of them must be there; what a file's rows hold is the caller's to check.
    ``streaming``: of a hub data set, fetch what is read and not all of it, for sets that are many times the limit.

    Raises ``DataFileError`` (what was expected and what to do) and ``BuiltinError``, at once and not at the first row.
    """
    path = resolve(name, layout.kind) if is_builtin(name) else Path(name)
    if path.is_file():
        if split != "train":
            raise DataFileError(
                f"{path} is one file, so it has no split {split!r}; give a folder with train{path.suffix} and "
                f"{split}{path.suffix}"
            )
        return _read_file(path, layout, limit)
    for suffix in layout.suffixes:
        file = path / f"{stem or split}{suffix}"
        if file.is_file():
            return _read_file(file, layout, limit)
    return _read_dataset(name, path, split, layout, limit, streaming)


def text_of(row: Row, column: str, where: str) -> str:
    """The row's string, of whole characters; ``DataFileError`` names the row if it is anything else."""
    text = row.get(column)
    if not is_text(text):
        given = f"{text!r:.80} among {', '.join(map(str, row))}"
        raise DataFileError(f"{where}: expected a string called {column}, of whole characters, got {given}")
    return str(text)


def _read_file(path: Path, layout: Layout, limit: int | None) -> Iterator[tuple[str, Row]]:
    if path.suffix not in layout.suffixes:
        raise DataFileError(f"{path}: expected a {layout.files} file with {layout.rows}")
    if path.suffix == ".csv":
        rows, unit = list(enumerate(_read_csv(path), start=1)), "row"
    else:
        rows, unit = read_numbered(path), "line"
    return ((f"{path}, {unit} {number}", row) for number, row in rows[:limit])


def _read_csv(path: Path) -> list[Row]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataFileError(f"{path}: expected CSV in UTF-8 ({error}); JSON lines hold any text") from error


def _read_dataset(
    name: str, path: Path, split: str, layout: Layout, limit: int | None, streaming: bool
) -> Iterator[tuple[str, Row]]:
    """From the hub, a copy of a hub repository, or a folder that ``save_to_disk`` wrote."""
    from datasets import DatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    try:
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            saved = load_from_disk(str(path))
            data = saved[split] if isinstance(saved, DatasetDict) else saved
        else:
            data = load_dataset(name, split=split, streaming=streaming)
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise DataFileError(
            f"cannot load the split {split!r} of {name!r} ({reason}); give a data set on the hub (needs network), "
            f"a local folder, a {layout.files} file with {layout.rows}, or {layout.example}"
        ) from error
    present = data.column_names or layout.columns  # a stream may not know them before its first row
    missing = [column for column in layout.columns if column not in present]
    if missing:
        raise DataFileError(
            f"{name!r} has the columns {', '.join(present)}; expected {layout.rows} (missing: {', '.join(missing)})"
        )
    rows = islice(data.select_columns(list(layout.columns)), limit)
    return ((f"{name!r}, row {number}", row) for number, row in enumerate(rows, start=1))
