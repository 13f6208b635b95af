"""LexiconCritic: an offline stand-in for an LLM critic that marks the words a lexicon scores."""

import importlib.util
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from trl.builtin import resolve
from trl.critic.types import Critique, CritiqueRequest, Polarity, Span, Style

_WORD = re.compile(r"[^\W_]+(?:['’\-][^\W_]+)*")
_NEGATION_REACH = 3
"""A negation turns scored words up to this many words behind it (the reach VADER measured)."""


class _Lexicon(NamedTuple):
    valence: dict[str, float]
    degree: frozenset[str] = frozenset()
    negations: frozenset[str] = frozenset()
    """With none, every word means the same wherever it stands."""
    degree_when_before_scored: frozenset[str] = frozenset()
    """Scored by itself, but an adverb of degree in front of another scored word."""


class LexiconCritic:
    """Quotes words from a list. No network, deterministic.

    Style "sentiment": what the VADER lexicon scores as positive or negative. Scored words next to each other, with
    the adverbs of degree in front of them, make one span. A negation up to three words before a scored word,
    with no punctuation between, turns its sign and opens the span ("not a good film": "not a good",
    negative). Source: Hutto & Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment Analysis of
    Social Media Text", ICWSM 2014; its word list is read from the ``vaderSentiment`` package.

    Style "toxicity": words that ``builtin:toxicity`` finds toxic by themselves (``trl.builtin.toxicity``), all
    negative, neighbours in one span. The list comes from the reward model, not from ``builtin:toxicity-eval``,
    which must stay unknown to the policy.

    It is a cheap stand-in for an LLM: it knows no context, irony or plot.

    Raises:
        ValueError: another style.
        BuiltinError: style "toxicity", and ``builtin:toxicity`` is not prepared.
    """

    def __init__(self, style: Style = "sentiment") -> None:
        match style:
            case "sentiment":
                self._lexicon = _vader()
            case "toxicity":
                self._lexicon = _toxic_words()
            case _:
                raise ValueError(
                    f"LexiconCritic has no word list for style {style!r}; expected 'sentiment' or 'toxicity'"
                )

    def critique(self, requests: Sequence[CritiqueRequest]) -> list[Critique]:
        """One critique per request, in order: status "ok" with spans, or "none"."""
        return [self._critique(request.text) for request in requests]

    def _critique(self, text: str) -> Critique:
        spans = tuple(Span(text[start:end], polarity) for start, end, polarity in _marked(text, self._lexicon))
        return Critique(spans=spans, status="ok" if spans else "none")


def _marked(text: str, lexicon: _Lexicon) -> list[tuple[int, int, Polarity]]:
    """Character ranges to quote, left to right, without overlap."""
    found = list(_WORD.finditer(text))
    words = [match.group().lower().replace("’", "'") for match in found]
    roles = [_role(words, i, lexicon) for i in range(len(words))]
    # True where only white space lies between this word and the one before it.
    joined = [i > 0 and not text[found[i - 1].end() : found[i].start()].strip() for i in range(len(found))]

    ranges: list[tuple[int, int, Polarity]] = []
    last_word = -1  # last word of the newest range
    for i, role in enumerate(roles):
        if not isinstance(role, float):
            continue
        first = i
        while joined[first] and first - 1 > last_word and roles[first - 1] == "degree":
            first -= 1
        negation = _negation_before(i, roles, joined)
        positive = (role > 0) != (negation is not None)
        polarity: Polarity = "positive" if positive else "negative"
        if negation is not None and negation > last_word:
            first = min(first, negation)
        if ranges and joined[first] and first - 1 == last_word and ranges[-1][2] == polarity:
            ranges[-1] = (ranges[-1][0], found[i].end(), polarity)
        else:
            ranges.append((found[first].start(), found[i].end(), polarity))
        last_word = i
    return ranges


def _role(words: list[str], i: int, lexicon: _Lexicon) -> float | str | None:
    """The word's valence, or "negation", or "degree" (very, barely, kind of), or None."""
    word, following = words[i], words[i + 1] if i + 1 < len(words) else ""
    if lexicon.negations and (word in lexicon.negations or word.endswith("n't")):
        return "negation"
    if lexicon.negations and word == "no":  # scored by itself ("no!"); in front of a scored word it is a negation
        return "negation" if following in lexicon.valence or following in lexicon.degree else None
    if f"{word} {following}" in lexicon.degree or (i and f"{words[i - 1]} {word}" in lexicon.degree):
        return "degree"
    if word in lexicon.degree or (word in lexicon.degree_when_before_scored and following in lexicon.valence):
        return "degree"
    return lexicon.valence.get(word)


def _negation_before(i: int, roles: Sequence[float | str | None], joined: Sequence[bool]) -> int | None:
    """Index of the negation that reaches word ``i``: not past punctuation, but past another scored word."""
    for back in range(1, _NEGATION_REACH + 1):
        if i - back < 0 or not joined[i - back + 1]:
            return None
        if roles[i - back] == "negation":
            return i - back
    return None


@cache
def _vader() -> _Lexicon:
    from vaderSentiment.vaderSentiment import BOOSTER_DICT, NEGATE

    spec = importlib.util.find_spec("vaderSentiment")
    if spec is None or spec.origin is None:
        raise ImportError("the lexicon critic needs the word list of `pip install vaderSentiment`")
    valence = {}
    for line in (Path(spec.origin).parent / "vader_lexicon.txt").read_text(encoding="utf-8").splitlines():
        word, _, rest = line.partition("\t")
        if _WORD.fullmatch(word):  # emoticons are not words; a word critic leaves them alone
            valence[word] = float(rest.split("\t", 1)[0])
    return _Lexicon(valence, frozenset(BOOSTER_DICT), frozenset(NEGATE), frozenset({"pretty"}))


def _toxic_words() -> _Lexicon:
    path = resolve("builtin:toxicity", "toxicity network") / "lexicon.json"
    return _Lexicon({word: -p for word, p in json.loads(path.read_text(encoding="utf-8")).items()})
