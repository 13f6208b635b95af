import random
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.critic.test_intrinsic import TOKENIZER, ids_of
from trl.critic.align import span_rewards
from trl.critic.intrinsic import IntrinsicReward
from trl.critic.lexicon import LexiconCritic
from trl.critic.random_spans import RandomSpanCritic
from trl.critic.replay import RecordingCritic
from trl.critic.types import Critique, CritiqueRequest, Span
from trl.loop import critic_of
from trl.run import RunArgs
from trl.trainer.config import PPOConfig

QUERY = "It is a great film"
RESPONSE = " with a bad plot, but the cast is great and many scenes look really wonderful to me."


class Fixed:
    """A critic with one answer."""

    def __init__(self, *spans: tuple[str, str]) -> None:
        self.answer = Critique(tuple(Span(*span) for span in spans), "ok" if spans else "none", reply="its words")  # type: ignore[arg-type]

    def critique(self, requests: Sequence[CritiqueRequest]) -> list[Critique]:
        return [self.answer for _ in requests]


def control(like: Fixed, query: str, response: str, seed: int = 0) -> Critique:
    (critique,) = RandomSpanCritic(like, seed).critique([CritiqueRequest(query + response, start=len(query))])
    return critique


def marked(spans: Sequence[Span], query: str, response: str) -> list[float]:
    """Reward of each word of the response when positive words get 1 and negative ones -1."""
    pieces = re.findall(r"\s*[^\s\w]*\s*\w+|\s*\W+$", response)
    assert "".join(pieces) == response
    placed = span_rewards(spans, ids_of(query), ids_of(*pieces), TOKENIZER, positive_value=1.0, negative_value=-1.0)
    at, rewards = 0, []
    for piece in pieces:
        count = len(TOKENIZER(piece)["input_ids"])
        last = placed.rewards[at : at + count]  # of the word; blanks and punctuation before it come first
        at += count
        if re.search(r"\w", piece):
            rewards.append(float(last[-1]))
    return rewards


def test_number_length_and_sign_stay() -> None:
    like = Fixed(("bad plot", "negative"), ("wonderful", "positive"), ("cast is great", "positive"))
    wanted = Counter({(2, "negative"): 1, (1, "positive"): 1, (3, "positive"): 1})
    places = set()
    for seed in range(50):
        critique = control(like, QUERY, RESPONSE, seed)
        assert Counter((len(span.text.split()), span.polarity) for span in critique.spans) == wanted
        assert all(span.text in RESPONSE for span in critique.spans)
        assert (critique.status, critique.reply) == ("ok", "its words")
        words = marked(critique.spans, QUERY, RESPONSE)
        assert (words.count(1.0), words.count(-1.0)) == (4, 2)
        places.add(critique.spans)
    assert len(places) > 40


def test_same_seed_and_text_same_places() -> None:
    like = Fixed(("bad plot", "negative"), ("great", "positive"))
    assert control(like, QUERY, RESPONSE, 3) == control(like, QUERY, RESPONSE, 3)
    assert control(like, QUERY, RESPONSE, 3) != control(like, QUERY, RESPONSE, 4)
    # alone or in a batch
    request = CritiqueRequest(QUERY + RESPONSE, start=len(QUERY))
    other = CritiqueRequest("Another bad plot here and there", start=0)
    assert RandomSpanCritic(like, 3).critique([other, request])[1] == control(like, QUERY, RESPONSE, 3)


def test_all_places_are_equally_likely() -> None:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
    like = Fixed(("two three", "negative"), ("seven", "positive"))
    draws = 4000
    hits: Counter[tuple[str, int]] = Counter()
    for seed in range(draws):
        for span in control(like, "", " ".join(words), seed).spans:
            hits[span.polarity, words.index(span.text.split()[0])] += 1
    # arrangements of a piece of two and a piece of one on ten places: 9 x 8 orders of nine pieces
    expected: Counter[tuple[str, int]] = Counter()
    for two in range(9):
        for one in range(10):
            if one not in (two, two + 1):
                expected["negative", two] += 1
                expected["positive", one] += 1
    total = sum(expected.values()) / 2
    assert set(hits) == set(expected)
    for key, count in expected.items():
        share = count / total
        assert hits[key] / draws == pytest.approx(share, abs=5 * (share * (1 - share) / draws) ** 0.5)


def test_repeated_words_do_not_multiply_the_reward() -> None:
    """ "the" stands five times: a quote of one would mark all."""
    response = " the cast and the plot and the end and the film and the jokes are bad"
    like = Fixed(("bad", "negative"), ("cast", "positive"))
    for seed in range(40):
        words = marked(control(like, "A film", response, seed).spans, "A film", response)
        assert (words.count(1.0), words.count(-1.0)) == (1, 1)


def test_a_quote_that_marks_twice_is_two_places() -> None:
    response = " a bad plot, a bad cast, and three more words follow"
    for seed in range(20):
        words = marked(control(Fixed(("bad", "negative")), "", response, seed).spans, "", response)
        assert words.count(-1.0) == 2


def test_where_quotes_overlap_the_rewarded_words_count() -> None:
    response = " a really quite bad plot of some other film"
    like = Fixed(("really quite bad plot", "positive"), ("bad", "negative"))
    for seed in range(20):
        words = marked(control(like, "", response, seed).spans, "", response)
        assert (words.count(1.0), words.count(-1.0)) == (3, 1)


def test_quotes_that_mark_nothing_in_the_response_stay() -> None:
    like = Fixed(("he lied", "negative"), ("great film", "positive"), ("bad", "negative"))
    critique = control(like, QUERY, " with a bad plot and cast")
    assert [span.text for span in critique.spans[1:]] == ["he lied", "great film"]
    assert len(critique.spans) == 3
    for nothing in (Fixed(), Fixed(("he lied", "negative")), Fixed(("!!", "negative"))):
        assert control(nothing, QUERY, " with! a bad plot !!") == nothing.answer
    assert control(Fixed(("!!", "negative")), QUERY, " !!") == Fixed(("!!", "negative")).answer


def test_a_word_that_begins_in_the_query_counts() -> None:
    critique = control(Fixed(("wonderful", "positive")), "It is wonder", "ful")
    assert critique.spans == (Span("wonderful", "positive"),)
    places = {
        control(Fixed(("wonderful", "positive")), "It is wonder", "ful stuff", s).spans[0].text for s in range(20)
    }
    assert places == {"wonderful", "stuff"}


def test_nothing_but_repetition_still_ends() -> None:
    like = Fixed(("great great", "positive"))
    response = " great" * 7
    critique = control(like, "", response)
    assert critique.status == "ok" and all(span.text in response for span in critique.spans)


def test_failures_pass_through() -> None:
    like = Fixed()
    like.answer = Critique((), "failed", error="HTTP 500")
    assert control(like, QUERY, RESPONSE) == like.answer


def test_as_many_words_are_rewarded_as_by_the_critic() -> None:
    """On nearly every text, though all are full of repetitions; and not the same words."""
    vocabulary = ["bad", "great", "the", "a", "film", "plot", "cast", "boring", "wonderful", "scene", "by", "sad"]
    generator = random.Random(0)
    moved = equal = 0
    for _ in range(60):
        response = "".join(" " + generator.choice(vocabulary) for _ in range(10))
        request = CritiqueRequest("It is" + response, start=5)
        real, control = (
            marked(critic.critique([request])[0].spans, "It is", response)
            for critic in (LexiconCritic(), RandomSpanCritic(LexiconCritic(), seed=1))
        )
        equal += Counter(real) == Counter(control)
        moved += real != control
    assert equal >= 57 and moved > 40


def test_end_to_end_with_token_rewards() -> None:
    critic = RandomSpanCritic(LexiconCritic())
    reward = IntrinsicReward(critic, TOKENIZER, "sentiment", threshold=9, positive_value=1, negative_value=-1)
    pending = reward.submit([ids_of("It is")], [ids_of(" a bad film with many boring scenes")], [0.0])
    assert (pending.stats["critic/matched"], pending.stats["critic/unmatched"]) == (2, 0)
    assert (pending.result()[0] < 0).sum() >= 2


@settings(max_examples=150, deadline=None)
@given(
    words=st.lists(st.sampled_from(["a", "the", "bad", "good", "film-like", "it's", "Bad", "film"]), max_size=14),
    gaps=st.lists(st.sampled_from([" ", ", ", " - ", "  "]), min_size=14, max_size=14),
    cuts=st.lists(
        st.tuples(st.integers(0, 13), st.integers(1, 4), st.sampled_from(["positive", "negative"])), max_size=4
    ),
    start=st.integers(0, 20),
    seed=st.integers(0, 3),
)
def test_any_text(words: list[str], gaps: list[str], cuts: list[tuple[int, int, str]], start: int, seed: int) -> None:
    text = "".join(word + gap for word, gap in zip(words, gaps, strict=False))
    quotes = []
    for at, count, polarity in cuts:
        piece = [word + gap for word, gap in zip(words, gaps, strict=False)][at : at + count]
        if piece:
            quotes.append(("".join(piece).strip(" ,-"), polarity))
    request = CritiqueRequest(text, start=min(start, len(text)))
    like = Fixed(*quotes)
    (critique,) = RandomSpanCritic(like, seed).critique([request])
    assert all(span.text in text for span in critique.spans)
    assert critique.status == like.answer.status
    assert bool(critique.spans) == bool(like.answer.spans)


def test_by_flags(tmp_path: Path) -> None:
    """--critic random --critic_replay FILE: the control of the recorded critic, seeded like the run."""
    recording = tmp_path / "critiques.jsonl"
    request = CritiqueRequest(QUERY + RESPONSE, start=len(QUERY))
    recorded = RecordingCritic(LexiconCritic(), recording).critique([request])
    args = RunArgs(ppo_config=PPOConfig(seed=5), critic="random", critic_replay=str(recording))
    critic = critic_of(args, "sentiment", None, None, False)
    expected = RandomSpanCritic(Fixed(*_pairs(recorded[0])), 5).critique([request])
    assert [answer.spans for answer in critic.critique([request])] == [answer.spans for answer in expected]
    args = RunArgs(critic_replay=str(recording))
    assert args.critic_kind == "replay"
    assert critic_of(args, "sentiment", None, None, False).critique([request]) == recorded
    for wrong, reason in (({"critic": "replay"}, "critic_replay"), ({"critic": "attribution"}, "reward function")):
        with pytest.raises(SystemExit, match=reason):
            critic_of(RunArgs(**wrong), "sentiment", None, None, False)  # type: ignore[arg-type]
    with pytest.raises(SystemExit, match="No such file"):
        critic_of(RunArgs(critic_replay=str(tmp_path / "none.jsonl")), "sentiment", None, None, False)


def _pairs(critique: Critique) -> list[tuple[str, str]]:
    return [(span.text, span.polarity) for span in critique.spans]
