"""Queries of the sentiment task: the first few tokens of film reviews.

A name is a hub data set (``imdb``), a ``builtin:`` name, a local file (``.jsonl`` or ``.csv``) or a local folder:
with one such file per split (``train.jsonl``, ``test.jsonl``), or a saved data set. All have a ``text`` column.
"""

import csv
import random
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl.builtin import is_builtin, resolve
from trl.jsonl import DataFileError, is_text, read_jsonl

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HEAD_CHARACTERS = 200
"""The first tokens come from this much of a review: tokenising all of it takes many times as long."""


def load_sentiment_prompts(
    name: str,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    split: str = "train",
    min_chars: int = 200,
    min_tokens: int = 4,
    max_tokens: int = 9,
    seed: int = 0,
    limit: int | None = None,
) -> list[dict[str, Any]]:
    """Rows ``{"query": text, "input_ids": list[int]}`` in the order of the data set.

    Kept are reviews of more than ``min_chars`` characters. Each query's length is drawn from ``min_tokens`` to
    ``max_tokens``, both included, by a generator seeded with ``seed``; ``limit`` keeps a random sample of that
    many reviews. A query counts the BOS token if the tokenizer adds one; its text is without special tokens.

    Raises ``DataFileError`` (what was expected and what to do) and ``BuiltinError``.
    """
    if not 1 <= min_tokens <= max_tokens:
        raise ValueError(f"expected 1 <= min_tokens <= max_tokens, got {min_tokens} and {max_tokens}")
    draw = random.Random(seed)
    texts = [text for text in load_texts(name, split) if len(text) > min_chars]
    if not texts:
        raise DataFileError(f"{name!r} ({split}) has no text of more than {min_chars} characters")
    if limit is not None and limit < len(texts):
        texts = [texts[index] for index in sorted(draw.sample(range(len(texts)), limit))]
    rows = []
    for ids in _heads(texts, tokenizer, max_tokens):
        query = ids[: draw.randint(min_tokens, max_tokens)]
        rows.append({"query": tokenizer.decode(query, skip_special_tokens=True), "input_ids": query})
    return rows


def load_texts(name: str, split: str) -> list[str]:
    """The ``text`` column of one split; what ``name`` may be, and the errors, as above."""
    path = resolve(name, "data set") if is_builtin(name) else Path(name)
    if path.is_file():
        if split != "train":
            raise DataFileError(
                f"{path} is one file, so it has no split {split!r}; give a folder with train{path.suffix} and "
                f"{split}{path.suffix}"
            )
        return _read_file(path)
    if path.is_dir():
        for suffix in (".jsonl", ".csv"):
            if (path / f"{split}{suffix}").is_file():
                return _read_file(path / f"{split}{suffix}")
    return _read_dataset(name, path, split)


def _read_file(path: Path) -> list[str]:
    match path.suffix:
        case ".jsonl":
            rows: Iterable[dict[str, Any]] = read_jsonl(path)
        case ".csv":
            rows = _read_csv(path)
        case _:
            raise DataFileError(f"{path}: expected a .jsonl or .csv file with a text column")
    return [_text(row, f"{path}, row {number}") for number, row in enumerate(rows, start=1)]


def _read_csv(path: Path) -> list[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataFileError(f"{path}: expected CSV in UTF-8 ({error}); JSON lines hold any text") from error


def _text(row: dict[str, Any], where: str) -> str:
    text = row.get("text")
    if not is_text(text):
        given = f"{text!r:.80} among {', '.join(map(str, row))}"
        raise DataFileError(f"{where}: expected a string called text, of whole characters, got {given}")
    return str(text)


def _read_dataset(name: str, path: Path, split: str) -> list[str]:
    """From the hub, a copy of a hub repository, or a folder that ``save_to_disk`` wrote."""
    from datasets import DatasetDict, load_dataset, load_from_disk
    from datasets.exceptions import DatasetsError

    try:
        if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
            saved = load_from_disk(str(path))
            data = saved[split] if isinstance(saved, DatasetDict) else saved
        else:
            data = load_dataset(name, split=split)
    except (OSError, ValueError, KeyError, DatasetsError) as error:
        reason = (str(error).strip() or type(error).__name__).split("\n")[0]
        raise DataFileError(
            f"cannot load the split {split!r} of {name!r} ({reason}); give a data set on the hub (needs network), "
            "a local folder, a .jsonl or .csv file with a text column, or builtin:imdb"
        ) from error
    if "text" not in data.column_names:
        raise DataFileError(f"{name!r} has the columns {', '.join(data.column_names)}; expected one called text")
    return list(data["text"])


def _heads(texts: list[str], tokenizer: "PreTrainedTokenizerBase", count: int) -> list[list[int]]:
    """The first ``count`` token ids of each text (fewer if it is shorter)."""
    # One token more than needed: the last one may have been cut in the middle of its word.
    heads = tokenizer([text[:HEAD_CHARACTERS] for text in texts], verbose=False)["input_ids"]
    return [
        (ids if len(ids) > count + 1 else tokenizer(text, verbose=False)["input_ids"])[:count]
        for ids, text in zip(heads, texts, strict=True)
    ]
