"""Composites: the total, what missing rewards do to it, order, and waiting side by side."""

import math
import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_openai import FakeOpenAI, completion, error
from tests.fake_reward import FakeReward, reward_reply
from tests.rewards.reward_configs import composite, judge, service, snippet, string_match
from trl.rewards import load_reward
from trl.rewards.composite import weighted_mean
from trl.rewards.config_file import sum_is_zero
from trl.rewards.scoring import clipped

NAN = math.nan
NUMBER = 'def evaluate(example, response):\n    return int(response["parts"][0]["text"]) / 10\n'
numbers = st.floats(-1, 1)
weights = st.one_of(st.floats(-10, 10), st.floats(allow_nan=False, allow_infinity=False))


def test_the_total_is_the_weighted_mean():
    config = composite(
        string_match("right"), string_match("long", "REGEX_CONTAINS", ".{5}", wrong=0.0), weights=[3.0, 1.0]
    )
    with load_reward(config) as reward:
        assert reward.names == ("right", "long")
        columns = {"completions": ["4", "four and", "5"], "references": [{"answer": "4"}] * 3}
        assert reward(**columns) == [0.75, -0.5, -0.75]


def test_rewards_are_clipped_before_the_total():
    with load_reward(composite(string_match("a", correct=9), string_match("b", correct=0))) as reward:
        assert reward(completions=["4"], references=[{"answer": "4"}]) == [0.5]


@pytest.fixture
def gone():
    """A reward that never has a verdict."""
    with FakeReward(lambda body, nth: error(400)) as server:
        yield service(server.url, "gone")


@pytest.mark.parametrize(
    ("policy", "expected"), [("strict", [NAN, NAN]), ("renormalise", [1.0, -1.0])], ids=["strict", "renormalise"]
)
def test_a_missing_reward(policy, expected, gone):
    config = composite(string_match("right"), gone, weights=[1.0, 3.0])
    with load_reward(config, nan_policy=policy) as reward:
        results = reward.details(completions=["4", "5"], references=[{"answer": "4"}] * 2)
    assert [result.reward for result in results] == pytest.approx(expected, nan_ok=True)
    assert math.isnan(results[0].components[1].reward)
    reason = "gone: the service gave no reward: HTTP 400"
    assert [result.error for result in results] == ([reason] * 2 if policy == "strict" else [None, None])


@pytest.mark.parametrize("policy", ["strict", "renormalise"])
def test_nothing_left_is_no_reward_under_either_policy(policy, gone):
    with load_reward(composite(gone, {**gone, "rewardName": "too"}), nan_policy=policy) as reward:
        (result,) = reward.details(completions=["4"])
    assert math.isnan(result.reward)
    assert result.error == "gone: the service gave no reward: HTTP 400; too: the service gave no reward: HTTP 400"


def test_weights_of_what_is_left_that_cancel(gone):
    config = composite(string_match("a"), string_match("b"), gone, weights=[1.0, -1.0, 1.0])
    with load_reward(config, nan_policy="renormalise") as reward:
        (result,) = reward.details(completions=["4"], references=[{"answer": "4"}])
    assert math.isnan(result.reward)
    assert "gone: " in result.error


def test_no_samples():
    with load_reward(composite(string_match("a"), string_match("b"))) as reward:
        assert reward(completions=[]) == []
        assert reward.submit(completions=[], references=[]).stats == {}


def test_sixteen_with_mixed_backends_take_as_long_as_the_slowest_and_keep_order():
    """6 judges, 5 services, 4 string matches and a snippet; a judge or service takes 1 s per answer: alone 11 s."""
    delay, samples = 1.0, 8
    texts = [str(number) for number in range(samples)]

    def rate(body):
        number = int(body["messages"][0]["content"].removeprefix("Rate "))
        return completion(str(number / 10), delay=delay)

    def serve(body, _):
        return reward_reply(int(body["response"]["parts"][0]["text"]) / 10, delay=delay)

    with FakeOpenAI(rate) as llm, FakeReward(serve) as remote:
        configs = [judge(f"judge {i}", model=f"model-{i}") for i in range(6)]
        configs += [service(remote.url, f"service {i}") for i in range(5)]
        configs += [snippet(NUMBER)]
        configs += [string_match(f"match {i}", "REGEX_CONTAINS", f"^{i}$", wrong=0.0) for i in range(4)]
        with load_reward(composite(*configs), base_url=llm.url) as reward:
            reward(completions=["0"])  # starts the processes
            begin = time.perf_counter()
            results = reward.details(completions=texts)
            took = time.perf_counter() - begin
    for number, result in enumerate(results):
        matched = [1.0 if number == i else 0.0 for i in range(4)]
        assert [each.reward for each in result.components] == [number / 10] * 12 + matched
        assert result.reward == pytest.approx((number / 10 * 12 + sum(matched)) / 16)
    assert llm.most_at_once >= 6 and remote.most_at_once >= 5
    assert took < 4 * delay


# --- properties


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_clipping(value):
    result = clipped(value)
    assert math.isnan(result) if math.isnan(value) else -1 <= result <= 1
    assert result == value or math.isnan(value) or abs(value) > 1


@given(st.lists(st.tuples(st.one_of(numbers, st.just(NAN)), weights), max_size=16))
def test_nan_policies(pairs):
    rewards, given_weights = [r for r, _ in pairs], [w for _, w in pairs]
    left = [(r, w) for r, w in pairs if not math.isnan(r)]
    strict = weighted_mean(rewards, given_weights, "strict")
    renormalised = weighted_mean(rewards, given_weights, "renormalise")
    if len(left) < len(pairs):
        assert math.isnan(strict)
    else:
        assert strict == pytest.approx(renormalised, nan_ok=True)
    if sum_is_zero([w for _, w in left]):
        assert math.isnan(renormalised)
    else:
        exact = sum(Fraction(r) * Fraction(w) for r, w in left) / sum(Fraction(w) for _, w in left)
        assert renormalised == pytest.approx(float(exact), rel=1e-5, abs=1e-5)


@given(st.lists(st.tuples(numbers, st.floats(0, 10)), min_size=1, max_size=16))
def test_a_mean_with_positive_weights_lies_between_its_rewards(pairs):
    rewards, given_weights = [r for r, _ in pairs], [w for _, w in pairs]
    total = weighted_mean(rewards, given_weights, "strict")
    if not math.isnan(total):
        assert min(rewards) - 1e-9 <= total <= max(rewards) + 1e-9


def test_failures_are_told_from_a_reward_of_their_name(gone):
    """``a_failed`` would be the name of a's failures, too."""
    config = composite(string_match("a"), string_match("a_failed", correct=0.25), gone)
    with load_reward(config) as reward:
        stats = reward.submit(completions=["4", "5"], references=[{"answer": "4"}] * 2).stats
    assert stats["reward/a"] == 0.0 and stats["reward_failed/a"] == 0.0
    assert stats["reward/a_failed"] == pytest.approx(-0.375) and stats["reward_failed/a_failed"] == 0.0
    assert math.isnan(stats["reward/gone"]) and stats["reward_failed/gone"] == 1.0
