"""Posts and articles with their summaries, and pairs of summaries of which one is preferred.

A name is a hub data set (``CarperAI/openai_summarize_tldr`` with the columns ``prompt`` and ``label``,
``CarperAI/openai_summarize_comparisons`` with ``prompt``, ``chosen`` and ``rejected``), ``builtin:tldr``,
``builtin:tldr-pairs``, a local ``.jsonl`` file or a local folder (see `trl.data.datasets`), with the same columns.

A prompt ends in "TL;DR:", and what follows it starts with one space: ``prompt + answer(label)`` is what a model reads.
"""

import logging
from typing import TYPE_CHECKING, Any

from trl.data.datasets import Layout, read_rows, text_of
from trl.jsonl import DataFileError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

END = "TL;DR:"
SUMMARIES = Layout("summaries", ("prompt", "label"), '"prompt" and "label"', "builtin:tldr")
PAIRS = Layout(
    "preference pairs", ("prompt", "chosen", "rejected"), '"prompt", "chosen" and "rejected"', "builtin:tldr-pairs"
)
_POST = "POST:"


def load_summaries(name: str, *, split: str = "train", limit: int | None = None) -> list[dict[str, str]]:
    """Rows ``{"prompt", "label", "document"}`` of the first ``limit`` rows of a split, in its order.

    The prompt ends in "TL;DR:"; rows where it doesn't are left out and counted in the log. The label is the
    reference summary, without white space around it. The document is what a critic is shown: the prompt without its
    ending, and of a Reddit post (SUBREDDIT, TITLE, POST) only the post.

    Raises ``DataFileError`` (the row, what was expected and what to do) and ``BuiltinError``.
    """
    rows = []
    given = list(read_rows(name, split, SUMMARIES, limit=limit))
    for where, row in given:
        prompt = _filled(row, "prompt", where)
        label = _filled(row, "label", where)
        if prompt.endswith(END):
            rows.append({"prompt": prompt, "label": label.strip(), "document": document_of(prompt)})
    _report(name, split, len(given), len(rows), f"whose prompt does not end in {END!r}")
    return rows


def load_summary_prompts(
    name: str,
    tokenizer: "PreTrainedTokenizerBase",
    *,
    split: str = "train",
    max_chars: int = 2000,
    max_tokens: int = 500,
    limit: int | None = 20000,
) -> list[dict[str, Any]]:
    """Rows ``{"query": prompt, "input_ids": list[int], "label", "document"}`` of `load_summaries`.

    Prompts of more than ``max_chars`` characters or ``max_tokens`` tokens are left out and counted in the log: cut,
    they would not end in "TL;DR:".
    """
    rows = load_summaries(name, split=split, limit=limit)
    short = [row for row in rows if len(row["prompt"]) <= max_chars]
    ids = tokenizer([row["prompt"] for row in short], verbose=False)["input_ids"] if short else []
    kept = [
        {"query": row["prompt"], "input_ids": query, "label": row["label"], "document": row["document"]}
        for row, query in zip(short, ids, strict=True)
        if len(query) <= max_tokens
    ]
    _report(name, split, len(rows), len(kept), f"of more than {max_chars} characters or {max_tokens} tokens")
    return kept


def load_preference_pairs(name: str, *, split: str = "train", limit: int | None = None) -> list[dict[str, str]]:
    """Rows ``{"prompt", "chosen", "rejected"}`` of the first ``limit`` rows of a split, in its order.

    ``prompt + chosen`` is a whole text: each answer starts with one space, and where a data set has "TL;DR:" in
    front of its answers it is moved to the end of the prompt, as policies see it. Pairs of equal texts prefer
    nothing: they are dropped and counted in the log.

    Raises ``DataFileError`` (the row, what was expected and what to do) and ``BuiltinError``.
    """
    rows = []
    given = list(read_rows(name, split, PAIRS, limit=limit))
    for where, row in given:
        prompt = _filled(row, "prompt", where)
        chosen, rejected = (_filled(row, column, where).lstrip() for column in ("chosen", "rejected"))
        if chosen.startswith(END) and rejected.startswith(END):
            prompt = prompt if prompt.endswith(END) else f"{prompt}\n{END}"
            chosen, rejected = chosen.removeprefix(END), rejected.removeprefix(END)
        chosen, rejected = answer(chosen), answer(rejected)
        if chosen != rejected:
            rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    _report(name, split, len(given), len(rows), "of two equal texts")
    return rows


def answer(text: str) -> str:
    """``text`` as it follows a prompt: one space before it, none after."""
    return f" {text.strip()}"


def document_of(prompt: str) -> str:
    """The text that a prompt asks to sum up."""
    text = prompt.removesuffix(END)
    _, found, post = text.partition(f"\n{_POST}")
    return (post if found else text).strip()


def _filled(row: dict[str, Any], column: str, where: str) -> str:
    """The row's text without trailing white space; ``DataFileError`` if it says nothing."""
    text = text_of(row, column, where).rstrip()
    if text.strip() in ("", END):
        raise DataFileError(f"{where}: {column} is empty; fill it or remove the row")
    return text


def _report(name: str, split: str, total: int, kept: int, why: str) -> None:
    if not total:
        raise DataFileError(f"{name!r} ({split}) has no rows")
    if kept < total:
        logger.info("%s (%s): left out %d of %d rows %s", name, split, total - kept, total, why)
    if not kept:
        raise DataFileError(f"{name!r} ({split}) has {total} rows, and all of them are left out: {why}")
