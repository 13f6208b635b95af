import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.critic.toy_tokenizers import tokenizer_of
from tests.fake_openai import FakeOpenAI, error
from trl.critic.intrinsic import IntrinsicReward, PendingIntrinsic
from trl.critic.lexicon import LexiconCritic
from trl.critic.openai import CriticAuthError, OpenAICritic
from trl.critic.template import PromptTemplate
from trl.critic.types import Critique, CritiqueRequest, Span, Style

TOKENIZER = tokenizer_of("byte_level")
EOS = TOKENIZER.eos_token_id
ALIGN_CASES = Path(__file__).parents[1] / "cases" / "align.jsonl"


class Recorded:
    """A critic with given answers, which keeps what it was asked."""

    def __init__(self, *critiques: Critique) -> None:
        self.critiques = list(critiques)
        self.asked: list[CritiqueRequest] = []
        self.threads: list[str] = []

    def critique(self, requests: Sequence[CritiqueRequest]) -> list[Critique]:
        self.asked += requests
        self.threads.append(threading.current_thread().name)
        return [self.critiques.pop(0) for _ in requests]


def ids_of(*pieces: str) -> Tensor:
    """The ids of pieces that are one token each only if the vocabulary has them; else several."""
    return torch.tensor([i for piece in pieces for i in TOKENIZER(piece)["input_ids"]], dtype=torch.long)


def found(*spans: tuple[str, str]) -> Critique:
    return Critique(tuple(Span(text, polarity) for text, polarity in spans), "ok")  # type: ignore[arg-type]


def run(
    critique: Critique,
    response: Tensor,
    *,
    style: Style = "sentiment",
    score: float = 0.0,
    positive: float = 0.5,
    mode: str = "each",
) -> PendingIntrinsic:
    reward = IntrinsicReward(
        Recorded(critique),
        TOKENIZER,
        style,
        threshold=1.0,
        positive_value=positive,
        negative_value=-1.0,
        mode=mode,  # type: ignore[arg-type]
    )
    documents = ["the post"] if style == "summary" else None
    return reward.submit([ids_of("The film")], [response], [score], documents)


def by_piece(pieces: Sequence[str], rewards: Tensor) -> list[set[float]]:
    """The rewards of each piece's tokens."""
    at, result = 0, []
    for piece in pieces:
        count = len(TOKENIZER(piece)["input_ids"])
        result.append({round(value, 4) for value in rewards[at : at + count].tolist()})
        at += count
    assert at == len(rewards)
    return result


PIECES = (" was", " great", " but", " too", " long")


def test_spans_of_both_signs() -> None:
    pending = run(found(("great", "positive"), ("too long", "negative")), ids_of(*PIECES))
    (rewards,) = pending.result()
    assert rewards.dtype == torch.float32
    assert by_piece(PIECES, rewards) == [{0.0}, {0.5}, {0.0}, {-1.0}, {-1.0}]


def test_special_tokens_get_nothing_and_are_not_shown() -> None:
    critic = Recorded(found(("great", "negative")))
    reward = IntrinsicReward(critic, TOKENIZER, "toxicity", threshold=1, positive_value=0.5, negative_value=-1.0)
    query = torch.cat([torch.tensor([TOKENIZER.pad_token_id] * 2), ids_of("The film")])
    response = torch.cat([ids_of(" was", " great"), torch.tensor([EOS, EOS])])
    (rewards,) = reward.submit([query], [response], [0.0]).result()
    assert critic.asked == [CritiqueRequest("The film was great", score=0.0, start=len("The film"))]
    assert rewards[-2:].tolist() == [0.0, 0.0]
    assert by_piece((" was", " great"), rewards[:-2]) == [{0.5}, {-1.0}]


@pytest.mark.parametrize("style", ["toxicity", "summary"])
@pytest.mark.parametrize(
    ("critique", "expected"),
    [
        (found(("too long", "negative")), [{0.5}, {0.5}, {0.5}, {-1.0}, {-1.0}]),
        (Critique((), "none"), [{0.5}] * 5),
        # one quote is not in the text: the critic is not to be trusted with praise
        (found(("too long", "negative"), ("he lied", "negative")), [{0.0}, {0.0}, {0.0}, {-1.0}, {-1.0}]),
        (Critique((), "unparsable"), [{0.0}] * 5),
        (Critique((), "failed", error="HTTP 500"), [{0.0}] * 5),
    ],
)
def test_flaw_styles_reward_what_no_flaw_covers(style: Style, critique: Critique, expected: list[set[float]]) -> None:
    (rewards,) = run(critique, ids_of(*PIECES), style=style).result()
    assert by_piece(PIECES, rewards) == expected


@pytest.mark.parametrize(
    ("critique", "expected"),
    [
        (Critique((), "none"), [{0.0}] * 5),
        (Critique((), "unparsable"), [{0.0}] * 5),
        (Critique((), "failed"), [{0.0}] * 5),
        # a flaw that is not there takes the praise away, praise that is not there does nothing
        (found(("great", "positive"), ("he lied", "negative")), [{0.0}] * 5),
        (found(("great", "positive"), ("so warm", "positive")), [{0.0}, {0.5}, {0.0}, {0.0}, {0.0}]),
        (
            found(("great", "positive"), ("he lied", "negative"), ("long", "negative")),
            [{0.0}, {0.0}, {0.0}, {0.0}, {-1.0}],
        ),
        # a quote from the query is a find, and rewards nothing
        (found(("film", "negative"), ("great", "positive")), [{0.0}, {0.5}, {0.0}, {0.0}, {0.0}]),
    ],
)
def test_sentiment(critique: Critique, expected: list[set[float]]) -> None:
    (rewards,) = run(critique, ids_of(*PIECES)).result()
    assert by_piece(PIECES, rewards) == expected


def test_spread_divides_a_span_over_its_tokens() -> None:
    (rewards,) = run(found(("too long", "negative")), ids_of(*PIECES), mode="spread").result()
    assert rewards.sum().item() == pytest.approx(-1.0)
    assert (rewards < 0).sum() == len(ids_of(" too", " long"))


def test_threshold_is_inclusive_and_nan_is_skipped() -> None:
    critic = Recorded(*[found(("great", "positive"))] * 3)
    reward = IntrinsicReward(critic, TOKENIZER, "sentiment", threshold=1.0, positive_value=0.5, negative_value=-1)
    scores = [0.5, 1.0, 1.0001, math.nan, math.inf, -math.inf]
    response = ids_of(" great")
    pending = reward.submit([ids_of("It is")] * 6, [response] * 6, torch.tensor(scores))
    assert [bool(r.abs().sum() > 0) for r in pending.result()] == [True, True, False, False, False, True]
    assert [c.status for c in pending.critiques] == ["ok", "ok", "skipped", "skipped", "skipped", "ok"]
    assert [request.score for request in critic.asked] == [0.5, 1.0, -math.inf]


def test_scores_on_their_way_are_waited_for_in_the_background() -> None:
    critic = Recorded(found(("great", "positive")))
    reward = IntrinsicReward(critic, TOKENIZER, "sentiment", threshold=1.0, positive_value=0.5, negative_value=-1)
    scored = threading.Event()

    def scores() -> list[float]:
        assert scored.wait(timeout=30)
        return [2.0, 1.0]

    pending = reward.submit([ids_of("It is")] * 2, [ids_of(" great")] * 2, scores)
    assert critic.asked == []
    scored.set()
    assert [c.status for c in pending.critiques] == ["skipped", "ok"]
    assert [request.score for request in critic.asked] == [1.0]
    short = reward.submit([ids_of("It is")] * 2, [ids_of(" great")] * 2, lambda: [0.0])
    with pytest.raises(ValueError, match="1 scores for 2 samples"):
        short.result()


def test_flaw_styles_skipped_samples_get_nothing() -> None:
    (rewards,) = run(Critique((), "none"), ids_of(*PIECES), style="toxicity", score=2.0).result()
    assert rewards.tolist() == [0.0] * len(ids_of(*PIECES))


def test_empty_and_invisible_responses_are_not_asked_about() -> None:
    critic = Recorded(Critique((), "none"))
    reward = IntrinsicReward(critic, TOKENIZER, "toxicity", threshold=1, positive_value=0.5, negative_value=-1)
    empty = torch.empty(0, dtype=torch.long)
    responses = [empty, torch.tensor([EOS]), ids_of(" was"), ids_of(" ")]
    pending = reward.submit([ids_of("The film")] * 4, responses, [0.0] * 4)
    rewards = pending.result()
    assert [tuple(r.shape) for r in rewards] == [(0,), (1,), tuple(ids_of(" was").shape), (1,)]
    assert rewards[0].dtype == torch.float32
    assert [c.status for c in pending.critiques] == ["skipped", "skipped", "none", "skipped"]
    assert [request.text for request in critic.asked] == ["The film was"]
    assert reward.submit([], [], []).result() == []
    # an empty query is fine
    critic.critiques.append(Critique((), "none"))
    assert reward.submit([empty], [ids_of("was")], [0.0]).result()[0].tolist() == [0.5] * len(ids_of("was"))


def test_statistics() -> None:
    critic = Recorded(
        found(("great", "positive"), ("he lied", "negative")),
        found(("great", "positive")),
        Critique((), "failed", error="HTTP 500"),
        Critique((), "none"),
    )
    reward = IntrinsicReward(critic, TOKENIZER, "sentiment", threshold=1, positive_value=0.5, negative_value=-1)
    response = ids_of(" great", " long")
    pending = reward.submit([ids_of("It")] * 5, [response] * 5, [0.0, 0, 2, 0, 0])
    stats = pending.stats
    latency = stats.pop("critic/latency")
    assert 0 < latency < 60
    rewarded = len(ids_of(" great"))  # of the second sample only
    assert stats == {
        "critic/requests": 4,
        "critic/ok": 2,
        "critic/none": 1,
        "critic/unparsable": 0,
        "critic/failed": 1,
        "critic/skipped": 1,
        "critic/matched": 2,
        "critic/unmatched": 1,
        "critic/mean_abs_intrinsic": pytest.approx(0.5 * rewarded / (5 * len(response))),
        "critic/hit_rate": 0.5,
    }
    assert len(pending.critiques) == 5


def test_statistics_without_requests_are_numbers() -> None:
    stats = run(Critique((), "none"), ids_of(*PIECES), score=5.0).stats
    assert all(math.isfinite(value) for value in stats.values())
    assert (stats["critic/requests"], stats["critic/hit_rate"]) == (0, 0)


def test_summary_shows_the_response_alone_with_its_document() -> None:
    critic = Recorded(found(("film", "negative")))
    reward = IntrinsicReward(critic, TOKENIZER, "summary", threshold=9, positive_value=0.5, negative_value=-1)
    (rewards,) = reward.submit([ids_of("The film TL;DR:")], [ids_of(" was", " film")], [3.0], ["A post"]).result()
    assert critic.asked == [CritiqueRequest(" was film", document="A post", score=3.0)]
    assert by_piece((" was", " film"), rewards) == [{0.5}, {-1.0}]
    with pytest.raises(ValueError, match="documents"):
        reward.submit([ids_of("x")], [ids_of("y")], [0.0])


@pytest.mark.parametrize(
    ("bounds", "score", "shown"),
    [
        (None, 31.8, 31.8),
        ((0.0, 100.0), 31.8, 3.18),
        ((0.0, 100.0), 100.0, 10.0),
        ((-2.0, 3.0), 0.5, 5.0),
        ((-2.0, 3.0), -7.0, 0.0),
        ((-2.0, 3.0), 8.0, 10.0),
    ],
)
def test_score_out_of_ten(bounds: tuple[float, float] | None, score: float, shown: float) -> None:
    """The threshold and the training see the score as it is."""
    critic = Recorded(Critique((), "none"))
    values = {"threshold": score, "positive_value": 0.5, "negative_value": -1.0}
    reward = IntrinsicReward(critic, TOKENIZER, "summary", score_bounds=bounds, **values)  # type: ignore[arg-type]
    reward.submit([ids_of("x")] * 2, [ids_of(" y")] * 2, [score, score + 0.1], ["A", "B"]).result()
    assert critic.asked == [CritiqueRequest(" y", document="A", score=pytest.approx(shown))]  # type: ignore[arg-type]
    assert reward.request("A", " y", score) == critic.asked[0]


def test_wrong_score_bounds() -> None:
    with pytest.raises(ValueError, match="lower bound first"):
        IntrinsicReward(
            Recorded(), TOKENIZER, "summary", threshold=1, positive_value=0, negative_value=-1, score_bounds=(1.0, 1.0)
        )


@pytest.mark.parametrize("case", [json.loads(line) for line in ALIGN_CASES.read_text().splitlines()])
def test_shared_alignment_cases(case: dict) -> None:
    """The policy's tokenizer may have no single token for a case's piece: then all its tokens are hit or none."""
    spans = found(*[tuple(span) for span in case["spans"]])
    reward = IntrinsicReward(Recorded(spans), TOKENIZER, "sentiment", threshold=1, positive_value=1, negative_value=-1)
    pending = reward.submit([ids_of(*case["query"])], [ids_of(*case["response"])], [0.0])
    hit = [any(value != 0 for value in values) for values in by_piece(case["response"], pending.result()[0])]
    assert [i for i, is_hit in enumerate(hit) if is_hit] == case["hit"]
    assert pending.stats["critic/unmatched"] == case.get("unmatched", 0)


def test_work_runs_beside_the_caller() -> None:
    go = threading.Event()

    class Waiting(Recorded):
        def critique(self, requests: Sequence[CritiqueRequest]) -> list[Critique]:
            assert go.wait(30)
            return super().critique(requests)

    critic = Waiting(found(("great", "positive")))
    reward = IntrinsicReward(critic, TOKENIZER, "sentiment", threshold=1, positive_value=0.5, negative_value=-1)
    response = ids_of(*PIECES)
    pending = reward.submit([ids_of("The film")], [response], [0.0])
    response.zero_()  # the caller may reuse its tensors
    go.set()
    assert by_piece(PIECES, pending.result()[0])[1] == {0.5}
    assert critic.threads != [threading.current_thread().name]


def test_exception_of_the_thread_is_raised_in_result(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    (tmp_path / "p.txt").write_text("{}")
    template = PromptTemplate.from_file(tmp_path / "p.txt", style="sentiment")
    with FakeOpenAI([error(401)]) as server:
        critic = OpenAICritic(template, base_url=server.url)
        reward = IntrinsicReward(critic, TOKENIZER, "sentiment", threshold=1, positive_value=1, negative_value=-1)
        pending = reward.submit([ids_of("The film")], [ids_of(" was")], [0.0])
        for _ in range(2):
            with pytest.raises(CriticAuthError):
                pending.result()
        with pytest.raises(CriticAuthError):
            _ = pending.stats


def test_lexicon_critic_end_to_end() -> None:
    reward = IntrinsicReward(
        LexiconCritic("sentiment"), TOKENIZER, "sentiment", threshold=10, positive_value=0.5, negative_value=-0.5
    )
    pieces = (" bad", "ly", " made", ", not", " good", " at", " all", ", yet", " funny")
    (rewards,) = reward.submit([ids_of("A sad movie")], [ids_of(*pieces)], [0.0]).result()
    # A piece's leading blank may be a token of its own, which no span's words touch.
    at_pieces = [sum(values) for values in by_piece(pieces, rewards)]
    assert at_pieces == [-0.5, -0.5, 0, -0.5, -0.5, 0, 0, 0, 0.5]


def test_wrong_arguments() -> None:
    critic = Recorded()
    with pytest.raises(ValueError, match="'mood'"):
        IntrinsicReward(critic, TOKENIZER, "mood", threshold=1, positive_value=1, negative_value=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'all'"):
        IntrinsicReward(critic, TOKENIZER, "sentiment", threshold=1, positive_value=1, negative_value=0, mode="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="threshold"):
        IntrinsicReward(critic, TOKENIZER, "sentiment", threshold=math.nan, positive_value=1, negative_value=0)
    reward = IntrinsicReward(critic, TOKENIZER, "sentiment", threshold=1, positive_value=1, negative_value=0)
    with pytest.raises(ValueError, match="'scores': 1"):
        reward.submit([ids_of("a")] * 2, [ids_of("b")] * 2, [0.0])
