"""RandomSpanCritic: the control. As many spans as another critic quotes, in random places."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from trl.critic.locate import Occurrence, locate
from trl.critic.template import single_line
from trl.critic.types import Critic, Critique, CritiqueRequest, Polarity, Span
from trl.critic.windows import TextWindows

_DRAWS = 200


class RandomSpanCritic:
    """Moves another critic's spans to random places, so that only their positions carry no information.

    Per request, every place in the response that ``like`` marks is drawn anew: the same number, lengths in words
    and signs, without overlap, all arrangements equally likely. A quote that ``like`` marks twice is two places.

    A quote rewards every occurrence of its text. So an arrangement is drawn again until its quotes mark exactly the
    words that were drawn, and rewarded are as many words as ``like`` rewards. How many tokens these are is near on
    average only: over 200 film reviews with the tokens of ``builtin:smollm2``, within 10 %. The price: words that
    occur often in one response are drawn less often than others. In a response made of repetitions no draw may
    come out; then the best of 200 is taken.

    Quotes of ``like`` that mark nothing in the response are passed on as they are (one that is nowhere in the text
    takes praise away in the flaw-only styles, with the control as with the critic). So are critiques without
    spans.

    Args:
        like: the critic to be compared with. It is asked, and costs what it costs.
        seed: together with a request's text and ``like``'s answer it decides the places.
    """

    def __init__(self, like: Critic, seed: int = 0) -> None:
        self._like, self._seed = like, seed

    def critique(self, requests: Sequence[CritiqueRequest]) -> list[Critique]:
        """One critique per request, in order, with ``like``'s status, reply and error."""
        critiques = self._like.critique(requests)
        return [self._moved(*pair) for pair in zip(requests, critiques, strict=True)]

    def _moved(self, request: CritiqueRequest, critique: Critique) -> Critique:
        text = TextWindows.of(request, size=1)
        words = Counter(mark for mark in _marks(critique.spans, text) if mark is not None)
        if not words:
            return critique
        idle = [span for span in critique.spans if not any(_marks([span], text))]
        lengths = [(count, mark.polarity) for mark, count in words.items()]
        generator = random.Random(f"{self._seed} {request.start} {request.text}")
        return replace(critique, spans=(*_draw(lengths, text, generator), *idle))


def _marks(spans: Sequence[Span], text: TextWindows) -> list[Occurrence | None]:
    """For each word of the response the occurrence of a quote that decides its reward."""
    found, _, _ = locate(spans, single_line(text.text))
    found.sort(key=lambda one: (one.start - one.end, one.polarity == "negative"))  # the last one decides
    marks: list[Occurrence | None] = []
    for start, end in text.words[text.first :]:
        over = [one for one in found if max(start, one.start) < min(end, one.end)]
        marks.append(over[-1] if over else None)
    return marks


def _draw(lengths: Sequence[tuple[int, Polarity]], text: TextWindows, generator: random.Random) -> list[Span]:
    """Spans of these lengths (words) and signs in random places of the response."""
    free = len(text.words) - text.first - sum(length for length, _ in lengths)
    # Pieces in random order, each a span or one word between spans: every arrangement is equally likely.
    pieces: list[tuple[int, Polarity | None]] = [*lengths, *[(1, None)] * free]
    fewest: int | None = None
    best: list[Span] = []
    for _ in range(_DRAWS):
        generator.shuffle(pieces)
        spans, wanted = _laid_out(pieces, text)
        got = [mark.polarity if mark else None for mark in _marks(spans, text)]
        wrong = sum(a != b for a, b in zip(got, wanted, strict=True))
        if fewest is None or wrong < fewest:
            fewest, best = wrong, spans
        if not wrong:
            break
    return best


def _laid_out(
    pieces: Sequence[tuple[int, Polarity | None]], text: TextWindows
) -> tuple[list[Span], list[Polarity | None]]:
    """The pieces one after the other: their quotes, and the polarity of each word."""
    spans: list[Span] = []
    polarities: list[Polarity | None] = []
    at = text.first
    for length, polarity in pieces:
        if polarity is not None:
            spans.append(Span(text.text[text.words[at][0] : text.words[at + length - 1][1]], polarity))
        polarities += [polarity] * length
        at += length
    return spans, polarities
