"""A proxy that the environment names is not asked for addresses of this machine."""

import pytest

from tests.fake_openai import FakeOpenAI, completion
from tests.fake_reward import FakeReward, reward_reply
from trl.clients import ChatClient
from trl.loopback import is_loopback
from trl.rewards.cloud_run import CloudRunReward
from trl.rewards.scoring import Sample

DEAD = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def dead_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, DEAD)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("by", ["argument", "environment"])
def test_a_local_llm_is_reached(monkeypatch: pytest.MonkeyPatch, by: str) -> None:
    with FakeOpenAI([completion("hello")]) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url if by == "environment" else DEAD)
        client = ChatClient("m", base_url=server.url if by == "argument" else None, max_retries=0)
        assert [reply.text for reply in client.complete(["hi"])] == ["hello"]
        client.close()


def test_a_local_reward_service_is_reached() -> None:
    with FakeReward(lambda body, nth: reward_reply(0.5)) as server:
        reward = CloudRunReward(server.url)
        assert [verdict.value for verdict in reward.score([Sample("a")])] == [0.5]
        reward.close()


def test_other_machines_are_still_asked_through_it() -> None:
    client = ChatClient("m", base_url="http://host.invalid/v1", max_retries=0, timeout=5)
    (reply,) = client.complete(["hi"])
    client.close()
    assert reply.error is not None and "connection error" in reply.error  # the proxy is dead


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("http://127.8.9.1", True),
        ("http://[::1]:8000", True),
        ("http://user:word@localhost/v1", True),
        ("http://10.0.0.1", False),
        ("https://localhost.example.com", False),
        ("https://api.openai.com/v1", False),
        ("", False),
    ],
)
def test_what_is_this_machine(url: str, expected: bool) -> None:
    assert is_loopback(url) is expected
