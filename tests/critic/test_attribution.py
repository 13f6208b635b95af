import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.critic.test_intrinsic import TOKENIZER, ids_of
from tests.rewards.toy_classifiers import save_classifier
from trl.critic.attribution import AttributionCritic, leave_one_out
from trl.critic.intrinsic import IntrinsicReward
from trl.critic.types import CritiqueRequest, Span
from trl.rewards import SentimentReward

WORTH = {"wonderful": 2.0, "funny": 2.0, "boring": -2.0, "bad": -2.0, "slow": -0.1}


class WordCount:
    """A reward function: what the words of prompt and completion are worth, and a record of its calls."""

    def __init__(self, worth: dict[str, float] = WORTH) -> None:
        self.worth = worth
        self.calls: list[list[tuple[str, str]]] = []

    def __call__(self, *, prompts: Sequence[str], completions: Sequence[str]) -> list[float | None]:
        self.calls.append(list(zip(prompts, completions, strict=True)))
        return [self.score(prompt + completion) for prompt, completion in self.calls[-1]]

    def score(self, text: str) -> float | None:
        return math.fsum(self.worth.get(word, 0.0) for word in re.findall(r"\w+", text)) if text.strip() else None


def spans_of(query: str, response: str, reward: Any = None, **options: Any) -> list[tuple[str, str]]:
    critic = AttributionCritic(reward or WordCount(), **options)
    (critique,) = critic.critique([CritiqueRequest(query + response, start=len(query))])
    assert critique.status == ("ok" if critique.spans else "none")
    assert all(span.text in query + response for span in critique.spans)
    return [(span.text, span.polarity) for span in critique.spans]


@pytest.mark.parametrize(
    ("query", "response", "expected"),
    [
        ("It is", " wonderful, but the end is boring.", [("wonderful", "positive"), ("boring", "negative")]),
        # neighbours of one sign are one span, verbatim; of two signs two
        ("It is", " wonderful,  funny and long", [("wonderful,  funny", "positive")]),
        ("It is", " wonderful boring stuff", [("wonderful", "positive"), ("boring", "negative")]),
        # words of the query are not quoted
        ("A wonderful boring film.", " It is bad", [("bad", "negative")]),
        # weak beside strong ones, but enough alone
        ("A", " slow and boring film", [("boring", "negative")]),
        ("A", " slow film it is", [("slow", "negative")]),
        # one word, or all the same: nothing to compare with, and every one counts
        ("It is", " wonderful", [("wonderful", "positive")]),
        ("It is", " bad bad bad", [("bad bad bad", "negative")]),
        # a word that begins in the query
        ("It is wonder", "ful, the end", [("wonderful", "positive")]),
        ("", "boring from the start", [("boring", "negative")]),
        ("It is", " a film", []),
        ("It is", " ... !", []),
    ],
)
def test_words_that_the_reward_depends_on(query: str, response: str, expected: list[tuple[str, str]]) -> None:
    assert spans_of(query, response) == expected


def test_margin() -> None:
    reward = WordCount({"a": 3.0, "b": 1.0})
    # root mean square: sqrt(10 / 4) = 1.58
    assert spans_of("", "a x b y", reward) == [("a", "positive")]
    assert spans_of("", "a x b y", reward, margin=1.0 / 1.6) == [("a", "positive"), ("b", "positive")]
    assert spans_of("", "a x b y", reward, margin=2.0) == []


@pytest.mark.parametrize("style", ["toxicity", "summary"])
def test_flaw_styles_quote_flaws_only(style: Any) -> None:
    assert spans_of("It is", " wonderful, then boring", style=style) == [("boring", "negative")]
    assert spans_of("It is", " wonderful, then over", style=style) == []


@pytest.mark.parametrize("style", ["toxicity", "summary"])
def test_merits_hide_no_flaw(style: Any) -> None:
    """As in ROUGE, where a word that is found adds several times what one that is not takes."""
    reward = WordCount({"good": 2.0, "good2": 2.0, "good3": 2.0, "meh": -0.3})
    assert spans_of("", "good good2 good3 meh", reward, style=style) == [("meh", "negative")]
    assert ("meh", "negative") not in spans_of("", "good good2 good3 meh", reward)


@pytest.mark.parametrize(("score", "quoted"), [(0.0, ["nothing in common"]), (3.0, None), (None, None)])
def test_no_effect_at_all_is_no_praise_of_a_summary(score: float | None, quoted: list[str] | None) -> None:
    """A ROUGE of 0 has no word that could lower it: it is the limit of few words that add to it, not of many."""
    request = CritiqueRequest(" nothing in common.", document="The post", score=score)
    (critique,) = AttributionCritic(WordCount(), "summary").critique([request])
    assert critique.status == ("failed" if quoted is None else "ok")
    assert critique.spans == tuple(Span(text, "negative") for text in quoted or ())
    assert (critique.error is None) == (quoted is not None)
    (critique,) = AttributionCritic(WordCount(), "toxicity").critique([request])
    assert critique.status == "none"


def test_margin_is_free_of_the_rewards_unit() -> None:
    for unit in (0.01, 1, 1000):
        reward = WordCount({word: value * unit for word, value in WORTH.items()})
        assert spans_of("It is", " wonderful if slow", reward) == [("wonderful", "positive")]


def test_rounding_is_not_an_effect() -> None:
    """A reward that depends on nothing but comes out of a network differs in its last digits."""
    reward = WordCount({"the": 3e-5, "film": -3e-5, "large": 500.0})
    assert spans_of("", "the film it is", reward) == []
    # rounding grows with the number: 500 in float32 is exact to 3e-5
    assert spans_of("large", " the film it is", WordCount({"large": 500.0, "the": 0.03})) == []


def test_equal_words_share_their_mean_effect() -> None:
    """A quote marks every occurrence of its text, so the marks must be right for all of them together."""

    def reward(*, prompts: list[str], completions: list[str]) -> list[float]:
        """One more point for a "good" right after "very", the same less for one after "not"."""
        return [text.count("very good") - text.count("not good") for text in completions]

    # very (+1), good (mean of +1 and -1), not (-1)
    assert spans_of("", "very good, not good", reward) == [("very", "positive"), ("not", "negative")]
    # two of the three are good
    assert ("good", "positive") in spans_of("", "very good, not good. So very good", reward, margin=0.2)


def test_one_call_of_distinct_texts() -> None:
    reward = WordCount()
    request = CritiqueRequest("It is bad bad", start=5)
    critiques = AttributionCritic(reward).critique([request, request, CritiqueRequest("It is so bad", start=5)])
    assert critiques[0] == critiques[1]
    assert reward.calls == [
        [("It is", " bad bad"), ("It is", " bad"), ("It is", " so bad"), ("It is", " so")],
    ]
    AttributionCritic(reward).critique([])
    AttributionCritic(reward).critique([CritiqueRequest("No words: ", start=9)])
    assert len(reward.calls) == 1


def test_what_the_reward_sees() -> None:
    reward = WordCount()
    AttributionCritic(reward).critique([CritiqueRequest("The wonder ful end", start=8)])
    assert reward.calls[-1] == [
        ("The wond", "er ful end"),
        ("The ", "ful end"),  # the word goes as a whole, and one of the blanks around it
        ("The wond", "er end"),
        ("The wond", "er ful"),
    ]
    AttributionCritic(reward).critique([CritiqueRequest("The bad, end", start=4)])
    assert reward.calls[-1] == [("The ", "bad, end"), ("The ", ", end"), ("The ", "bad,")]


def test_summaries_have_their_document_as_prompt() -> None:
    reward = WordCount()
    critic = AttributionCritic(reward, "summary")
    (critique,) = critic.critique([CritiqueRequest(" a bad day", document="The post", score=2.0)])
    assert critique.spans == (Span("bad", "negative"),)
    assert reward.calls == [
        [("The post", " a bad day"), ("The post", " bad day"), ("The post", " a day"), ("The post", " a bad")]
    ]


@pytest.mark.parametrize("nothing", [None, math.nan, math.inf])
def test_no_verdict(nothing: float | None) -> None:
    def reward(*, prompts: list[str], completions: list[str]) -> list[float | None]:
        """No verdict without "the", and none on what is shorter than two words."""
        return [1.0 * len(text) if "the" in text and len(text.split()) > 1 else nothing for text in completions]

    failed, ok = AttributionCritic(reward).critique([CritiqueRequest("a film"), CritiqueRequest("the longest")])
    assert (failed.status, failed.spans) == ("failed", ())
    assert failed.error is not None and "no verdict" in failed.error
    # both rests have no reward: their words have no known effect
    assert (ok.status, ok.spans) == ("none", ())


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="'mood'"):
        AttributionCritic(WordCount(), "mood")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="margin is 0"):
        AttributionCritic(WordCount(), margin=0)
    with pytest.raises(ValueError, match="1 rewards for 3 samples"):
        AttributionCritic(lambda prompts, completions: [1.0]).critique([CritiqueRequest("two words")])


def test_end_to_end_with_token_rewards() -> None:
    critic = AttributionCritic(WordCount())
    intrinsic = IntrinsicReward(critic, TOKENIZER, "sentiment", threshold=9, positive_value=0.5, negative_value=-1)
    pieces = (" a", " boring", " end", " but", " wonderful")
    (rewards,) = intrinsic.submit([ids_of("It is")], [ids_of(*pieces)], [0.0]).result()
    counts = [len(TOKENIZER(piece)["input_ids"]) for piece in pieces]
    assert rewards.sum() == pytest.approx(-counts[1] + 0.5 * counts[4])


def test_real_classifier(tmp_path: Path) -> None:
    """The spans are those of rewards computed one by one, without batches or padding."""
    reward = SentimentReward(str(save_classifier(tmp_path, ["NEGATIVE", "POSITIVE"])), batch_size=8)
    query, response = "a film", " with bad jokes and a great cast, the plot was dull."
    request = CritiqueRequest(query + response, start=len(query))
    words = [match.span() for match in re.finditer(r"\w+", query + response)][2:]
    (effects,) = leave_one_out(reward, [request], [words])

    def alone(text: str) -> float:
        (value,) = reward(prompts=[query], completions=[text])
        assert value is not None
        return value

    parts = response.split(" ")[1:]
    rests = [" " + " ".join(parts[:i] + parts[i + 1 :]) for i in range(len(parts))]
    rests[6] = " with bad jokes and a great, the plot was dull."
    rests[10] = " with bad jokes and a great cast, the plot was."
    assert effects == pytest.approx([alone(response) - alone(rest) for rest in rests], abs=1e-4)
    (critique,) = AttributionCritic(reward).critique([request])
    size = math.sqrt(sum(effect**2 for effect in effects) / len(effects))
    strong = [i for i, effect in enumerate(effects) if abs(effect) >= size]
    assert sum(len(re.findall(r"\w+", span.text)) for span in critique.spans) == len(strong) > 0


@pytest.mark.builtin
def test_builtin_reward_model() -> None:
    critic = AttributionCritic(SentimentReward("builtin:sentiment"))
    query = "I saw it last week."
    texts = [
        " The cast is wonderful from start to end.",
        " The story is boring from start to end.",
        " I loved every minute, but the jokes are terrible.",
    ]
    critiques = critic.critique([CritiqueRequest(query + text, start=len(query)) for text in texts])
    marks = [
        {word: span.polarity for span in critique.spans for word in re.findall(r"\w+", span.text)}
        for critique in critiques
    ]
    assert marks[0]["wonderful"] == "positive"
    assert marks[1]["boring"] == "negative"
    assert marks[2]["terrible"] == "negative"
