"""RougeReward: how many words of a human summary a generated one has (Lin 2004), by the rouge-score library."""

import functools
from collections.abc import Sequence
from typing import Literal, get_args

from nltk.stem.porter import PorterStemmer
from nltk.tokenize.punkt import PunktParameters, PunktSentenceTokenizer
from rouge_score import tokenize
from rouge_score.rouge_scorer import RougeScorer
from rouge_score.tokenizers import Tokenizer

from trl.rewards.perspective import Text, response_text

RougeKind = Literal["rouge1", "rouge2", "rougeL", "rougeLsum"]

_ABBREVIATIONS = {"mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "etc", "e.g", "i.e", "u.s", "u.k", "u.n"}


class RougeReward:
    """F1 of a ROUGE measure, times 100, of each completion against its reference summary.

    Words are lower-cased and Porter-stemmed, as in ROUGE-1.5.5 with ``-m``; everything but a-z and 0-9 separates words,
    so the measure is made for English. ``rouge1`` and ``rouge2`` count common words and pairs of words, ``rougeL`` is
    the longest common subsequence of words, ``rougeLsum`` the union of the longest common subsequences of the
    sentences. For the last, the literature puts each sentence on a line of its own; here sentences are found by
    nltk's Punkt tokenizer, untrained (its trained parameters are a download) but told the common English
    abbreviations. Without lines ``rougeLsum`` would be ``rougeL``.

    Source: Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004.
    """

    def __init__(self, kind: RougeKind = "rouge1") -> None:
        if kind not in get_args(RougeKind):
            raise ValueError(f"kind is {kind!r}; expected one of {', '.join(get_args(RougeKind))}")
        self.kind = kind
        self._tokenizer = _CachingTokenizer()
        self._scorer = RougeScorer([kind], tokenizer=self._tokenizer)
        self.__name__ = f"{kind}_reward"  # trainers that take a list of reward functions report by this

    def __call__(
        self, *, completions: Sequence[Text], references: Sequence[str | Sequence[str]], **_ignored: object
    ) -> list[float | None]:
        """One number from 0 to 100 per sample; None (no verdict) where no reference has a word.

        A completion without words scores 0. Where a reference is a list of texts, the best match counts.
        """
        if len(completions) != len(references):
            raise ValueError(f"got {len(completions)} completions and {len(references)} references; expected as many")
        return [
            self._score(response_text(completion), [reference] if isinstance(reference, str) else reference)
            for completion, reference in zip(completions, references, strict=True)
        ]

    def _score(self, summary: str, references: Sequence[str]) -> float | None:
        usable = [reference for reference in references if self._tokenizer.tokenize(reference)]
        if not usable:
            return None
        if self.kind == "rougeLsum":
            usable, summary = [_sentence_lines(reference) for reference in usable], _sentence_lines(summary)
        return 100 * float(self._scorer.score_multi(usable, summary)[self.kind].fmeasure)


class _CachingTokenizer(Tokenizer):
    """The library's own tokenizer with its stemmer's answers kept: stemming takes most of the time."""

    def __init__(self) -> None:
        self.stem = functools.lru_cache(maxsize=100_000)(PorterStemmer().stem)

    def tokenize(self, text: str) -> list[str]:
        return list(tokenize.tokenize(text, self))


@functools.lru_cache(maxsize=1)
def _sentence_splitter() -> PunktSentenceTokenizer:
    parameters = PunktParameters()
    parameters.abbrev_types.update(_ABBREVIATIONS)
    return PunktSentenceTokenizer(parameters)


def _sentence_lines(text: str) -> str:
    """Each sentence on a line; a line break in the text ends a sentence too."""
    split = _sentence_splitter().tokenize
    return "\n".join(sentence for line in text.splitlines() for sentence in split(line))
