"""Critiques on file: RecordingCritic writes what any critic answers, ReplayCritic answers from such a file.

JSON Lines: ``{"request": {"text", "document", "score", "start"}, "spans": [{"text", "polarity", "label"}], "status",
"reply", "error", "call"}``. A file made by hand needs only the request's text and the spans; other fields are left
alone. A run's ``critiques.jsonl`` (:mod:`trl.critic.log`) is such a file too.
"""

import os
from collections.abc import Sequence
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any, get_args

from trl.critic.types import Critic, Critique, CritiqueRequest, Span, Status
from trl.jsonl import DataFileError, Row, append_rows, cut_torn_line, dump_line, read_jsonl

_NO_ANSWER = ("failed", "skipped")


class RecordingCritic:
    """Passes requests on to ``critic`` and appends its answers to a file before handing them back.

    The rows of one ``critique`` call are one write to the end of the file, so that several processes may record
    to one file, and a kill leaves at most one torn line, which readers ignore.

    Args:
        critic: who answers.
        path: created with its folders if missing; an existing recording is continued.

    Raises:
        OSError: the file can't be written.
    """

    def __init__(self, critic: Critic, path: str | Path) -> None:
        self._critic, self._path = critic, Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if _ends_torn(self._path):
            cut_torn_line(self._path)
        self._path.open("ab").close()  # a path that can't be written is an error now, not after the first critiques

    def critique(self, requests: Sequence[CritiqueRequest]) -> list[Critique]:
        """The critic's answers."""
        critiques = self._critic.critique(requests)
        rows = [
            {"request": asdict(request), **asdict(critique)}
            for request, critique in zip(requests, critiques, strict=True)
        ]
        with FileIO(self._path, "a") as file:
            append_rows(file, rows)
        return critiques


class ReplayCritic:
    """Answers from a recording: no model, no network, the same critiques every time.

    An entry is found by its text and document. Where a text was recorded several times, the last answer counts;
    a failed or skipped request is no answer, and counts only where there is no other. A text that was not
    recorded gets the status "failed".

    Args:
        path: a file that :class:`RecordingCritic` wrote, or one made by hand.

    Raises:
        DataFileError: a line is not a recorded critique (the message names file and row), or there is none.
        OSError: the file can't be read.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._answers: dict[tuple[str, str | None], Critique] = {}
        for number, row in enumerate(read_jsonl(path), start=1):
            key, critique = _read(row, f"{path}, row {number}")
            if critique.status not in _NO_ANSWER or self._answers.get(key, critique).status in _NO_ANSWER:
                self._answers[key] = critique
        if not self._answers:
            raise DataFileError(f"{path}: expected recorded critiques, one per line; the file is empty")

    def __len__(self) -> int:
        """Number of distinct texts."""
        return len(self._answers)

    def critique(self, requests: Sequence[CritiqueRequest]) -> list[Critique]:
        """One recorded critique per request, in order."""
        return [self._answers.get((request.text, request.document)) or self._missing(request) for request in requests]

    def _missing(self, request: CritiqueRequest) -> Critique:
        return Critique((), "failed", error=f"{self._path} has no critique of the text {_shortened(request.text)!r}")


def _ends_torn(path: Path) -> bool:
    if not path.exists() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _read(row: Row, where: str) -> tuple[tuple[str, str | None], Critique]:
    request, items = row.get("request"), row.get("spans")
    if not (isinstance(request, dict) and isinstance(request.get("text"), str) and isinstance(items, list)):
        raise DataFileError(
            f'{where}: expected {{"request": {{"text": "…"}}, "spans": [{{"text": "…", "polarity": "negative"}}, …]}}, '
            f"got {dump_line(row)[:120]}"
        )
    document, reply, error = request.get("document"), row.get("reply"), row.get("error")
    if not all(value is None or isinstance(value, str) for value in (document, reply, error)):
        raise DataFileError(f"{where}: document, reply and error are texts or null, got {dump_line(row)[:120]}")
    status = row.get("status", "ok" if items else "none")
    if status not in get_args(Status):
        raise DataFileError(f"{where}: status is {status!r}; expected one of {', '.join(get_args(Status))}")
    spans = tuple(_span(item, where) for item in items)
    return (request["text"], document), Critique(spans, status, reply, error)


def _span(item: Any, where: str) -> Span:
    match item:
        case {"text": str(text), "polarity": "positive" | "negative" as polarity}:
            label = item.get("label")
            if label is None or isinstance(label, str):
                return Span(text, polarity, label)
    raise DataFileError(
        f"{where}: a span is {dump_line(item)[:120]}; expected "
        '{"text": "…", "polarity": "positive" or "negative", "label": null or "…"}'
    )


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else text[:79] + "…"
