"""From scores of word windows to spans: what a scoring critic asks about a text, and what it marks."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from trl.critic.template import PromptTemplate
from trl.critic.types import CritiqueRequest, Polarity, Span

_WORD = re.compile(r"[^\W_]+(?:['’\-][^\W_]+)*")

NEUTRAL_PHRASES = (
    "and then he",
    "in the second",
    "the man who",
    "of a young",
    "at the end",
    "it was a",
    "she goes to",
    "the first part",
    "who is in",
    "there",
    "then",
    "this",
    "about",
)
"""Phrases without a verdict. A prompt's label scores are biased; their median shows by how much."""

_DOCUMENT_PHRASES = 24


@dataclass(frozen=True)
class ScorePrompt:
    """A few-shot prompt that ends where a label word follows.

    File format (``prompts/score_*.txt``): the label pair on the first line, good one first; then the shots,
    each ending in a label word; last the phrase's placeholder with what stands between a phrase and its label.
    A phrase takes the place of the text; in the summary style, of the summary, and document and score are
    filled in too. They should stand before the phrase: what all phrases share is computed once.
    """

    labels: tuple[str, str]
    template: PromptTemplate
    """The prompt without its first line."""

    @classmethod
    def from_template(cls, template: PromptTemplate) -> "ScorePrompt":
        """Take the label pair off a template's first line.

        Raises:
            ValueError: a first line that is not two words.
        """
        first, _, before = template.literals[0].partition("\n")
        labels = first.split()
        if len(labels) != 2:
            raise ValueError(
                f"the first line of a scoring prompt is {first!r}; expected the two label words, the good one "
                "first (for example: positive negative)"
            )
        return cls((labels[0], labels[1]), replace(template, literals=(before, *template.literals[1:])))

    @property
    def shows_document(self) -> bool:
        """Whether a phrase is judged against its own request's document, so that requests share no scores."""
        return "document" in self.template.fields

    def fill(self, phrase: str, request: CritiqueRequest) -> str:
        """The prompt that asks for the label of one phrase of a request."""
        return self.template.fill(replace(request, text=phrase)).rstrip()


def document_phrases(document: str, size: int) -> list[str]:
    """Words and windows of a document, spread over it. A document agrees with itself: the zero of its scores."""
    windows = TextWindows.of(CritiqueRequest(document), size)
    phrases = list(dict.fromkeys(windows.phrases()))
    return phrases[:: max(1, len(phrases) // _DOCUMENT_PHRASES)]


@dataclass(frozen=True)
class TextWindows:
    """The words of one text and the phrases to score for them.

    Every word of the response is asked about alone and within each window of ``size`` consecutive words that
    holds it; windows may reach back into the query, for context.
    """

    text: str
    words: tuple[tuple[int, int], ...]
    """Character range of each word of query and response."""
    first: int
    """Index of the response's first word."""
    size: int

    @classmethod
    def of(cls, request: CritiqueRequest, size: int) -> "TextWindows":
        words = tuple(match.span() for match in _WORD.finditer(request.text))
        first = next((i for i, (_, end) in enumerate(words) if end > request.start), len(words))
        return cls(request.text, words, first, size)

    def phrases(self) -> list[str]:
        """What to score, repeats included."""
        asked = [self._phrase(i, i + 1) for i in range(self.first, len(self.words))]
        if self.first < len(self.words):
            asked += [self._phrase(start, end) for start, end in self._around(self.first, len(self.words))]
        return asked

    def word_scores(self, score: Mapping[str, float], baseline: float) -> list[float]:
        """Score of each response word over the baseline: the mean of what it scores alone and of what the
        windows around it score. Alone shows which word it is, the windows show what is meant."""
        scores = []
        for i in range(self.first, len(self.words)):
            around = [score[self._phrase(start, end)] for start, end in self._around(i, i + 1)]
            scores.append((score[self._phrase(i, i + 1)] + sum(around) / len(around)) / 2 - baseline)
        return scores

    def spans(self, word_scores: Sequence[float], margin: float) -> list[Span]:
        """Words beyond the margin; neighbours of one sign make one span, quoted verbatim."""
        spans: list[Span] = []
        run_start: int | None = None
        run: Polarity | None = None
        for i, score in enumerate([*word_scores, 0.0], start=self.first):
            polarity: Polarity | None = None
            if abs(score) > margin:
                polarity = "positive" if score > 0 else "negative"
            if run is not None and run_start is not None and polarity != run:
                spans.append(Span(self._phrase(run_start, i), run))
            if polarity != run:
                run, run_start = polarity, i
        return spans

    def _around(self, first: int, end: int) -> list[tuple[int, int]]:
        """Word ranges of the windows that hold at least one of the words first .. end - 1."""
        size = min(self.size, len(self.words))
        starts = range(max(0, first - size + 1), min(end - 1, len(self.words) - size) + 1)
        return [(start, start + size) for start in starts]

    def _phrase(self, first: int, end: int) -> str:
        return self.text[self.words[first][0] : self.words[end - 1][1]]
