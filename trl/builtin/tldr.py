"""``builtin:tldr``: news articles and their lead sentences, for summarization without a hub.

A BBC article opens with one sentence that sums it up, written by its journalist. That sentence is the reference
summary here; the prompt is what follows it, cut to the whole sentences of at most ``MAX_WORDS`` words, so that PPO on
two CPU cores can afford it. The headline is in neither: it says what the lead says. Rows of ``train.jsonl``,
``valid.jsonl`` and ``test.jsonl`` are ``{"prompt", "label"}``; a prompt ends in "TL;DR:". Labels often name what the
prompt only alludes to ("the 27-year-old winger"), so no summary of it can reach a perfect ROUGE score.

The articles (2004 and 2005; Greene and Cunningham, ICML 2006) come as one text file each: headline, lead, body.
Versions of one story share sentences; they are put into the same split.
"""

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trl.builtin.catalog import Progress
from trl.jsonl import dump_line

MIN_WORDS, MAX_WORDS = 50, 90
"""Of a document."""
MIN_LABEL_WORDS, MAX_LABEL_WORDS = 8, 30
HELD_OUT = {0: "test", 1: "valid"}
"""Splits of tenths of the stories; the other eight are for training."""
SHARED_WORDS = 8
"""Two articles with a sentence of this many words in common are versions of one story."""
END = "\n\nTL;DR:"

_SENTENCE_END = re.compile(r"""(?:(?<=[.!?])|(?<=[.!?]["']))\s+(?=["'(£$€]?[A-Z0-9])""")
_WHOLE = re.compile(r"""[.!?]["')]?$""")
_WORD = re.compile(r"[a-z0-9]+")


@dataclass(frozen=True)
class Article:
    """``lead``: one sentence; ``body``: the sentences after it. Headings within the text are left out."""

    lead: str
    body: tuple[str, ...]

    @property
    def document(self) -> str:
        """The first whole sentences, of at most ``MAX_WORDS`` words together."""
        taken: list[str] = []
        words = 0
        for sentence in self.body:
            words += len(sentence.split())
            if words > MAX_WORDS:
                break
            taken.append(sentence)
        return " ".join(taken)

    @property
    def fits(self) -> bool:
        """Whether label and document have the lengths wanted, and the lead makes a statement."""
        label, document = len(self.lead.split()), len(self.document.split())
        return MIN_LABEL_WORDS <= label <= MAX_LABEL_WORDS and document >= MIN_WORDS and self.lead.endswith(".")


def build(target: Path, source: Path, progress: Progress) -> dict[str, float]:
    """Write the three splits; ``source`` is the folder of the articles."""
    progress("reading the articles", 0.0)
    texts = [_decode(path) for path in sorted(source.glob("*/*.txt"))]
    splits, counts = make_splits(texts)
    for name, articles in splits.items():
        progress(f"writing {name}", 0.9)
        lines = (dump_line(to_row(article)) + "\n" for article in articles)
        (target / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return {**{name: len(articles) for name, articles in splits.items()}, **counts}


def _decode(path: Path) -> str:
    content = path.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:  # one of them is Latin-1
        return content.decode("latin-1")


def to_row(article: Article) -> dict[str, str]:
    """The article as a row of the data set."""
    return {"prompt": article.document + END, "label": article.lead}


def make_splits(texts: Sequence[str]) -> tuple[dict[str, list[Article]], dict[str, float]]:
    """Articles by split, each in the order of its hashes, and how many of ``texts`` were dropped, and why.

    Which split a story falls into depends on its texts alone.
    """
    parsed = [article for text in texts if (article := parse(text)) is not None]
    fitting = [article for article in parsed if article.fits]
    stories = group(fitting)
    splits: dict[str, list[Article]] = {"train": [], "valid": [], "test": []}
    kept = 0
    for story in stories:
        versions = _distinct(sorted(story, key=_digest))
        splits[HELD_OUT.get(_digest(versions[0])[0] * 10 // 256, "train")] += versions
        kept += len(versions)
    return (
        {name: sorted(articles, key=_digest) for name, articles in splits.items()},
        {"not of fitting form": len(texts) - len(fitting), "duplicates dropped": len(fitting) - kept},
    )


def parse(text: str) -> Article | None:
    """Headline, lead and body, one paragraph a line; None if the lead isn't one sentence or nothing follows it."""
    paragraphs = [" ".join(line.replace("''", '"').split()) for line in text.splitlines() if line.strip()]
    if len(paragraphs) < 3 or len(split_sentences(paragraphs[1])) != 1:
        return None
    body = [sentence for paragraph in paragraphs[2:] for sentence in split_sentences(paragraph)]
    return Article(paragraphs[1], tuple(sentence for sentence in body if _WHOLE.search(sentence)))


def split_sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph with single spaces."""
    return [sentence for sentence in _SENTENCE_END.split(paragraph) if sentence]


def group(articles: Sequence[Article]) -> list[list[Article]]:
    """Articles that share a sentence, directly or through others, together: versions of one story."""
    parent = list(range(len(articles)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    first: dict[str, int] = {}
    for index, article in enumerate(articles):
        for sentence in (article.lead, *article.body):
            words = _words(sentence)
            if len(words.split()) >= SHARED_WORDS:
                parent[root(index)] = root(first.setdefault(words, index))
    stories: dict[int, list[Article]] = {}
    for index, article in enumerate(articles):
        stories.setdefault(root(index), []).append(article)
    return list(stories.values())


def _distinct(articles: Sequence[Article]) -> list[Article]:
    """Without those whose lead or document an earlier one has."""
    leads: set[str] = set()
    documents: set[str] = set()
    kept = []
    for article in articles:
        lead, document = _words(article.lead), _words(article.document)
        if lead not in leads and document not in documents:
            kept.append(article)
        leads.add(lead)
        documents.add(document)
    return kept


def _words(text: str) -> str:
    return " ".join(_WORD.findall(text.lower()))


def _digest(article: Article) -> bytes:
    return hashlib.sha256(f"{article.lead}\n{article.document}".encode()).digest()
