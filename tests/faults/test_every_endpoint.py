"""The eight faults of an endpoint, against everything that asks one: the critic, a judge, and three kinds of reward."""

import contextlib
import math
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fake_openai import Answer, FakeOpenAI, error
from tests.rewards.reward_configs import judge
from trl.critic.openai import OpenAICritic
from trl.critic.template import PromptTemplate
from trl.critic.types import CritiqueRequest
from trl.rewards import ModerationReward, PerspectiveClient, load_reward
from trl.rewards.autorater import JudgeSettings
from trl.rewards.cloud_run import CloudRunReward
from trl.rewards.scoring import Sample

KEY = "sk-0123456789"
TIMEOUT = 0.4
QUICK = {"timeout": TIMEOUT, "max_retries": 1, "backoff": 0.01}
WHOLE = Answer(200, b'{"reward": 1, "choices": [], "results": [], "padding": "' + b"x" * 500 + b'"}')

FAULTS = {
    "down": None,
    "slow": Answer(200, b"{}", delay=1.5),
    "429": error(429, KEY),
    "500": error(500, KEY),
    "malformed JSON": Answer(200, b'{"reward": 1, "choices"'),
    "empty": Answer(200, b""),
    "5 MB": Answer(200, b'{"padding": "' + b"x" * 5_000_000 + b'"}'),
    "reset mid-body": Answer(200, WHOLE.body, cut_after=100, reset=True),
}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def ask_critic(url: str, folder: Path) -> tuple[bool, str | None]:
    (folder / "p.txt").write_text("{}")
    template = PromptTemplate.from_file(folder / "p.txt", style="sentiment")
    critic = OpenAICritic(template, "m", base_url=url, deadline=5.0, **QUICK)
    (answer,) = critic.critique([CritiqueRequest("a text")])
    critic.close()
    return answer.status == "failed", answer.error


def ask_judge(url: str, folder: Path) -> tuple[bool, str | None]:
    settings = JudgeSettings(backoff=QUICK["backoff"], max_retries=1)
    with load_reward(judge(), base_url=url, judge=settings, timeout=TIMEOUT) as reward:
        (result,) = reward.details(completions=["a text"])
    return math.isnan(result.reward), result.error


def ask_service(url: str, folder: Path) -> tuple[bool, str | None]:
    service = CloudRunReward(url, timeout=TIMEOUT, backoff=0.001)
    (verdict,) = service.score([Sample("a text")])
    service.close()
    return math.isnan(verdict.value), verdict.error


def ask_perspective(url: str, folder: Path) -> tuple[bool, str | None]:
    client = PerspectiveClient(KEY, endpoint=url, qps=500, **QUICK)
    (analysis,) = client.analyze(["a text"])
    client.close()
    return math.isnan(analysis.scores["TOXICITY"]), analysis.error


def ask_moderation(url: str, folder: Path) -> tuple[bool, str | None]:
    reward = ModerationReward(base_url=url, **QUICK)
    (score,) = reward(completions=["a text"])
    reward.close()
    return score is None, next(iter(reward.errors), None)


ASKED = {
    "critic": ask_critic,
    "judge": ask_judge,
    "reward service": ask_service,
    "Perspective": ask_perspective,
    "moderation": ask_moderation,
}


@contextlib.contextmanager
def serving(answer: Answer | None) -> Iterator[str]:
    """A server with this answer to everything; None: a port where nobody listens."""
    if answer is None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            yield f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
    else:
        with FakeOpenAI([answer]) as server:
            yield server.url


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("asked", ASKED)
def test_no_verdict_with_its_reason_and_without_the_key(
    asked: str, fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ask: Callable[[str, Path], tuple[bool, str | None]] = ASKED[asked]
    with serving(FAULTS[fault]) as url:
        is_without_verdict, reason = ask(url, tmp_path)
    assert is_without_verdict
    assert reason
    assert KEY not in reason + caplog.text
