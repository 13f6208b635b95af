import logging
import socket
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fake_openai import Answer, FakeOpenAI, completion, error
from trl.critic.openai import CriticAuthError, OpenAICritic
from trl.critic.template import PromptTemplate
from trl.critic.types import CritiqueRequest, Span

KEY = "sk-test-0123456789abcdef"
GOOD = "[Span 1]: a treat\n\nIdentified Negative Text Span:\nNone identified"


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)


@pytest.fixture
def template(tmp_path: Path) -> PromptTemplate:
    file = tmp_path / "prompt.txt"
    file.write_text("Which words?\n{}\nIdentified Positive Text Span:\n")
    return PromptTemplate.from_file(file, style="sentiment")


@pytest.fixture
def no_key_in_logs(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Everything that any library logs, down to DEBUG, must be free of the key."""
    caplog.set_level(logging.DEBUG)
    yield caplog
    records = caplog.get_records("call")
    assert records
    assert all(KEY not in logging.Formatter().format(record) for record in records)


def prompt_of(body: dict[str, Any]) -> str:
    return str(body["messages"][0]["content"])


def ask(template: PromptTemplate, server: FakeOpenAI, *texts: str, **settings: Any) -> list[Any]:
    critic = OpenAICritic(template, "m", base_url=server.url, **{"backoff": 0.01, **settings})
    try:
        return critic.critique([CritiqueRequest(text) for text in texts])
    finally:
        critic.close()


def test_request_and_reply(template: PromptTemplate, no_key_in_logs: pytest.LogCaptureFixture) -> None:
    with FakeOpenAI([completion(GOOD)]) as server:
        (critique,) = ask(template, server, "It is\na treat", max_tokens=77)
        assert critique.spans == (Span("a treat", "positive"),)
        assert (critique.status, critique.reply, critique.error) == ("ok", GOOD, None)
        preflight, request = server.requests
        assert request["model"] == preflight["model"] == "m"
        assert prompt_of(request) == "Which words?\nIt is a treat\nIdentified Positive Text Span:\n"
        assert request["temperature"] == 0
        assert request["max_tokens"] == 77
        assert request["stop"] == list(template.stop)
        assert set(server.keys) == {KEY}
        named = [r for r in no_key_in_logs.records if server.url in r.getMessage() and r.levelname == "INFO"]
        assert len([r for r in named if r.name == "trl.critic.openai"]) == 1


def test_identical_requests_are_asked_once_and_order_is_kept(template: PromptTemplate) -> None:
    def answer(body: dict[str, Any]) -> Answer:
        text = prompt_of(body).split("\n")[1] if "\n" in prompt_of(body) else ""
        return completion(f"[Span 1]: {text}", delay=0.2 if text == "a" else 0)

    with FakeOpenAI(answer) as server:
        critiques = ask(template, server, "a", "b", "a", "c", "b")
        assert [c.spans[0].text for c in critiques] == ["a", "b", "a", "c", "b"]
        assert len(server.requests) == 1 + 3  # preflight + distinct


def test_preflight_only_in_the_first_call(template: PromptTemplate) -> None:
    with FakeOpenAI([completion(GOOD)]) as server:
        critic = OpenAICritic(template, "m", base_url=server.url)
        assert critic.critique([]) == []
        assert len(server.requests) == 0
        critic.critique([CritiqueRequest("x")])
        critic.critique([CritiqueRequest("x")])
        assert len(server.requests) == 3


def test_concurrency_is_bounded_and_used(template: PromptTemplate) -> None:
    with FakeOpenAI(lambda body: completion(GOOD, delay=0.1)) as server:
        ask(template, server, *"abcdefghijkl", max_concurrency=4)
        assert server.most_at_once == 4


@pytest.mark.parametrize(
    "trouble",
    [
        error(500),
        error(503),
        error(408),
        error(409),
        error(429),
        Answer(200, completion(GOOD).body, cut_after=20),
        completion(GOOD, delay=1.5),
    ],
    ids=["500", "503", "408", "409", "429", "cut", "slow"],
)
def test_passing_trouble_is_retried(
    template: PromptTemplate, trouble: Answer, no_key_in_logs: pytest.LogCaptureFixture
) -> None:
    with FakeOpenAI([completion("OK"), trouble, trouble, completion(GOOD)]) as server:
        (critique,) = ask(template, server, "x", timeout=0.4)
        assert critique.status == "ok"
        assert len(server.requests) == 4


def test_retries_end(template: PromptTemplate) -> None:
    with FakeOpenAI([completion("OK"), error(500, f"bad key {KEY}")]) as server:
        (critique,) = ask(template, server, "x", max_retries=2)
        assert (critique.status, critique.spans, critique.error) == ("failed", (), "HTTP 500")
        assert len(server.requests) == 1 + 3


def test_retry_after_is_honoured(template: PromptTemplate) -> None:
    with FakeOpenAI([completion("OK"), error(429, retry_after="1"), completion(GOOD)]) as server:
        (critique,) = ask(template, server, "x")
        assert critique.status == "ok"
        assert 1.0 <= server.times[2] - server.times[1] < 1.5


def test_retry_after_beyond_the_deadline_fails_at_once(template: PromptTemplate) -> None:
    with FakeOpenAI([completion("OK"), error(429, retry_after="3600")]) as server:
        start = time.monotonic()
        (critique,) = ask(template, server, "x", deadline=5)
        assert (critique.status, critique.error) == ("failed", "HTTP 429")
        assert time.monotonic() - start < 2


def test_deadline_bounds_the_whole_call(template: PromptTemplate) -> None:
    with FakeOpenAI(lambda b: completion("OK") if "\n" not in prompt_of(b) else completion(GOOD, delay=3)) as server:
        start = time.monotonic()
        critiques = ask(template, server, *"abcdef", deadline=1.0, timeout=0.6, max_concurrency=2)
        assert time.monotonic() - start < 1.6
        assert {c.status for c in critiques} == {"failed"}
        assert any("deadline of 1 s passed" in c.error for c in critiques)


@pytest.mark.parametrize(
    "answer",
    [
        Answer(200, b"{not json"),
        Answer(200, b"{}"),
        Answer(200, b"[]"),
        Answer(200, b'{"choices": []}'),
        Answer(200, b'{"choices": [{"message": null}]}'),
        Answer(200, b'{"choices": [{"message": {"content": 7}}]}'),
        Answer(200, b'{"choices": "abc"}'),
        Answer(200, b""),
        Answer(200, b"<html>proxy</html>", {"Content-Type": "text/html"}),
        error(400),
        error(422),
    ],
    ids=lambda a: f"{a.status}-{a.body[:24]!r}",
)
def test_other_failures_cost_only_that_sample(template: PromptTemplate, answer: Answer) -> None:
    def answers(body: dict[str, Any]) -> Answer:
        return answer if "bad" in prompt_of(body) else completion(GOOD)

    with FakeOpenAI(answers) as server:
        bad, good = ask(template, server, "bad", "fine")
        assert (bad.status, bad.spans) == ("failed", ())
        assert bad.error
        assert good.status == "ok"
        assert len(server.requests) == 3  # nothing retried


@pytest.mark.parametrize("reply", ["", None, "I'm sorry, but I can't help with that request."])
def test_empty_reply_or_refusal_is_unparsable(template: PromptTemplate, reply: str) -> None:
    with FakeOpenAI([completion(reply)]) as server:
        (critique,) = ask(template, server, "x")
        assert (critique.status, critique.spans) == ("unparsable", ())


def test_huge_reply(template: PromptTemplate) -> None:
    with FakeOpenAI([completion("OK"), completion(GOOD + "\n\n##### " + "x" * 5_000_000)]) as server:
        (critique,) = ask(template, server, "x")
        assert critique.spans == (Span("a treat", "positive"),)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_refused_key_stops_at_once(
    template: PromptTemplate, status: int, no_key_in_logs: pytest.LogCaptureFixture
) -> None:
    with FakeOpenAI([error(status, f"Incorrect API key provided: {KEY}")]) as server:
        with pytest.raises(CriticAuthError, match=str(status)) as info:
            ask(template, server, "x", "y")
        assert len(server.requests) == 1
        shown = "".join(traceback.format_exception(info.value)) + repr(info.value)
        assert KEY not in shown
        assert info.value.__cause__ is None
        assert server.url in str(info.value)


def test_key_revoked_later_stops_but_a_moderated_text_does_not(template: PromptTemplate) -> None:
    with FakeOpenAI([completion("OK"), error(403), error(401)]) as server:
        critic = OpenAICritic(template, "m", base_url=server.url)
        (critique,) = critic.critique([CritiqueRequest("x")])
        assert (critique.status, critique.error) == ("failed", "HTTP 403")
        with pytest.raises(CriticAuthError, match="401"):
            critic.critique([CritiqueRequest("x")])


def test_server_down(template: PromptTemplate, no_key_in_logs: pytest.LogCaptureFixture) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    critic = OpenAICritic(template, "m", base_url=f"http://127.0.0.1:{port}/v1", max_retries=1, backoff=0.01)
    (critique,) = critic.critique([CritiqueRequest("x")])
    assert critique.status == "failed"
    assert "connection error" in str(critique.error)


def test_server_that_starts_late(template: PromptTemplate) -> None:
    with FakeOpenAI([error(503), completion(GOOD)]) as server:
        (critique,) = ask(template, server, "x")
        assert critique.status == "ok"


def test_missing_key(template: PromptTemplate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY")
    with pytest.raises(CriticAuthError, match="OPENAI_API_KEY"):
        OpenAICritic(template)
    with FakeOpenAI([completion(GOOD)]) as server:  # a local server needs none
        assert ask(template, server, "x")[0].status == "ok"


def test_key_and_password_are_not_shown(template: PromptTemplate, no_key_in_logs: pytest.LogCaptureFixture) -> None:
    critic = OpenAICritic(template, "m", base_url="http://user:secret@127.0.0.1:9/v1")
    assert KEY not in repr(critic) + repr(vars(critic)) + repr(vars(critic._client))
    assert "secret" not in no_key_in_logs.text
    assert "http://127.0.0.1:9/v1" in no_key_in_logs.text
