"""How well a critic's quotes agree with labels: precision, recall and F1 over words and over spans.

A quote is placed in the text in the same way as for rewards: every occurrence counts, and where quotes
overlap the shorter one decides.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trl.critic.locate import locate
from trl.critic.template import single_line
from trl.critic.types import Critique, CritiqueRequest, Polarity, Span, Style
from trl.jsonl import DataFileError, Row, dump_line, read_jsonl

_WORD = re.compile(r"\w+(?:['’\-]\w+)*")
_SAME_SPAN = 0.5
"""A quote and a label are the same span when the words they share are this part of the words in either."""
_RESAMPLES = 10_000

Range = tuple[int, int]
Polarities = list[Polarity | None]


@dataclass(frozen=True)
class LabelledText:
    """A text and the spans that a person would quote from it."""

    id: str
    style: Style
    request: CritiqueRequest
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Estimate:
    """A ratio over all texts with its 95 % interval; None where its denominator is 0."""

    value: float | None
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Agreement:
    """Quotes of one polarity against labels of that polarity."""

    right: int
    wrong: int
    """Quoted but not labelled so; a quote that is not in the text is a wrong span, and has no words."""
    missed: int
    precision: Estimate
    recall: Estimate
    f1: Estimate


@dataclass(frozen=True)
class CheckResult:
    """One critic on the labelled texts of one style. Texts whose critique failed are left out of the scores."""

    texts: int
    status: dict[str, int]
    quoted: int
    hallucinated: int
    """Quotes that are nowhere in their text."""
    hallucinated_share: Estimate
    words: dict[str, Agreement]
    """By polarity; with both polarities also "all"."""
    spans: dict[str, Agreement]


def read_labelled(paths: Iterable[str | Path]) -> list[LabelledText]:
    """Read labelled texts: JSON Lines of ``{"id", "style", "text", "document"?, "score"?, "spans"}``.

    ``spans`` is a list of ``[quote, "positive" | "negative"]``, in the summary style with the kind of flaw as
    a third item. The summary style needs document and score.

    Raises:
        DataFileError: no rows, a field that is missing or wrong, a quote that is not in its text, a repeated
            id; the message names file and row.
    """
    texts: dict[str, LabelledText] = {}
    for path in paths:
        for number, row in enumerate(read_jsonl(path), start=1):
            text = _labelled_text(row, f"{path}, row {number}")
            if text.id in texts:
                raise DataFileError(f"{path}, row {number}: id {text.id!r} was used before; expected unique ids")
            texts[text.id] = text
    if not texts:
        raise DataFileError("the labelled files hold no rows; expected at least one text")
    return list(texts.values())


def place(spans: Sequence[Span], text: str, pieces: Sequence[Range]) -> tuple[Polarities, tuple[Span, ...]]:
    """The polarity of each piece (character range) of a text under the quotes, and the quotes not found."""
    found, unmatched = _occurrences(spans, text)
    return _painted(found, pieces), unmatched


def check(texts: Sequence[LabelledText], critiques: Sequence[Critique]) -> CheckResult:
    """Compare critiques with labels; all texts are of one style, and both lists have one order.

    Words: every word of a text has a polarity or none, by the quotes and by the labels. Spans: quotes and
    labels are paired one to one, the best pairs first; a pair is right when the words in both are at least
    half of the words in either. Intervals: percentile bootstrap over texts (Efron & Tibshirani, An
    Introduction to the Bootstrap, §13.3).

    Raises:
        ValueError: no texts, several styles, or lists of different lengths.
    """
    styles = {text.style for text in texts}
    if len(styles) != 1 or len(critiques) != len(texts):
        raise ValueError(
            f"got {len(texts)} texts of {len(styles)} style(s) and {len(critiques)} critiques; "
            "expected at least one text, one style, and one critique per text"
        )
    pairs = [(text, critique) for text, critique in zip(texts, critiques, strict=True) if critique.status != "failed"]
    counts = [_TextCounts.of(text, critique) for text, critique in pairs]
    polarities: tuple[str, ...] = ("positive", "negative", "all") if styles == {"sentiment"} else ("negative",)
    quoted = [count.quoted for count in counts]
    hallucinated = [count.hallucinated for count in counts]
    return CheckResult(
        texts=len(texts),
        status=dict(Counter(critique.status for critique in critiques)),
        quoted=sum(quoted),
        hallucinated=sum(hallucinated),
        hallucinated_share=_ratio(hallucinated, quoted),
        words={name: _agreement([count.words[name] for count in counts]) for name in polarities},
        spans={name: _agreement([count.spans[name] for count in counts]) for name in polarities},
    )


def _labelled_text(row: Row, where: str) -> LabelledText:
    match row:
        case {"id": str(name), "style": str(style), "text": str(text), "spans": list(items)} if text.strip():
            pass
        case _:
            raise DataFileError(
                f'{where}: expected {{"id": "…", "style": "…", "text": "…", "spans": [["quote", "negative"], …]}}, '
                f"got {dump_line(row)[:120]}"
            )
    if style not in get_args(Style):
        raise DataFileError(f"{where}: style is {style!r}; expected one of {', '.join(get_args(Style))}")
    document, score = row.get("document"), row.get("score")
    if style == "summary" and not (isinstance(document, str) and isinstance(score, int | float)):
        raise DataFileError(f"{where}: the summary style needs a document and a score (a number from 0 to 10)")
    request = CritiqueRequest(text, document, None if score is None else float(score))
    spans = tuple(_label(item, style, where) for item in items)
    unmatched = place(spans, text, [])[1]
    if unmatched:
        raise DataFileError(f"{where}: the quote {unmatched[0].text!r} is not in the text; quote it letter by letter")
    return LabelledText(name, style, request, spans)  # type: ignore[arg-type]


def _label(item: Any, style: str, where: str) -> Span:
    allowed = get_args(Polarity) if style == "sentiment" else ("negative",)
    match item:
        case [str(quote), str(polarity)] if polarity in allowed:
            return Span(quote, polarity)  # type: ignore[arg-type]
        case [str(quote), str(polarity), str(label)] if polarity in allowed:
            return Span(quote, polarity, label)  # type: ignore[arg-type]
    raise DataFileError(
        f"{where}: a span is {json.dumps(item)}; expected [quote, polarity] or [quote, polarity, label], with polarity "
        f"{' or '.join(allowed)} in the {style} style"
    )


def _occurrences(spans: Sequence[Span], text: str) -> tuple[list[tuple[int, int, Polarity]], tuple[Span, ...]]:
    """Where the quotes lie, in the order in which they are painted, and those not found."""
    found, _, unmatched = locate(spans, single_line(text))
    distinct = sorted(set(found), key=lambda one: (one.start - one.end, one.polarity == "negative", one.start))
    return [(one.start, one.end, one.polarity) for one in distinct], tuple(unmatched)


def _painted(found: Iterable[tuple[int, int, Polarity]], pieces: Sequence[Range]) -> Polarities:
    polarities: Polarities = [None] * len(pieces)
    for start, end, polarity in found:
        for i, piece in enumerate(pieces):
            if max(start, piece[0]) < min(end, piece[1]):
                polarities[i] = polarity
    return polarities


_Triple = tuple[int, int, int]  # right, wrong, missed


@dataclass(frozen=True)
class _TextCounts:
    words: dict[str, _Triple]
    spans: dict[str, _Triple]
    quoted: int
    hallucinated: int

    @classmethod
    def of(cls, text: LabelledText, critique: Critique) -> "_TextCounts":
        plain = text.request.text
        pieces = [match.span() for match in _WORD.finditer(plain)]
        labels, _ = _occurrences(text.spans, plain)
        quotes, unmatched = _occurrences(critique.spans, plain)
        wanted, got = _painted(labels, pieces), _painted(quotes, pieces)
        words: dict[str, _Triple] = {}
        spans: dict[str, _Triple] = {}
        for polarity in get_args(Polarity):
            right = sum(w == g == polarity for w, g in zip(wanted, got, strict=True))
            words[polarity] = (right, got.count(polarity) - right, wanted.count(polarity) - right)
            label_words = [_word_set(one, pieces) for one in labels if one[2] == polarity]
            quote_words = [_word_set(one, pieces) for one in quotes if one[2] == polarity]
            right = _same_spans(label_words, quote_words)
            invented = sum(span.polarity == polarity for span in unmatched)
            spans[polarity] = (right, len(quote_words) + invented - right, len(label_words) - right)
        for counts in (words, spans):
            positive, negative = counts["positive"], counts["negative"]
            counts["all"] = (positive[0] + negative[0], positive[1] + negative[1], positive[2] + negative[2])
        quoted = len({single_line(span.text).strip() for span in critique.spans})
        return cls(words, spans, quoted, len(unmatched))


def _word_set(found: tuple[int, int, Polarity], pieces: Sequence[Range]) -> frozenset[int]:
    return frozenset(i for i, (start, end) in enumerate(pieces) if max(start, found[0]) < min(end, found[1]))


def _same_spans(labels: Sequence[frozenset[int]], quotes: Sequence[frozenset[int]]) -> int:
    """Number of pairs when each label and each quote is paired at most once, the best overlaps first."""
    shares = [
        (len(label & quote) / len(label | quote), i, j)
        for i, label in enumerate(labels)
        for j, quote in enumerate(quotes)
        if label & quote
    ]
    used_labels: set[int] = set()
    used_quotes: set[int] = set()
    for share, i, j in sorted(shares, reverse=True):
        if share >= _SAME_SPAN and i not in used_labels and j not in used_quotes:
            used_labels.add(i)
            used_quotes.add(j)
    return len(used_labels)


def _agreement(triples: Sequence[_Triple]) -> Agreement:
    right, wrong, missed = np.array(triples, dtype=np.int64).reshape(-1, 3).T
    return Agreement(
        right=int(right.sum()),
        wrong=int(wrong.sum()),
        missed=int(missed.sum()),
        precision=_ratio(right, right + wrong),
        recall=_ratio(right, right + missed),
        f1=_ratio(2 * right, 2 * right + wrong + missed),
    )


def _ratio(numerators: ArrayLike, denominators: ArrayLike) -> Estimate:
    """sum / sum over texts. Resamples whose denominator is 0 are left out of the interval."""
    parts = np.stack([np.asarray(numerators, float), np.asarray(denominators, float)])
    above, below = parts.sum(axis=1)
    if not below:
        return Estimate(None, None, None)
    texts = parts.shape[1]
    generator = np.random.default_rng(0)
    drawn = generator.multinomial(texts, np.full(texts, 1 / texts), size=_RESAMPLES)  # how often each text
    sums: NDArray[np.float64] = drawn @ parts.T
    sums = sums[sums[:, 1] > 0]
    low, high = np.quantile(sums[:, 0] / sums[:, 1], [0.025, 0.975])
    return Estimate(float(above / below), float(low), float(high))
