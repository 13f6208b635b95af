"""Where in a text a critic's quotes stand: exact whole words first, then folded, then inside words."""

import unicodedata
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trl.critic.decoders import Range
from trl.critic.template import single_line
from trl.critic.types import Polarity, Span

_QUOTES = dict.fromkeys("\"'`´‘’‚‛“”„‟«»‹›", "'")


class Occurrence(NamedTuple):
    """One place of a quote, as a range of characters."""

    start: int
    end: int
    polarity: Polarity


def locate(spans: Sequence[Span], text: str) -> tuple[list[Occurrence], int, list[Span]]:
    """All occurrences of the spans in the text, the number of spans found, and the spans not found."""
    unique: dict[str, Span] = {}
    for span in spans:
        quote = single_line(span.text).strip()
        known = unique.setdefault(quote, span)
        if known.polarity == "positive" and span.polarity == "negative":
            unique[quote] = span
    occurrences: list[Occurrence] = []
    unmatched: list[Span] = []
    folded = _fold(text)
    for quote, span in unique.items():
        found = _find(quote, text, folded)
        occurrences += [Occurrence(start, end, span.polarity) for start, end in found]
        if not found:
            unmatched.append(span)
    return occurrences, len(unique) - len(unmatched), unmatched


def _find(quote: str, text: str, folded: tuple[str, list[int]]) -> list[Range]:
    """The quote's occurrences in the text, by the first way that finds any."""
    folded_text, origin = folded
    folded_quote = _fold(quote)[0]
    if not folded_quote:
        return []
    for whole_words in (True, False):
        exact = list(_occurrences(quote, text, whole_words))
        if exact:
            return exact
        loose = _occurrences(folded_quote, folded_text, whole_words)
        mapped = [(origin[start], origin[end - 1] + 1) for start, end in loose]
        if mapped:
            return mapped
    return []


def _occurrences(quote: str, text: str, whole_words: bool) -> Iterator[Range]:
    start = text.find(quote)
    while start >= 0:
        end = start + len(quote)
        if not whole_words or not (_inside_word(text, start) or _inside_word(text, end)):
            yield start, end
        start = text.find(quote, start + 1)


def _inside_word(text: str, at: int) -> bool:
    """Whether the boundary before character ``at`` has word characters on both sides."""
    return 0 < at < len(text) and _is_word(text[at - 1]) and _is_word(text[at])


def _is_word(char: str) -> bool:
    # Marks belong to words: vowel signs of Indic scripts, combining accents.
    return char.isalnum() or char == "_" or unicodedata.category(char).startswith("M")


def _fold(text: str) -> tuple[str, list[int]]:
    """Text without differences of case, white space and quotation marks, and each character's origin."""
    folded: list[str] = []
    origin: list[int] = []
    for at, char in enumerate(text):
        if char.isspace():
            if folded and folded[-1] == " ":
                continue
            new = " "
        else:
            new = _QUOTES.get(char) or char.casefold()
        folded += new  # casefold can give more than one character
        origin += [at] * len(new)
    return "".join(folded), origin
