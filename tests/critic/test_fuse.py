import time
from pathlib import Path
from typing import Any

import pytest

from tests.fake_openai import Answer, FakeOpenAI, completion, error
from trl.critic.fuse import CriticFuseError, Fuse
from trl.critic.openai import OpenAICritic
from trl.critic.template import PromptTemplate
from trl.critic.types import Critique, CritiqueRequest

GOOD = "[Span 1]: a treat"


def after(*outcomes: str | None, seconds: float = 0.0) -> Fuse:
    fuse = Fuse(seconds)
    for outcome in outcomes:
        fuse.record(outcome)
    return fuse


def blown(fuse: Fuse) -> bool:
    try:
        fuse.check()
    except CriticFuseError:
        return True
    return False


@pytest.mark.parametrize(
    ("outcomes", "tripping"),
    [
        ([], False),
        (["x"] * 19, False),
        (["x"] * 20, True),
        ([None] * 4 + ["x"] * 16, False),  # 80 % is not more than 80 %
        ([None] * 4 + ["x"] * 17, True),
        ([None] * 20 + ["x"] * 80, False),
        ([None] * 20 + ["x"] * 81, True),
        ([None] * 1000 + ["x"] * 81, True),  # only the last hundred count
        (["x"] * 20 + [None], False),  # back again
        (["x"] * 100 + [None] + ["x"] * 10, False),
        (["x"] * 100 + [None] + ["x"] * 19, True),
    ],
)
def test_when_the_calls_are_bad(outcomes: list[str | None], tripping: bool) -> None:
    fuse = after(*outcomes)
    assert fuse.tripping == tripping
    assert blown(fuse) == tripping  # after no seconds at all


def test_a_bad_record_is_borne_until_the_time_is_over() -> None:
    fuse = after(*["x"] * 100, seconds=0.15)
    assert not blown(fuse)
    time.sleep(0.2)
    assert blown(fuse)


def test_a_success_starts_the_time_anew() -> None:
    fuse = after(*["x"] * 30, seconds=0.15)
    time.sleep(0.2)
    fuse.record(None)
    for _ in range(30):
        fuse.record("x")
    assert not blown(fuse)
    time.sleep(0.2)
    assert blown(fuse)


def test_time_alone_does_not_blow_it() -> None:
    fuse = after(None, *["x"] * 4, seconds=0.0)
    time.sleep(0.01)
    assert not blown(fuse)
    assert not blown(Fuse(0.0))


def test_the_error_counts_the_reasons() -> None:
    with pytest.raises(CriticFuseError, match=r"last 26 calls 25 failed: 20 x HTTP 500, 5 x no answer in 30 s"):
        after(None, *["HTTP 500"] * 20, *["no answer in 30 s"] * 5).check()
    with pytest.raises(ValueError, match="-1"):
        Fuse(-1)


# --- in the critic


class Endpoint(FakeOpenAI):
    """Answers well or with ``trouble``, as it is told."""

    def __init__(self) -> None:
        self.trouble: Answer | None = None
        super().__init__(lambda body: self.trouble or completion(GOOD))


class Run:
    def __init__(self, template: PromptTemplate, server: FakeOpenAI, **settings: Any) -> None:
        defaults: dict[str, Any] = {"max_retries": 0, "backoff": 0.001, "base_url": server.url}
        self.critic = OpenAICritic(template, "m", **(defaults | settings))
        self.server = server
        self.texts = iter(range(10_000))

    def step(self, batch: int = 8) -> tuple[list[Critique], int]:
        """Critiques of new texts, and how many requests that sent."""
        before = len(self.server.requests)
        critiques = self.critic.critique([CritiqueRequest(f"text {next(self.texts)}") for _ in range(batch)])
        return critiques, len(self.server.requests) - before


@pytest.fixture
def template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PromptTemplate:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    (tmp_path / "p.txt").write_text("{}")
    return PromptTemplate.from_file(tmp_path / "p.txt", style="sentiment")


def test_an_outage_is_probed_and_survived(template: PromptTemplate) -> None:
    with Endpoint() as server:
        run = Run(template, server, max_retries=1)
        assert run.step()[1] == 1 + 8
        server.trouble = error(500)
        sent = [run.step()[1] for _ in range(5)]
        assert sum(sent[:4]) == 4 * 16  # 40 calls' outcomes, 8 good ones: not more than 80 % bad until now
        critiques, count = run.step()
        assert count == 1  # one probe, without retries
        assert [c.status for c in critiques] == ["failed"] * 8
        assert [c.error for c in critiques] == ["HTTP 500"] + ["not asked: the critic's endpoint is failing"] * 7
        server.trouble = None
        critiques, count = run.step()
        assert count == 1
        assert [c.status for c in critiques] == ["ok"] + ["failed"] * 7
        critiques, count = run.step()
        assert count == 8
        assert [c.status for c in critiques] == ["ok"] * 8


def test_a_dead_endpoint_stops_the_run_with_its_reasons(template: PromptTemplate) -> None:
    with Endpoint() as server:
        run = Run(template, server, fuse_seconds=0.5)
        run.step()
        server.trouble = error(429)
        with pytest.raises(CriticFuseError, match=r"has not answered for .* x HTTP 429"):
            for _ in range(200):
                run.step()
                time.sleep(0.02)


def test_the_cache_goes_on_answering(template: PromptTemplate, tmp_path: Path) -> None:
    with Endpoint() as server:
        known = [CritiqueRequest(f"known {i}") for i in range(4)]
        first = Run(template, server, cache=tmp_path / "cache")
        first.critic.critique(known)
        server.trouble = error(500)
        run = Run(template, server, cache=tmp_path / "cache")
        for _ in range(3):
            run.step()
        before = len(server.requests)
        assert [c.status for c in run.critic.critique(known)] == ["ok"] * 4
        assert len(server.requests) == before


def test_a_spent_budget_blows_no_fuse(template: PromptTemplate) -> None:
    with Endpoint() as server:
        server.trouble = error(500)
        run = Run(template, server, fuse_seconds=0.05, budget_requests=24)
        for _ in range(2):
            run.step()
        time.sleep(0.1)
        with pytest.raises(CriticFuseError):
            run.step()
        run = Run(template, server, fuse_seconds=0.3, budget_requests=24)
        for _ in range(3):
            run.step()
        time.sleep(0.4)
        assert {c.status for c in run.step()[0]} == {"skipped", "failed"}
