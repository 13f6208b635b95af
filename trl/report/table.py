"""The final table of a comparison: read from ``evaluation.json``, printed on a terminal."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from trl.jsonl import DataFileError, strict

Cell = str | float | int | None


@dataclass(frozen=True)
class EvaluationTable:
    """Column names and rows of cells; the first column names what was evaluated.

    On disk: ``{"columns": [...], "rows": [[...], ...], "title": "...", "note": "..."}`` (the last two are
    optional), or a plain list of objects, whose keys become the columns.
    """

    columns: list[str]
    rows: list[list[Cell]]
    title: str = "Evaluation"
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise DataFileError(f"expected {len(self.columns)} cells ({self.columns}), got {len(row)}: {row}")
            for cell in row:
                if not isinstance(cell, str | int | float | None):
                    raise DataFileError(f"expected text or a number in every cell, got {cell!r} in {row}")

    @classmethod
    def from_file(cls, path: str | Path) -> "EvaluationTable":
        try:
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise DataFileError(f"{path}: expected JSON ({error})") from error
        match content:
            case [dict(), *_] if all(isinstance(row, dict) for row in content):
                columns = list(dict.fromkeys(key for row in content for key in row))
                return cls(columns, [[row.get(key) for key in columns] for row in content])
            case {"columns": list(columns), "rows": [list(), *_] as rows}:
                extra = {key: str(content[key]) for key in ("title", "note") if content.get(key)}
                return cls([str(name) for name in columns], rows, **extra)
        raise DataFileError(
            f'{path}: expected {{"columns": [...], "rows": [[...], ...]}} or a list of objects, got {str(content)[:80]}'
        )

    def save(self, path: str | Path) -> None:
        content: dict[str, Any] = {"title": self.title, "columns": self.columns, "rows": self.rows}
        if self.note:
            content["note"] = self.note
        Path(path).write_text(json.dumps(strict(content), indent=1, ensure_ascii=False) + "\n", "utf-8")

    def layout(self) -> tuple[list[str], list[list[str]]]:
        """Header and cells as shown to people, one precision per column of numbers.

        A wide table is turned (what was evaluated across, its figures down) to fit terminals and phones.
        """
        columns = [_format_column([row[index] for row in self.rows]) for index in range(len(self.columns))]
        if len(self.columns) > 6 and len(self.rows) < 6:
            return [self.columns[0], *columns[0]], [
                [name, *cells] for name, cells in zip(self.columns[1:], columns[1:], strict=True)
            ]
        return self.columns, [list(cells) for cells in zip(*columns, strict=True)]


def _format_column(cells: Sequence[Cell]) -> list[str]:
    """One precision for the column: three significant digits of its largest number, at most three decimals."""
    numbers = [abs(cell) for cell in cells if isinstance(cell, float) and cell == cell]
    largest = max(numbers, default=0.0)
    decimals = 3 if largest < 1 else 2 if largest < 10 else 1 if largest < 1000 else 0
    return [_format_cell(cell, decimals) for cell in cells]


def _format_cell(cell: Cell, decimals: int) -> str:
    if cell is None or cell != cell:
        return "–"
    if isinstance(cell, bool | str):
        return str(cell)
    return f"{cell:,.{decimals}f}".replace("-", "−") if isinstance(cell, float) else f"{cell:,}"


def rich_table(table: EvaluationTable) -> Table:
    """The table for ``rich.print``."""
    header, rows = table.layout()
    view = Table(title=table.title, caption=table.note or None, box=box.SIMPLE_HEAD, title_justify="left")
    for index, name in enumerate(header):
        view.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    for cells in rows:
        view.add_row(*cells)
    return view
