"""Queries of the sentiment task: the first few tokens of film reviews.

A name is a hub data set (``imdb``), a ``builtin:`` name, a local file (``.jsonl`` or ``.csv``) or a local folder (see
`trl.data.datasets`). All have a ``text`` column.
"""

import random
from typing import TYPE_CHECKING, Any

from trl.data.datasets import Layout, read_rows, text_of
from trl.jsonl import DataFileError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LAYOUT = Layout("data set", ("text",), "a text column", "builtin:imdb", suffixes=(".jsonl", ".csv"))
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


def load_texts(name: str, split: str, *, limit: int | None = None, streaming: bool = False) -> list[str]:
    """The ``text`` column of one split; what ``name`` may be, and the errors, as above.

    ``limit`` and ``streaming`` as of `trl.data.datasets.read_rows`.
    """
    rows = read_rows(name, split, LAYOUT, limit=limit, streaming=streaming)
    return [text_of(row, "text", where) for where, row in rows]


def _heads(texts: list[str], tokenizer: "PreTrainedTokenizerBase", count: int) -> list[list[int]]:
    """The first ``count`` token ids of each text (fewer if it is shorter)."""
    # One token more than needed: the last one may have been cut in the middle of its word.
    heads = tokenizer([text[:HEAD_CHARACTERS] for text in texts], verbose=False)["input_ids"]
    return [
        (ids if len(ids) > count + 1 else tokenizer(text, verbose=False)["input_ids"])[:count]
        for ids, text in zip(heads, texts, strict=True)
    ]
