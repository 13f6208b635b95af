"""The pairwise judge against a real local server."""

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from tests.fake_openai import Answer, FakeOpenAI, completion, error
from trl.clients import ChatClient, EndpointAuthError
from trl.judge import JudgeGoneError, PairwiseJudge

KEY = "sk-test-0123456789"
PAIRS = [(f"prompt {i}", f"old {i}", f"new {i}") for i in range(12)]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def shown(body: dict[str, Any]) -> tuple[str, str]:
    """The texts in the places 1 and 2; empty for the first, tiny question."""
    found = re.search(r"Text 1:\n(.*)\n\nText 2:\n(.*)\n", body["messages"][0]["content"])
    return (found[1], found[2]) if found else ("", "")


def likes_new(body: dict[str, Any]) -> Answer:
    return completion("1" if shown(body)[0].startswith("new") else "2", usage=(100, 1))


def judge_of(server: FakeOpenAI, folder: Path, **kwargs: Any) -> PairwiseJudge:
    return PairwiseJudge(ChatClient("m", base_url=server.url, backoff=0.001, max_concurrency=4), folder, **kwargs)


def test_every_pair_is_asked_in_both_orders_and_never_again(tmp_path: Path) -> None:
    with FakeOpenAI(likes_new) as server:
        judge = judge_of(server, tmp_path)
        verdicts = judge.compare(PAIRS)
        assert judge.compare(PAIRS) == verdicts
        assert judge_of(server, tmp_path).compare(PAIRS[:5]).scores == [1.0] * 5
    assert verdicts.scores == [1.0] * 12 and verdicts.agreeing == 12
    assert verdicts.first_preferred == 0.5 and verdicts.problems == {}
    assert (verdicts.tokens_in, verdicts.tokens_out) == (2400, 24)
    asked = sorted(pair for pair in map(shown, server.requests) if pair[0])
    assert asked == sorted([(old, new) for _, old, new in PAIRS] + [(new, old) for _, old, new in PAIRS])
    assert set(server.keys) == {KEY} and server.most_at_once <= 4


def test_a_judge_that_likes_a_place_has_no_say(tmp_path: Path) -> None:
    with FakeOpenAI(lambda body: completion("1")) as server:
        verdicts = judge_of(server, tmp_path).compare(PAIRS)
    assert verdicts.scores == [0.5] * 12
    assert (verdicts.agreeing, verdicts.first_preferred) == (0, 1.0)


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ("2", 1.0),
        ("  **2**\n", 1.0),
        ("Text 2 is dull, 1 is fine.\nVerdict: 1", 0.0),
        ("The better text is 2.", 1.0),
        ("Tie", 0.5),
        ("Answer: tie.", 0.5),
        ("1 or 2", None),
        ("12", None),
        ("Text 1 is better than text 2", None),
        ("", None),
        ("I can't judge that.", None),
    ],
)
def test_replies(tmp_path: Path, reply: str, score: float | None) -> None:
    def answer(body: dict[str, Any]) -> Answer:  # the same verdict on the same text in both places
        text = reply if shown(body)[0] == "old" else reply.translate(str.maketrans("12", "21"))
        return completion(text)

    with FakeOpenAI(answer) as server:
        verdicts = judge_of(server, tmp_path).compare([("p", "old", "new")])
    assert verdicts.scores == [score]
    assert verdicts.problems == ({} if score is not None else {"not 1, 2 or tie": 2})


def test_texts_are_data_and_the_prompt_is_the_users(tmp_path: Path) -> None:
    template = "{{criterion}}|{{prompt}}\n\nText 1:\n{{first}}\n\nText 2:\n{{second}}\n"
    with FakeOpenAI(likes_new) as server:
        judge = judge_of(server, tmp_path, template=template, criterion="brevity")
        judge.compare([("{{second}}", "{{first}} \ud800", "new")])
        with pytest.raises(ValueError, match=r"lacks .*first.* and .*second"):
            judge_of(server, tmp_path, template="{{prompt}}?")
    sent = {request["messages"][0]["content"] for request in server.requests[1:]}
    assert "brevity|{{second}}\n\nText 1:\n{{first}} ?\n\nText 2:\nnew\n" in sent


def test_failures_are_counted_and_asked_again_by_the_next_call(tmp_path: Path) -> None:
    down = {"now": True}

    def answer(body: dict[str, Any]) -> Answer:
        return error(400, "no") if down["now"] and shown(body)[0] == "old 3" else likes_new(body)

    with FakeOpenAI(answer) as server:
        first = judge_of(server, tmp_path).compare(PAIRS)
        down["now"] = False
        second = judge_of(server, tmp_path).compare(PAIRS)
    assert first.scores == [1.0] * 3 + [None] + [1.0] * 8 and first.problems == {"no reply: HTTP 400": 1}
    assert second.scores == [1.0] * 12
    assert [shown(body)[0] for body in server.requests].count("old 3") == 2
    assert len([body for body in server.requests if shown(body)[0]]) == 25


def test_a_judge_that_is_gone_or_refuses_stops_the_call(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with (
        FakeOpenAI(lambda body: error(400, KEY) if len(server.requests) > 6 else likes_new(body)) as server,
        pytest.raises(JudgeGoneError, match=r"20 questions in a row failed \(HTTP 400\)") as gone,
    ):
        judge_of(server, tmp_path).compare([*PAIRS, *(("more", f"old {i}", "x") for i in range(20))])
    assert len(server.requests) < 40
    with (
        FakeOpenAI([error(401, KEY)]) as server,
        pytest.raises(EndpointAuthError, match="the key is refused") as refused,
    ):
        judge_of(server, tmp_path / "other").compare(PAIRS)
    assert KEY not in str(gone.value) + str(refused.value) + caplog.text
    assert all(KEY.encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
