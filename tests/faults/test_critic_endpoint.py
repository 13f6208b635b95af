"""An endpoint that misbehaves in every way: what it costs a batch, what it costs a run, and where the key is not."""

import contextlib
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.critic.toy_tokenizers import tokenizer_of
from tests.fake_openai import Answer, FakeOpenAI, completion, error
from trl.builtin import resolve_model
from trl.critic.intrinsic import IntrinsicReward
from trl.critic.openai import CriticAuthError, OpenAICritic
from trl.critic.template import PromptTemplate
from trl.critic.types import Critique, CritiqueRequest
from trl.jsonl import read_jsonl

KEY = "sk-test-0123456789abcdef"
GOOD = "[Span 1]: great\n\nIdentified Negative Text Span:\nNone identified"
TOKENIZER = tokenizer_of("byte_level")
HUGE = GOOD + "\n\n##### " + "x" * 5_000_000
STUCK = "\n[Span 2]: " * 450_000


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture
def template(tmp_path: Path) -> PromptTemplate:
    (tmp_path / "p.txt").write_text("Which words?\n{}\nIdentified Positive Text Span:\n")
    return PromptTemplate.from_file(tmp_path / "p.txt", style="sentiment")


@pytest.fixture
def no_key_anywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Not in what any library logs, down to DEBUG, and in no file."""
    caplog.set_level(logging.DEBUG)
    yield
    records = caplog.get_records("call")
    assert records
    assert all(KEY not in logging.Formatter().format(record) for record in records)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"critiques.jsonl", "replies.sqlite"} <= {path.name for path in files}
    assert all(KEY.encode() not in path.read_bytes() for path in files)


def text_of(body: dict[str, Any]) -> str:
    return str(body["messages"][0]["content"])


def ids_of(text: str) -> torch.Tensor:
    return torch.tensor(TOKENIZER(text)["input_ids"])


# --- what one bad answer costs a batch

FAILED = {
    "500": error(500),
    "503-html": Answer(503, b"<html>busy</html>", {"Content-Type": "text/html"}),
    "429": error(429),
    "429-after-1s": error(429, retry_after="1"),
    "429-after-an-hour": error(429, retry_after="3600"),
    "429-after-nonsense": error(429, retry_after="soon"),
    "400": error(400, f"content filter; key {KEY}"),
    "413": Answer(413, b""),
    "moderated": error(403),
    "json-cut": Answer(200, completion(GOOD).body[:-20]),
    "not-json": Answer(200, b"{not json"),
    "null": Answer(200, b"null"),
    "text": Answer(200, b"ok", {"Content-Type": "text/plain"}),
    "empty-body": Answer(200, b""),
    "no-content": Answer(204, b""),
    "empty-choices": Answer(200, b'{"choices": []}'),
    "choices-null": Answer(200, b'{"choices": null}'),
    "content-list": Answer(200, b'{"choices": [{"message": {"content": ["great"]}}]}'),
    "error-with-200": Answer(200, b'{"error": {"message": "overloaded"}}'),
    "closed-mid-body": Answer(200, completion(GOOD).body, cut_after=30),
    "reset-mid-body": Answer(200, completion(GOOD).body, cut_after=30, reset=True),
    "reset-before-body": Answer(200, completion(GOOD).body, cut_after=0, reset=True),
    "slow": completion(GOOD, delay=2.0),
    "bad-gzip": Answer(200, b"no gzip", {"Content-Encoding": "gzip"}),
    "redirect-to-itself": Answer(307, b"", {"Location": "/v1/chat/completions"}),
}
UNPARSABLE = {
    "empty-reply": completion(""),
    "null-content": completion(None),
    "refusal": completion("I can't help with that."),
    "echo-of-the-key": completion(f"Your key is {KEY}."),
    "surrogate": completion("\ud800 \x00 \u202e"),
}
READ = {
    "huge": completion(HUGE),
    "stuck": completion("[Span 1]: great" + STUCK),
    "key-in-a-header": completion(GOOD, headers={"X-Comment": KEY}),
    "no-usage": completion(GOOD, usage=None),
}
TROUBLES = (
    [(name, answer, "failed") for name, answer in FAILED.items()]
    + [(name, answer, "unparsable") for name, answer in UNPARSABLE.items()]
    + [(name, answer, "ok") for name, answer in READ.items()]
)


@pytest.mark.parametrize(("answer", "status"), [t[1:] for t in TROUBLES], ids=[t[0] for t in TROUBLES])
@pytest.mark.usefixtures("no_key_anywhere")
def test_a_bad_answer_costs_its_sample_the_intrinsic_reward_and_nothing_else(
    template: PromptTemplate, tmp_path: Path, answer: Answer, status: str
) -> None:
    def answers(body: dict[str, Any]) -> Answer:
        return answer if "odd" in text_of(body) else completion(GOOD)

    with FakeOpenAI(answers) as server:
        critic = OpenAICritic(
            template,
            "m",
            base_url=server.url,
            cache=tmp_path / "cache",
            timeout=0.6,
            deadline=3.0,
            max_retries=1,
            backoff=0.01,
        )
        reward = IntrinsicReward(
            critic,
            TOKENIZER,
            "sentiment",
            threshold=1.0,
            positive_value=0.5,
            negative_value=-1.0,
            log_path=tmp_path / "critiques.jsonl",
        )
        responses = [ids_of(" was great"), ids_of(" odd, was great"), ids_of(" is so great")]
        begin = time.monotonic()
        pending = reward.submit([ids_of("The film")] * 3, responses, [0.0] * 3)
        rewards = pending.result()
        assert time.monotonic() - begin < 5
        critic.close()
    assert [critique.status for critique in pending.critiques] == ["ok", status, "ok"]
    assert [bool(r.any()) for r in rewards] == [True, status == "ok", True]
    assert pending.stats[f"critic/{status}"] == (3 if status == "ok" else 1)
    rows = read_jsonl(tmp_path / "critiques.jsonl")
    assert [row["status"] for row in rows] == ["ok", status, "ok"]
    assert [row["request"]["text"] for row in rows][1] == "The film odd, was great"
    for row, values in zip(rows, rewards, strict=True):
        assert row["rewards"] == pytest.approx(values.tolist())
    assert (tmp_path / "critiques.jsonl").stat().st_size < 1_000_000


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusing_endpoint_stops_before_anything_is_asked(template: PromptTemplate, status: int) -> None:
    with FakeOpenAI([error(status, f"Incorrect API key: {KEY}")]) as server:
        critic = OpenAICritic(template, "m", base_url=server.url)
        with pytest.raises(CriticAuthError) as raised:
            critic.critique([CritiqueRequest("a confidential text")])
        assert [text_of(body) for body in server.requests] == ["Say OK."]
        assert KEY not in str(raised.value) + repr(raised.value)


def test_no_server_at_all(template: PromptTemplate) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        critic = OpenAICritic(template, "m", base_url=url, max_retries=2, backoff=0.01)
        critiques = critic.critique([CritiqueRequest(str(i)) for i in range(20)])
    assert {c.status for c in critiques} == {"failed"}
    assert {c.call.requests for c in critiques if c.call} == {3}


def test_a_server_that_accepts_and_never_answers(template: PromptTemplate) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        critic = OpenAICritic(template, "m", base_url=url, timeout=0.3, deadline=1.0, backoff=0.01)
        begin = time.monotonic()
        critiques = critic.critique([CritiqueRequest(str(i)) for i in range(40)])
        assert time.monotonic() - begin < 3
    assert {c.status for c in critiques} == {"failed"}


LEAVER = """
import sys, torch
from tests.critic.toy_tokenizers import tokenizer_of
from trl.critic import IntrinsicReward, OpenAICritic, PromptTemplate
url, prompt = sys.argv[1:]
tokenizer = tokenizer_of("byte_level")
critic = OpenAICritic(PromptTemplate.from_file(prompt, style="sentiment"), "m", base_url=url)
reward = IntrinsicReward(critic, tokenizer, "sentiment", threshold=1, positive_value=1, negative_value=-1)
ids = torch.tensor(tokenizer("The film was great")["input_ids"])
reward.submit([ids], [ids], [0.0])
print("submitted", flush=True)
raise RuntimeError("something else went wrong")
"""


def test_a_process_that_fails_elsewhere_does_not_wait_for_the_critic(template: PromptTemplate, tmp_path: Path) -> None:
    """Else the other processes of the run would sit in a collective for as long."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1"
        command = [sys.executable, "-c", LEAVER, url, str(tmp_path / "p.txt")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "submitted\n"
        _, stderr = process.communicate(timeout=20)
    assert process.returncode == 1
    assert stderr.strip().endswith("RuntimeError: something else went wrong")


def test_retry_after_as_a_date(template: PromptTemplate) -> None:
    when = datetime.now(UTC) + timedelta(seconds=3)
    date = format_datetime(when, usegmt=True)
    with FakeOpenAI([completion("OK"), error(429, retry_after=date), completion(GOOD)]) as server:
        critic = OpenAICritic(template, "m", base_url=server.url, backoff=0.01)
        (critique,) = critic.critique([CritiqueRequest("x")])
        assert critique.status == "ok"
        assert server.times[2] - server.times[1] > 1.0


# --- parameters that the endpoint does not know


class Picky(FakeOpenAI):
    """A server that refuses requests with any of ``refused``, one complaint at a time."""

    def __init__(self, refused: dict[str, Answer]) -> None:
        def answer(body: dict[str, Any]) -> Answer:
            for name, complaint in refused.items():
                if name in body:
                    return complaint
            return completion(GOOD, delay=0.02)

        super().__init__(answer)


def ask(template: PromptTemplate, server: FakeOpenAI, count: int = 6) -> list[Critique]:
    critic = OpenAICritic(template, "m", base_url=server.url, max_tokens=77)
    return critic.critique([CritiqueRequest(f"text {i}") for i in range(count)])


RENAME = "Unsupported parameter: 'max_tokens' is not supported with this model. Use 'max_completion_tokens' instead."
DEFAULT = "Unsupported value: 'temperature' does not support 0 with this model. Only the default (1) is supported."
EXTRA = {"detail": [{"type": "extra_forbidden", "loc": ["body", "stop"], "msg": "Extra inputs are not permitted"}]}


def test_unsupported_parameters_are_left_out_or_renamed_once(
    template: PromptTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    refused = {
        "max_tokens": error(400, RENAME, param="max_tokens"),
        "temperature": error(400, DEFAULT),
        "stop": Answer(422, json.dumps(EXTRA).encode()),
    }
    with Picky(refused) as server:
        assert {c.status for c in ask(template, server)} == {"ok"}
        assert len(server.requests) == 3 + 1 + 6  # learnt from the preflight
        last = server.requests[-1]
        assert last["max_completion_tokens"] == 77
        assert not refused.keys() & last.keys()
    messages = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(messages) == 3
    for name, message in zip(refused, messages, strict=True):
        assert name in message


def test_requests_under_way_learn_it_together(template: PromptTemplate, caplog: pytest.LogCaptureFixture) -> None:
    complaint = error(400, "temperature is not supported")

    def answer(body: dict[str, Any]) -> Answer:
        if text_of(body) == "Say OK.":
            return error(503)  # so that the preflight learns nothing
        return complaint if "temperature" in body else completion(GOOD)

    with FakeOpenAI(answer) as server:
        assert {c.status for c in ask(template, server)} == {"ok"}
        assert len(server.requests) <= 1 + 2 * 6
    assert len([r for r in caplog.records if "temperature" in r.getMessage()]) == 1


@pytest.mark.parametrize(
    "complaint",
    [
        error(400, "max_tokens is too large: 77"),
        error(400, "unsupported content; please stop", param="messages"),
        error(400, "Unknown model architecture"),
        error(400),
        Answer(400, b"temperature"),
        Answer(400, b"[]"),
    ],
    ids=range(6),
)
def test_other_complaints_change_nothing(template: PromptTemplate, complaint: Answer) -> None:
    with FakeOpenAI([completion("OK"), complaint, completion(GOOD)]) as server:
        statuses = sorted(c.status for c in ask(template, server, count=2))
        assert statuses == ["failed", "ok"]
        assert len(server.requests) == 3
        assert all({"max_tokens", "temperature", "stop"} <= body.keys() for body in server.requests)


def test_a_parameter_that_stays_refused_is_a_failure(template: PromptTemplate) -> None:
    complaint = error(400, "temperature, stop, max_tokens, max_completion_tokens: not supported")
    with FakeOpenAI([complaint]) as server:
        assert {c.status for c in ask(template, server)} == {"failed"}
        assert len(server.requests) < 4 + 6 + 1


# --- a real server with a real model


@contextlib.contextmanager
def serving(model: Path, log_file: Path) -> Iterator[tuple[str, str]]:
    """URL and model name of a model folder behind ``transformers serve``."""
    pytest.importorskip("fastapi", reason="needs transformers[serving]")
    pytest.importorskip("uvicorn", reason="needs transformers[serving]")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # the console script's function: the script itself need not be on PATH
    start = "from transformers.cli.transformers import main; main()"
    where = ["--device", "cpu", "--host", "127.0.0.1", "--port", str(port)]
    command = [sys.executable, "-c", start, "serve", str(model), *where]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with log_file.open("w") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        for _ in range(600):
            time.sleep(0.1)
            assert process.poll() is None, log_file.read_text()[-2000:]
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
        yield f"http://127.0.0.1:{port}/v1", str(model)
    finally:
        process.terminate()
        process.wait(timeout=20)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """A tiny random model, served."""
    from tests.tiny import tiny_llama, tiny_tokenizer

    folder = tmp_path_factory.mktemp("served")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tiny_llama(layers=1).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with serving(folder / "model", folder / "log") as address:
        yield address


def test_a_real_server(template: PromptTemplate, served: tuple[str, str], tmp_path: Path) -> None:
    url, model = served
    critic = OpenAICritic(template, model, base_url=url, max_tokens=5, timeout=60, cache=tmp_path / "cache")
    asked = [CritiqueRequest(text) for text in ("It was great.", "It was bad.", "It was great.")]
    critiques = critic.critique(asked)
    # a random model babbles: what counts is that its words arrive, the same for the same text
    assert {c.status for c in critiques} <= {"unparsable", "ok", "none"}
    assert all(c.reply is not None for c in critiques)
    assert critiques[0].reply == critiques[2].reply
    call = critiques[0].call
    assert call is not None
    assert call.requests == 1
    assert call.tokens_in > 10
    assert 0 < call.tokens_out <= 5
    assert [c.reply for c in critic.critique(asked)] == [c.reply for c in critiques]


@pytest.mark.builtin
def test_the_built_in_model_behind_a_real_server(tmp_path: Path) -> None:
    """The shipped prompt, a real chat model and the real client: words arrive, and the whole way runs."""
    template = PromptTemplate.from_file("prompts/prompt_sentiment_3shot_v2.txt", style="sentiment")
    text = "The cast is wonderful, but the plot is a boring mess."
    with serving(Path(resolve_model("builtin:smollm2")), tmp_path / "log") as (url, model):
        critic = OpenAICritic(template, model, base_url=url, max_tokens=24, timeout=120, deadline=240)
        [critique] = critic.critique([CritiqueRequest(text)])
    assert critique.status in ("ok", "none", "unparsable")
    assert critique.reply
    assert critique.call is not None
    assert critique.call.tokens_in > 200  # the shots and the text
