import logging
import os
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fake_openai import Answer, FakeOpenAI, completion, error
from trl.clients import ChatClient
from trl.critic.openai import OpenAICritic
from trl.critic.template import PromptTemplate
from trl.critic.types import Critique, CritiqueRequest
from trl.limits import Budget, BudgetSpent, RateLimit, estimate_tokens, run_share

FOREVER = float("inf")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")


@pytest.fixture
def template(tmp_path: Path) -> PromptTemplate:
    (tmp_path / "p.txt").write_text("{}")
    return PromptTemplate.from_file(tmp_path / "p.txt", style="sentiment")


def ask(critic: OpenAICritic, *texts: str) -> list[Critique]:
    return critic.critique([CritiqueRequest(text) for text in texts])


# --- requests and tokens per minute


@settings(max_examples=200, deadline=None)
@given(
    requests=st.none() | st.integers(1, 5),
    tokens=st.none() | st.integers(1, 50),
    asked=st.lists(st.integers(0, 30), min_size=1, max_size=30),
)
def test_no_period_holds_more_than_the_limits(requests: int | None, tokens: int | None, asked: list[int]) -> None:
    period = 1000.0
    limit = RateLimit(requests, tokens, period=period)
    places = [limit.reserve(need, FOREVER) for need in asked]
    times = [place.at for place in places if place is not None]
    assert len(times) == len(asked)
    assert all(a <= b for a, b in pairwise(times))  # first come, first served
    for begin in times:
        inside = [need for at, need in zip(times, asked, strict=True) if begin <= at < begin + period - 1e-6]
        assert requests is None or len(inside) <= requests
        assert tokens is None or sum(inside) <= tokens or len([need for need in inside if need]) == 1


def test_no_request_waits_longer_than_it_must() -> None:
    limit = RateLimit(requests=3, period=100)
    now = time.monotonic()
    offsets = [round(place.at - now) for place in (limit.reserve(1, FOREVER) for _ in range(7)) if place]
    assert offsets == [0, 0, 0, 100, 100, 100, 200]
    limit = RateLimit(tokens=10, period=100)
    offsets = [round(place.at - now) for place in (limit.reserve(n, FOREVER) for n in (6, 4, 1, 9, 25, 1)) if place]
    assert offsets == [0, 0, 100, 100, 200, 300]


def test_a_place_after_the_deadline_is_not_taken() -> None:
    limit = RateLimit(requests=1, period=100)
    now = time.monotonic()
    assert limit.reserve(1, now + 50) is not None
    assert limit.reserve(1, now + 50) is None
    later = limit.reserve(1, now + 150)
    assert later is not None
    assert 99 < later.at - now < 101


def test_tokens_that_were_not_used_are_free_again() -> None:
    limit = RateLimit(tokens=10, period=100)
    now = time.monotonic()
    first = limit.reserve(9, FOREVER)
    assert first is not None
    first.tokens = 2
    second = limit.reserve(8, FOREVER)
    assert second is not None
    assert second.at - now < 1


def test_the_server_sees_no_more_requests_than_the_limit() -> None:
    with FakeOpenAI([completion("x")]) as server:
        client = ChatClient("m", base_url=server.url, rate=RateLimit(requests=4, period=0.6))
        assert all(reply.text == "x" for reply in client.complete([str(i) for i in range(10)]))
        client.close()
        begin = server.times[0]
        assert [int((at - begin + 0.05) / 0.6) for at in server.times] == [0] * 4 + [1] * 4 + [2] * 2


def test_retries_count() -> None:
    with FakeOpenAI([error(500), completion("x")]) as server:
        client = ChatClient("m", base_url=server.url, backoff=0.001, rate=RateLimit(requests=1, period=0.5))
        (reply,) = client.complete(["a"])
        assert (reply.text, reply.attempts) == ("x", 2)
        assert server.times[1] - server.times[0] > 0.45


def test_what_the_limits_hold_back_fails_at_once_and_is_not_held_against_the_endpoint(
    template: PromptTemplate,
) -> None:
    with FakeOpenAI([completion("[Span 1]: good", usage=(5, 5))]) as server:
        critic = OpenAICritic(template, "m", base_url=server.url, requests_per_minute=4, deadline=20, fuse_seconds=0)
        begin = time.monotonic()
        critiques = ask(critic, *(f"text {i}" for i in range(40)))
        assert time.monotonic() - begin < 10
        assert [c.status for c in critiques] == ["ok"] * 3 + ["failed"] * 37  # the preflight took a place
        assert "per minute" in str(critiques[-1].error)
        assert len(server.requests) == 4
        critic.critique([CritiqueRequest("again")])  # no fuse


def test_tokens_per_minute_over_http(template: PromptTemplate) -> None:
    with FakeOpenAI([completion("[Span 1]: good", usage=(100, 20))]) as server:
        critic = OpenAICritic(
            template, "m", base_url=server.url, tokens_per_minute=500, max_tokens=120, max_concurrency=1, deadline=5
        )
        critiques = ask(critic, *"abcdefgh")
        # as much as was really used counts: 120 each, the preflight's too, and the next may need 121
        assert [c.status for c in critiques] == ["ok"] * 3 + ["failed"] * 5


@pytest.mark.parametrize(("name", "value"), [("requests_per_minute", 0), ("tokens_per_minute", -1)])
def test_limits_that_allow_nothing(template: PromptTemplate, name: str, value: int) -> None:
    with pytest.raises(ValueError, match=str(value)):
        OpenAICritic(template, "m", base_url="http://127.0.0.1:9/v1", **{name: value})  # type: ignore[arg-type]


def test_parts_of_the_processes_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    for total in range(12):
        parts = []
        for rank in range(5):
            monkeypatch.setenv("RANK", str(rank))
            monkeypatch.setenv("WORLD_SIZE", "5")
            parts.append(run_share(total))
        assert sum(parts) == total
        assert max(parts) - min(parts) <= 1
    with pytest.raises(ValueError, match="5 process"):
        RateLimit.of_run(4, None)


WORKER = """
import sys
from trl.critic.openai import OpenAICritic
from trl.critic.template import PromptTemplate
from trl.critic.types import CritiqueRequest
url, prompt, keyword, value = sys.argv[1:]
template = PromptTemplate.from_file(prompt, style="sentiment")
critic = OpenAICritic(template, "m", base_url=url, deadline=20, max_concurrency=4, **{keyword: int(value)})
print(*[c.status for c in critic.critique([CritiqueRequest(f"text {i}") for i in range(30)])])
"""


@pytest.mark.parametrize(("keyword", "sent"), [("requests_per_minute", 7), ("budget_requests", 7 + 2)])
def test_two_processes_keep_one_limit(tmp_path: Path, template: PromptTemplate, keyword: str, sent: int) -> None:
    """Seven for the run: four and three; preflights count as requests, but not for the budget."""
    with FakeOpenAI(lambda body: completion("[Span 1]: good", delay=0.1)) as server:
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, server.url, str(tmp_path / "p.txt"), keyword, "7"],
                env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2"},
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        statuses = [status for worker in workers for status in worker.communicate(timeout=60)[0].split()]
        assert len(server.requests) == sent
        assert statuses.count("ok") == sent - 2
        assert statuses.count("skipped" if keyword == "budget_requests" else "failed") == 60 - (sent - 2)
        assert server.most_at_once <= 4  # concurrency is divided too


# --- budget


def test_budget_of_requests(template: PromptTemplate, caplog: pytest.LogCaptureFixture) -> None:
    with FakeOpenAI([completion("[Span 1]: good")]) as server:
        critic = OpenAICritic(template, "m", base_url=server.url, budget_requests=3)
        critiques = ask(critic, *"abcde")
        assert [c.status for c in critiques] == ["ok"] * 3 + ["skipped"] * 2
        assert "budget of 3 requests" in str(critiques[3].error)
        assert [c.status for c in ask(critic, *"fg")] == ["skipped"] * 2
        assert len(server.requests) == 1 + 3  # the preflight is free
        assert len([r for r in caplog.records if "budget" in r.getMessage()]) == 1


def test_retries_are_paid_from_the_budget(template: PromptTemplate) -> None:
    with FakeOpenAI([completion("OK"), error(500)]) as server:
        critic = OpenAICritic(template, "m", base_url=server.url, budget_requests=4, backoff=0.001, max_concurrency=1)
        first, second = ask(critic, *"ab")
        assert len(server.requests) == 1 + 4
        assert (first.status, second.status) == ("failed", "failed")
        assert str(first.error).startswith("the budget of 4 requests is spent; HTTP 500")


def test_cached_replies_are_free(template: PromptTemplate, tmp_path: Path) -> None:
    with FakeOpenAI([completion("[Span 1]: good")]) as server:
        critic = OpenAICritic(template, "m", base_url=server.url, budget_requests=2, cache=tmp_path / "cache")
        ask(critic, *"ab")
        assert [c.status for c in ask(critic, *"abc")] == ["ok", "ok", "skipped"]


def test_budget_in_dollars(template: PromptTemplate) -> None:
    with FakeOpenAI([completion("[Span 1]: good", usage=(1000, 100))]) as server:
        critic = OpenAICritic(template, "m", base_url=server.url, budget_usd=0.01, prices=(1.0, 2.0), max_tokens=200)
        critiques = [critique for text in "abcdefghijkl" for critique in ask(critic, text)]
        # each costs 0.0012; the ninth, expected to cost 0.0004, would be over
        assert [c.status for c in critiques] == ["ok"] * 8 + ["skipped"] * 4
        assert sum(c.call.usd for c in critiques if c.call and c.call.usd) == pytest.approx(8 * 0.0012)


def test_parallel_requests_do_not_overrun_the_dollars(template: PromptTemplate) -> None:
    with FakeOpenAI([completion("[Span 1]: good", usage=(1, 200), delay=0.05)]) as server:
        critic = OpenAICritic(template, "m", base_url=server.url, budget_usd=0.002, prices=(0, 2.0), max_tokens=200)
        assert [c.status for c in ask(critic, *"abcdefghij")].count("ok") == 5  # 0.0004 each
        assert len(server.requests) == 1 + 5


def test_tokens_are_estimated_where_the_server_does_not_count(template: PromptTemplate) -> None:
    with FakeOpenAI([completion("[Span 1]: good", usage=None)]) as server:
        critic = OpenAICritic(template, "m", base_url=server.url, prices=(1e6, 0))
        (critique,) = ask(critic, "x" * 400)
        assert critique.call is not None
        assert (critique.call.tokens_in, critique.call.usd) == (100, 100.0)
        assert critique.call.tokens_out == estimate_tokens("[Span 1]: good") == 4


@pytest.mark.parametrize("usage", [b'"usage": 3', b'"usage": {"prompt_tokens": "many"}', b'"usage": []'])
def test_odd_usage_is_no_usage(template: PromptTemplate, usage: bytes) -> None:
    body = completion("[Span 1]: good", usage=None).body[:-1] + b", " + usage + b"}"
    with FakeOpenAI([Answer(200, body)]) as server:
        (critique,) = ask(OpenAICritic(template, "m", base_url=server.url), "x" * 400)
        assert critique.status == "ok"
        assert critique.call is not None
        assert critique.call.tokens_in == 100


@settings(deadline=None)
@given(
    usd=st.floats(0, 1),
    work=st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000), st.booleans(), st.booleans())),
)
def test_costs_within_their_estimates_never_exceed_the_budget(usd: float, work: list[tuple[Any, ...]]) -> None:
    budget = Budget(usd=usd, prices=(500.0, 300.0))
    open_estimates: list[float] = []
    spent = 0.0
    for tokens_in, tokens_out, full_price, finish in work:
        estimate = budget.cost(tokens_in, tokens_out)
        assert estimate is not None
        try:
            budget.take(estimate)
        except BudgetSpent:
            continue
        open_estimates.append(estimate)
        if finish:
            taken = open_estimates.pop(0)
            spent += taken * full_price
            budget.settle(taken, taken * full_price)
    assert spent + sum(open_estimates) <= usd + 1e-9


def test_wrong_budgets(template: PromptTemplate) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"budget_usd": 1.0}, "prices"),
        ({"budget_requests": -1}, "budget_requests"),
        ({"budget_usd": -0.5, "prices": (1, 1)}, "budget_usd"),
        ({"prices": (1.0, -1.0)}, "prices"),
    ]
    for keywords, message in wrong:
        with pytest.raises(ValueError, match=message):
            OpenAICritic(template, "m", base_url="http://127.0.0.1:9/v1", **keywords)


def test_the_run_says_once_who_gets_its_prompts(template: PromptTemplate, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    OpenAICritic(template, "m", base_url="http://127.0.0.1:9/v1")
    assert len([r for r in caplog.records if "http://127.0.0.1:9/v1" in r.getMessage()]) == 1
