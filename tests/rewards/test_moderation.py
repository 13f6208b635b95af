import json
import logging
import math
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fake_openai import Answer, FakeOpenAI, error
from tests.fake_perspective import score_of
from trl.clients import EndpointAuthError
from trl.rewards import ModerationReward

KEY = "sk-test-0123456789abcdef"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


def result(text: str) -> dict[str, Any]:
    scores = {name: score_of(text, name) for name in ("harassment", "hate", "violence")}
    return {"flagged": False, "categories": {}, "category_scores": {**scores, "sexual": 1.0, "hate/threatening": 1.0}}


def results(texts: list[str]) -> Answer:
    return Answer(200, json.dumps({"id": "m", "model": "m", "results": [result(text) for text in texts]}).encode())


def right(body: dict[str, Any]) -> Answer:
    return results(body["input"])


def expected(text: str) -> float:
    return 1 - max(score_of(text, name) for name in ("harassment", "hate", "violence"))


def moderation(server: FakeOpenAI, **settings: Any) -> ModerationReward:
    return ModerationReward("m", base_url=server.url, **{"backoff": 0.01, **settings})


def first_time(answer: Answer) -> Callable[[dict[str, Any]], Answer]:
    asked: list[str] = []

    def reply(body: dict[str, Any]) -> Answer:
        asked.append(json.dumps(body))
        return answer if asked.count(json.dumps(body)) == 1 else right(body)

    return reply


def test_texts_go_out_in_batches_and_order_is_kept() -> None:
    texts = [f"text {index % 50} é 🙂" for index in range(70)]
    with FakeOpenAI(right) as server:
        reward = moderation(server, batch_size=8)
        got = reward(prompts=texts, completions=texts)
        reward.close()
    assert got == [expected(text) for text in texts]
    assert len(set(got)) == 50
    assert sorted(len(body["input"]) for body in server.requests) == [2, 8, 8, 8, 8, 8, 8]
    assert {body["model"] for body in server.requests} == {"m"}
    assert set(server.keys) == {KEY}
    assert reward.__name__ == "moderation_reward"


def test_blank_texts_are_not_sent_and_conversations_are_read() -> None:
    with FakeOpenAI(right) as server:
        reward = moderation(server)
        got = reward(completions=["", " \n", [{"role": "assistant", "content": "kind"}], "bad \ud83d"])
        reward.close()
    assert got == [None, None, expected("kind"), expected("bad ?")]
    assert [body["input"] for body in server.requests] == [["kind", "bad ?"]]
    assert reward.errors == {"empty text, not sent": 2}


def test_nothing_to_ask_asks_nothing() -> None:
    with FakeOpenAI(right) as server:
        reward = moderation(server)
        assert reward(completions=[]) == [] and reward(completions=[""]) == [None]
        reward.close()
    assert server.requests == []


def test_the_cache_saves_requests_across_runs_and_knows_the_model(tmp_path: Path) -> None:
    with FakeOpenAI(right) as server:
        for model, texts, requests in (
            ("m", ["a", "b"], 1),
            ("m", ["b", "a"], 1),
            ("m", ["b", "c"], 2),
            ("n", ["a"], 3),
        ):
            reward = ModerationReward(model, base_url=server.url, cache=tmp_path)
            assert reward(completions=texts) == [expected(text) for text in texts]
            reward.close()
            assert len(server.requests) == requests
    assert server.requests[1]["input"] == ["c"]
    assert all(KEY.encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


@pytest.mark.parametrize(
    "fault",
    [
        error(429, "slow down", retry_after="0"),
        error(500),
        Answer(200, results(["a"] * 4).body, cut_after=30),
        Answer(200, results(["a"] * 4).body, delay=1.0),
    ],
    ids=["429", "500", "reset", "slow"],
)
def test_what_passes_is_retried(fault: Answer) -> None:
    texts = [f"text {index}" for index in range(12)]
    with FakeOpenAI(first_time(fault)) as server:
        reward = moderation(server, batch_size=4, timeout=0.5)
        assert reward(completions=texts) == [expected(text) for text in texts]
        reward.close()
    assert len(server.requests) == 6
    assert not reward.errors


def test_one_refused_text_costs_the_others_nothing() -> None:
    def fault(body: dict[str, Any]) -> Answer:
        return error(400, "too long") if "long" in body["input"] else right(body)

    with FakeOpenAI(fault) as server:
        reward = moderation(server, batch_size=4)
        assert reward(completions=["a", "long", "b", "c"]) == [expected("a"), None, expected("b"), expected("c")]
        assert reward(completions=["long"]) == [None]
        reward.close()
    assert len(server.requests) == 1 + 4 + 1
    assert reward.errors == {"HTTP 400": 2}


MALFORMED = {
    "not JSON": (b"{", "malformed reply (not JSON)"),
    "a list": (b"[]", "malformed reply (expected 2 results)"),
    "too few": (results(["a"]).body, "malformed reply (expected 2 results)"),
    "no scores": (b'{"results": [{}, null]}', "no score for one of harassment, hate, violence in the reply"),
    "category missing": (
        json.dumps({"results": [{"category_scores": {"harassment": 0.1, "hate": 0.1}}] * 2}).encode(),
        "no score for one of harassment, hate, violence in the reply",
    ),
    "NaN": (
        json.dumps(
            {"results": [{"category_scores": {**result("a")["category_scores"], "hate": math.nan}}] * 2}
        ).encode(),
        "no score for one of harassment, hate, violence in the reply",
    ),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_reply_is_no_verdict(fault: str) -> None:
    body, reason = MALFORMED[fault]
    with FakeOpenAI([Answer(200, body)]) as server:
        reward = moderation(server)
        assert reward(completions=["a", "b"]) == [None, None]
        reward.close()
    assert reward.errors == {reason: 2}


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refused_key_or_unknown_model_is_an_error_without_the_key(
    status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with FakeOpenAI([error(status, f"no {KEY}")]) as server:
        reward = moderation(server)
        with pytest.raises(EndpointAuthError, match=f"answered HTTP {status} for model 'm'") as raised:
            reward(completions=["a"])
        assert KEY not in repr(vars(reward)) + repr(reward)
        reward.close()
    shown = "".join(traceback.TracebackException.from_exception(raised.value, capture_locals=True).format())
    assert KEY not in shown + caplog.text


def test_no_key_for_openai_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(EndpointAuthError, match="OPENAI_API_KEY"):
        ModerationReward()
    with FakeOpenAI(right) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        reward = ModerationReward()
        assert reward(completions=["a"]) == [expected("a")]
        reward.close()
    assert server.keys == [""]


def test_the_limit_per_minute_is_divided_over_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match="requests_per_minute is 1 "):
        ModerationReward(base_url="http://127.0.0.1:9/v1", requests_per_minute=1)
    with pytest.raises(ValueError, match="batch_size is 0"):
        ModerationReward(base_url="http://127.0.0.1:9/v1", batch_size=0)
