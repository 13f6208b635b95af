"""The reward service: what is sent, what is read, which failures are retried and when, and which are final."""

import gzip
import json
import math
import time

import pytest

from tests.fake_openai import Answer, error
from tests.fake_reward import FakeReward, reward_reply
from tests.rewards.reward_configs import EXTRACT, service
from trl.rewards import RewardConfigError, load_reward
from trl.rewards.cloud_run import RETRIES, TOKEN_VARIABLE, CloudRunReward
from trl.rewards.endpoint import LONGEST_REPLY
from trl.rewards.scoring import Sample

TOKEN = "tok-not-for-eyes"


def test_the_request_is_the_published_one():
    config = {**service("?"), "parseResponseConfig": EXTRACT}
    with FakeReward(lambda body, nth: reward_reply(0.5, "looks fine")) as server:
        config["cloudRunRewardScorer"]["cloudRunUri"] = server.url
        with load_reward(config, tuning_job_id=7) as reward:
            columns = {
                "completions": ["it is <ans>Paris</ans>"],
                "prompts": ["Capital of France?"],
                "system_instruction": ["Be brief."],
                "references": [{"concise_answer": "Paris"}],
            }
            (result,) = reward.details(**columns, step=3)
            reward(**columns)
    assert result.reward == 0.5
    assert result.components[0].stages == {"aux info": "looks fine"}
    assert server.requests[0] == {
        "example": {
            "systemInstruction": {"role": "system", "parts": [{"text": "Be brief."}]},
            "contents": [{"role": "user", "parts": [{"text": "Capital of France?"}]}],
            "references": {"concise_answer": "Paris"},
        },
        "response": {"role": "model", "parts": [{"text": "Paris"}]},
        "metadata": {"step": 3, "tuning_job_id": 7},
    }
    assert server.requests[1]["metadata"]["step"] == 2  # calls are counted where no step is given
    assert "authorization" not in server.headers[0]


def test_whole_rows_are_sent_in_camel_case_but_for_the_keys_of_references():
    row = {
        "system_instruction": {"parts": [{"text": "x"}]},
        "contents": [{"role": "user", "parts": [{"text": "hi"}, {"file_data": {"mime_type": "a/b"}}]}],
        "references": {"snake_case": "kept"},
    }
    with FakeReward(lambda body, nth: reward_reply(1)) as server, load_reward(service(server.url)) as reward:
        assert reward(completions=["a"], examples=[row]) == [1.0]
    assert server.requests[0]["example"] == {
        "systemInstruction": {"parts": [{"text": "x"}]},
        "contents": [{"role": "user", "parts": [{"text": "hi"}, {"fileData": {"mimeType": "a/b"}}]}],
        "references": {"snake_case": "kept"},
    }


def test_conversations():
    prompt = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    with FakeReward(lambda body, nth: reward_reply(1)) as server, load_reward(service(server.url)) as reward:
        reward(completions=[[{"role": "assistant", "content": "d"}]], prompts=[prompt])
    example = server.requests[0]["example"]
    assert [(turn["role"], turn["parts"][0]["text"]) for turn in example["contents"]] == [
        ("user", "a"),
        ("model", "b"),
        ("user", "c"),
    ]
    assert example["systemInstruction"]["parts"] == [{"text": "S"}]
    assert server.requests[0]["response"]["parts"] == [{"text": "d"}]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (reward_reply("1"), "reward is a str, not a number"),
        (reward_reply(True), "reward is a bool, not a number"),
        (reward_reply(None), "reward is a NoneType, not a number"),
        (reward_reply(math.nan), "not finite"),
        (reward_reply(math.inf), "not finite"),
        (Answer(200, b'{"reward": 1' + b"0" * 400 + b"}"), "not finite"),
        (Answer(200, b'{"score": 1}'), "no reward"),
        (Answer(200, b"[1]"), "no reward"),
        (Answer(200, b""), "not JSON"),
        (Answer(200, b"<html>"), "not JSON"),
        (Answer(200, b"[" * 100_000), "not JSON"),
        (Answer(200, b'{"reward": 1, "x": "' + b"x" * 5_000_000 + b'"}'), f"more than {LONGEST_REPLY:,} bytes"),
        (error(400, f"bad token {TOKEN}"), "HTTP 400"),
        (error(404), "HTTP 404"),
        (Answer(200, gzip.compress(gzip.compress(b"0" * 10**8)), {"Content-Encoding": "gzip, gzip"}), "compressed"),
    ],
)
def test_what_is_no_reward_is_nan_with_its_reason_at_once(answer, reason):
    with FakeReward(lambda body, nth: answer) as server, load_reward(service(server.url)) as reward:
        (result,) = reward.details(completions=["a"])
    assert math.isnan(result.reward)
    assert reason in result.error
    assert TOKEN not in result.error
    assert len(server.requests) == 1


@pytest.mark.parametrize(("value", "expected"), [(3, 1.0), (-7.5, -1.0), (0, 0.0), (0.25, 0.25)])
def test_numbers_are_clipped(value, expected):
    with FakeReward(lambda body, nth: reward_reply(value)) as server, load_reward(service(server.url)) as reward:
        assert reward(completions=["a"]) == [expected]


def score(server: FakeReward, *texts: str, timeout: float = 5.0, backoff: float = 0.05):
    scorer = CloudRunReward(server.url, timeout=timeout, backoff=backoff)
    try:
        return scorer.score([Sample(text) for text in texts])
    finally:
        scorer.close()


FAULTS = {
    "500": error(500),
    "429": error(429),
    "cut": Answer(200, b'{"reward": 1}', cut_after=5),
    "slow": reward_reply(1.0, delay=1.0),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_passing_fault_is_retried_after_doubling_waits(fault):
    serve = lambda body, nth: FAULTS[fault] if nth <= 3 else reward_reply(0.5)  # noqa: E731
    with FakeReward(serve) as server:
        (verdict,) = score(server, "a", timeout=0.5)
    assert verdict.value == 0.5
    waits = [later - earlier for earlier, later in zip(server.times, server.times[1:], strict=False)]
    taken = 0.5 if fault == "slow" else 0.0
    for wait, least in zip(waits, (0.1, 0.2, 0.4), strict=True):
        assert least + taken <= wait + 0.01 < least + taken + 2


def test_a_lasting_fault_is_given_up_after_five_retries():
    with FakeReward(lambda body, nth: error(503)) as server:
        verdicts = score(server, "a", "b", backoff=0.01)
    assert all(math.isnan(verdict.value) for verdict in verdicts)
    assert verdicts[0].error == "the service gave no reward: HTTP 503"
    assert len(server.requests) == 2 * (RETRIES + 1)


def test_nobody_listens():
    scorer = CloudRunReward("http://127.0.0.1:9/", backoff=0.001)
    (verdict,) = scorer.score([Sample("a")])
    scorer.close()
    assert verdict.error == "the service gave no reward: connection error (ConnectError)"


def test_results_are_in_order_and_one_failure_costs_one_sample():
    def serve(body, _):
        text = body["response"]["parts"][0]["text"]
        return error(400) if text == "3" else reward_reply(int(text) / 10, delay=(9 - int(text)) / 50)

    with FakeReward(serve) as server, load_reward(service(server.url)) as reward:
        rewards = reward(completions=[str(n) for n in range(10)])
    assert rewards[:3] + rewards[4:] == [n / 10 for n in range(10) if n != 3]
    assert math.isnan(rewards[3])
    assert reward.errors == {"service: the service gave no reward: HTTP 400": 1}
    assert server.most_at_once > 4


@pytest.mark.parametrize("text", ["", "\x00\x1b[31m", "emoji 👩‍🔬 עברית", "\ud83d", "x" * 100_000])
def test_any_text_travels(text):
    with FakeReward(lambda body, nth: reward_reply(1)) as server, load_reward(service(server.url)) as reward:
        assert reward(completions=[text], prompts=[text]) == [1.0]
    assert server.requests[0]["response"]["parts"][0]["text"] == text


# --- where it may be, and the token


@pytest.mark.parametrize(
    "uri",
    [
        "http://rewards.example/score",
        "ftp://x",
        "rewards.example",
        "http://169.254.169.254/",
        "https://",
        "https://a\nb/",
        "https://user:secret@host:port/",
        "https://host:99999/",
    ],
)
def test_only_https_or_this_machine(uri):
    with pytest.raises(RewardConfigError, match="https") as caught:
        load_reward(service(uri))
    assert caught.value.path == "$.cloudRunRewardScorer.cloudRunUri"
    assert "secret" not in str(caught.value)


def test_plain_http_elsewhere_when_allowed_gets_no_token(monkeypatch, caplog):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    load_reward(service("http://rewards.example/score"), allow_http=True).close()
    assert f"{TOKEN_VARIABLE} is not sent" in caplog.text
    assert TOKEN not in caplog.text


def test_the_token_is_sent_and_never_shown(monkeypatch, caplog):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    caplog.set_level("DEBUG")

    def serve(body, nth):
        return Answer(401, json.dumps({"error": f"bad {TOKEN}"}).encode(), {"X-Echo": TOKEN})

    with FakeReward(serve) as server, load_reward(service(server.url)) as reward:
        (result,) = reward.details(completions=["a"])
        shown = f"{reward!r} {result!r} {vars(reward)!r}"
    assert server.headers[0]["authorization"] == f"Bearer {TOKEN}"
    assert result.error == "the service gave no reward: HTTP 401"
    assert TOKEN not in shown + caplog.text


def test_a_token_that_the_service_tells_about_is_not_shown(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with (
        FakeReward(lambda body, nth: reward_reply(1, f"you sent {TOKEN}")) as server,
        load_reward(service(server.url)) as reward,
    ):
        (result,) = reward.details(completions=["a"])
    assert result.components[0].stages == {"aux info": "you sent [token]"}


def test_a_number_that_json_does_not_know_is_sent_as_null():
    with FakeReward(lambda body, nth: reward_reply(1)) as server, load_reward(service(server.url)) as reward:
        reward(completions=["a"], references=[{"x": [math.nan, math.inf]}])
    assert server.requests[0]["example"]["references"] == {"x": [None, None]}


def test_redirects_are_not_followed(monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    with FakeReward(lambda body, nth: reward_reply(1)) as other:
        moved = Answer(307, b"{}", {"Location": other.url})
        with FakeReward(lambda body, nth: moved) as server, load_reward(service(server.url)) as reward:
            (result,) = reward.details(completions=["a"])
    assert "HTTP 307" in result.error
    assert other.requests == []


def test_the_local_work_goes_on_meanwhile():
    with (
        FakeReward(lambda body, nth: reward_reply(1, delay=0.5)) as server,
        load_reward(service(server.url)) as reward,
    ):
        begin = time.perf_counter()
        pending = reward.submit(completions=["a"])
        assert time.perf_counter() - begin < 0.3
        assert pending.result() == [1.0]
        assert pending.stats == {"reward/service": 1.0, "reward_failed/service": 0.0}
