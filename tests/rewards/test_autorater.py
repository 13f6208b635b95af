"""The LLM judge: the filled prompt, the parsed answer, the cache, and what an endpoint can do wrong."""

import json
import math
import time

import pytest

from tests.fake_openai import Answer, FakeOpenAI, completion, error
from tests.rewards.reward_configs import EXTRACT, composite, judge
from trl.clients import EndpointAuthError
from trl.rewards import JudgeSettings, RewardConfigError, load_reward

KEY = "sk-not-for-eyes"
YES = {"expression": "{{references.wanted}}", "correctAnswerReward": 1.0, "wrongAnswerReward": -0.5}
QUICK = JudgeSettings(backoff=0.01)


def ask(config, answers, *, settings=QUICK, timeout=None, nan_policy="strict", **columns):
    """(results, server) of one call."""
    columns.setdefault("completions", ["r"])
    with (
        FakeOpenAI(answers) as server,
        load_reward(config, base_url=server.url, judge=settings, timeout=timeout, nan_policy=nan_policy) as reward,
    ):
        return reward.details(**columns), server


def said(text):
    return lambda body: completion(text)


@pytest.mark.parametrize(
    ("answer", "expected"), [("0.5", 0.5), (" -1\n", -1.0), ("7", 1.0), ("-3.5", -1.0), ("1e-1", 0.1)]
)
def test_the_answer_is_the_reward(answer, expected):
    (result,), _ = ask(judge(), said(answer))
    assert result.reward == expected
    assert result.components[0].stages == {"judge's prompt": "Rate r", "judge's answer": answer}


@pytest.mark.parametrize("answer", ["", "good", "8/10", "nan", "inf", "1_0", None])
def test_an_answer_without_a_number_is_no_verdict(answer):
    (result,), _ = ask(judge(), said(answer))
    assert math.isnan(result.reward)
    assert result.error == "the judge's answer is not a number"


def test_the_part_of_the_answer_that_counts():
    config = judge(parse=EXTRACT)
    (result,), _ = ask(config, said("thinking <ans>0.1</ans> better: <ans>0.75</ans>"))
    assert result.reward == 0.75
    assert result.components[0].stages["parsed answer"] == "0.75"
    (result,), _ = ask(config, said("0.75"))
    assert math.isnan(result.reward)


def test_the_exact_match():
    columns = {"completions": ["a", "b", "c"], "references": [{"wanted": word} for word in ("Yes", "No", "<ans>")]}
    results, _ = ask(judge(parse=EXTRACT, exact=YES), said("hm <ans>Yes</ans>"), **columns)
    assert [result.reward for result in results] == [1.0, -0.5, -0.5]
    assert results[1].components[0].stages["expression"] == "No"
    results, _ = ask(judge(parse=EXTRACT, exact=YES), said("Yes"), **columns)  # nothing to extract: wrong
    assert [result.reward for result in results] == [-0.5] * 3


def test_every_placeholder_is_filled_once():
    prompt = "S={{system_instruction}} P={{prompt}} R={{response}} A={{references.a}} {{other}} {x}"
    (result,), server = ask(
        judge(prompt=prompt),
        said("1"),
        completions=["{{references.a}} {{prompt}}"],
        prompts=["{{response}}"],
        system_instruction=["{{system_instruction}}"],
        references=[{"a": "{{response}}", "unused": "secret"}],
    )
    sent = server.requests[0]["messages"]
    text = "S={{system_instruction}} P={{response}} R={{references.a}} {{prompt}} A={{response}} {{other}} {x}"
    assert sent == [{"role": "user", "content": text}]
    assert server.requests[0]["model"] == "judge-model"
    assert server.requests[0]["temperature"] == 0
    assert result.reward == 1.0


def test_several_turns_are_shown_with_their_roles():
    turns = [("user", "a"), ("assistant", "b"), ("user", "c")]
    prompt = [{"role": role, "content": content} for role, content in turns]
    _, server = ask(judge(prompt="{{prompt}}"), said("1"), prompts=[prompt])
    assert server.requests[0]["messages"][0]["content"] == "user: a\n\nmodel: b\n\nuser: c"


def test_the_response_is_parsed_before_the_judge_sees_it():
    config = {**judge(prompt="[{{response}}]"), "parseResponseConfig": EXTRACT}
    _, server = ask(config, said("1"), completions=["no <ans>4</ans>", "nothing"])
    assert sorted(body["messages"][0]["content"] for body in server.requests) == ["[4]", "[]"]


def test_a_reference_that_is_not_there_is_found_before_anything_is_asked():
    with FakeOpenAI(said("1")) as server:
        configs = composite(judge("a"), judge("b", "{{references.anser}}"), judge("c", exact=YES))
        with load_reward(configs, base_url=server.url) as reward:
            with pytest.raises(RewardConfigError, match=r"\{\{references.anser\}\} is not defined in row 2") as caught:
                reward(completions=["x", "y"], references=[{"anser": "1", "wanted": "1"}, {"answer": "1"}])
            assert caught.value.path == "$.weightedRewardConfigs[1].rewardConfig.autoraterScorer.autoraterPrompt"
            with pytest.raises(RewardConfigError) as caught:
                reward.check([{"anser": "1"}])
            assert caught.value.path.endswith("[2].rewardConfig.autoraterScorer.exactMatchScorer.expression")
    assert server.requests == []


def test_equal_prompts_are_asked_once_and_answers_are_kept(tmp_path):
    settings = JudgeSettings(cache=tmp_path, backoff=0.01)
    results, server = ask(judge(), said("0.5"), settings=settings, completions=["a", "a", "b"])
    assert [result.reward for result in results] == [0.5] * 3
    assert len(server.requests) == 2


def test_kept_answers_serve_later_runs_and_failures_are_not_kept(tmp_path):
    def answer(body):
        return error(400) if "bad" in body["messages"][0]["content"] else completion("0.5")

    settings = JudgeSettings(cache=tmp_path, backoff=0.01)
    with FakeOpenAI(answer) as server:
        for expected in (2, 3):
            with load_reward(judge(), base_url=server.url, judge=settings) as reward:
                good, bad = reward(completions=["good", "bad"])
            assert good == 0.5 and math.isnan(bad)
            assert len(server.requests) == expected  # the second time only what failed
        with load_reward(judge(model="other"), base_url=server.url, judge=settings) as reward:
            reward(completions=["good"])
        assert len(server.requests) == expected + 1


FAULTS = {
    "HTTP 401": error(401, f"bad key {KEY}"),
    "HTTP 400": error(400),
    "HTTP 500": error(500),
    "HTTP 429": error(429),
    "malformed reply": Answer(200, b"<html>"),
    "connection error": Answer(200, b'{"choices": []}', cut_after=4),
    "no answer in 0.2 s": completion("1", delay=1.0),
}


@pytest.mark.parametrize("reason", FAULTS)
def test_a_failing_endpoint_is_no_verdict_with_its_reason(monkeypatch, caplog, reason):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    settings = JudgeSettings(backoff=0.001, max_retries=1)
    timeout = 0.2 if reason.startswith("no answer") else None
    (result,), server = ask(judge(), lambda body: FAULTS[reason], settings=settings, timeout=timeout)
    assert math.isnan(result.reward)
    assert reason in result.error
    assert KEY not in repr(result) + caplog.text
    assert server.keys[0] == KEY
    final = {"HTTP 401", "HTTP 400", "malformed reply"}
    assert len(server.requests) == (1 if reason in final else 2)


@pytest.mark.parametrize("text", ["", "\x00\x1b[31m", "emoji 👩‍🔬 עברית", "half \ud83d", "x" * 100_000])
def test_any_text_travels(text):
    (result,), server = ask(judge(), said("1"), completions=[text])
    assert result.reward == 1.0
    assert server.requests[0]["messages"][0]["content"] == "Rate " + text.replace("\ud83d", "?")


def test_five_megabytes_are_no_number():
    (result,), _ = ask(judge(), said("1" * 5_000_000))
    assert math.isnan(result.reward)


def test_a_passing_fault_costs_nothing():
    (result,), server = ask(judge(), [error(500), error(429, retry_after="0"), completion("0.5")])
    assert result.reward == 0.5
    assert len(server.requests) == 3


def test_a_spent_budget():
    settings = JudgeSettings(budget_requests=1, max_concurrency=1)
    results, server = ask(judge(), said("1"), settings=settings, completions=["a", "b"])
    assert results[0].reward == 1.0
    assert "budget" in results[1].error
    assert len(server.requests) == 1


def test_rewards_with_the_same_model_share_its_places_on_the_wire():
    settings = JudgeSettings(max_concurrency=2)
    config = composite(*(judge(f"j{i}", f"{i} {{{{response}}}}") for i in range(4)))
    results, server = ask(config, lambda body: completion("1", delay=0.05), settings=settings, completions=["a", "b"])
    assert [result.reward for result in results] == [1.0, 1.0]
    assert server.most_at_once == 2


def test_no_key_and_no_endpoint(monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    with pytest.raises(EndpointAuthError, match="OPENAI_API_KEY"):
        load_reward(judge())


def test_the_endpoint_of_the_environment(monkeypatch):
    with FakeOpenAI(said("0.5")) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.url)
        with load_reward(judge()) as reward:
            assert reward(completions=["a"]) == [0.5]


def test_fields_of_vertex_ai_that_have_no_meaning_here_are_said(caplog):
    config = judge(prompt="{{respnse}} {{response}}")
    config["autoraterScorer"]["autoraterConfig"] |= {"samplingCount": 4, "generationConfig": {"temperature": 1}}
    (result,), _ = ask(config, said("1"))
    assert result.reward == 1.0
    assert "samplingCount, generationConfig not used" in caplog.text
    assert "{{respnse}} is no placeholder" in caplog.text


def test_sixty_answers_overlap():
    begin = time.perf_counter()
    results, server = ask(
        judge(), lambda body: completion("1", delay=0.2), completions=[json.dumps(i) for i in range(60)]
    )
    assert [result.reward for result in results] == [1.0] * 60
    assert server.most_at_once == 16
    assert time.perf_counter() - begin < 6  # 12 s one after the other
