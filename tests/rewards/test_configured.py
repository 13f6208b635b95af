"""Configurations: what is refused and where, files, the call convention, overlap, and the fuse."""

import json
import math
import re
import threading
from pathlib import Path

import pytest
import yaml

from tests.fake_openai import FakeOpenAI, completion, error
from tests.fake_reward import FakeReward, reward_reply
from tests.rewards.reward_configs import EXTRACT, composite, judge, match, service, snippet, string_match
from trl.jsonl import DataFileError
from trl.rewards import RewardConfigError, RewardGoneError, load_reward

GOOD = string_match()
RULE = GOOD["stringMatchRewardScorer"]["stringMatchExpression"]


def scorer(**changes):
    return {"rewardName": "r", "stringMatchRewardScorer": {**GOOD["stringMatchRewardScorer"], **changes}}


def without(config, *keys):
    return {name: value for name, value in config.items() if name not in keys}


def autorater(**changes):
    return {"rewardName": "r", "autoraterScorer": {**judge()["autoraterScorer"], **changes}}


IN = "$.weightedRewardConfigs"
REFUSED = {
    "not an object": ([], "$", "expected an object, got []"),
    "empty": ({}, "$.rewardName", "missing"),
    "no name": (without(GOOD, "rewardName"), "$.rewardName", "missing"),
    "blank name": ({**GOOD, "rewardName": ""}, "$.rewardName", "at least 1 character"),
    "no scorer": ({"rewardName": "r"}, "$", "expected exactly one of stringMatchRewardScorer"),
    "two scorers": ({**GOOD, **service("https://x")}, "$", "got stringMatchRewardScorer and cloudRunRewardScorer"),
    "unknown field": ({**GOOD, "reward": 1}, "$.reward", "unknown field; expected rewardName, parseResponseConfig"),
    "unknown field in a composite": (
        {**composite(GOOD), "x": 1},
        "$.x",
        "unknown field; expected weightedRewardConfigs",
    ),
    "misspelt field": (
        composite(GOOD, scorer(wrongAnswerRewards=0)),
        f"{IN}[1].rewardConfig.stringMatchRewardScorer.wrongAnswerRewards",
        "unknown field; expected correctAnswerReward, wrongAnswerReward",
    ),
    "no reward of wrong answers": (
        {"rewardName": "r", "stringMatchRewardScorer": without(GOOD["stringMatchRewardScorer"], "wrongAnswerReward")},
        "$.stringMatchRewardScorer.wrongAnswerReward",
        "missing",
    ),
    "a number as text": (scorer(correctAnswerReward="1"), "$.stringMatchRewardScorer.correctAnswerReward", "got '1'"),
    "NaN": (scorer(correctAnswerReward=math.nan), "$.stringMatchRewardScorer.correctAnswerReward", "finite"),
    "text as a number": (
        scorer(stringMatchExpression=match("EXACT_MATCH", 42)),
        "$.stringMatchRewardScorer.stringMatchExpression.expression",
        "valid string, got 42",
    ),
    "no expression": (scorer(stringMatchExpression=None), "$.stringMatchRewardScorer", "got none"),
    "two expressions": (
        scorer(jsonMatchExpression={"keyName": "k", "valueStringMatchExpression": RULE}),
        "$.stringMatchRewardScorer",
        "got stringMatchExpression and jsonMatchExpression",
    ),
    "unknown operation": (
        scorer(stringMatchExpression=match("MATCH_OPERATION_UNSPECIFIED", "x")),
        "$.stringMatchRewardScorer.stringMatchExpression.matchOperation",
        "'EXACT_MATCH', 'PARTIAL_MATCH' or 'REGEX_CONTAINS'",
    ),
    "bad regex": (
        composite(string_match("a", "REGEX_CONTAINS", "({{references.answer}}")),
        f"{IN}[0].rewardConfig.stringMatchRewardScorer.stringMatchExpression",
        "missing )",
    ),
    "bad regex in JSON": (
        string_match("a", "REGEX_CONTAINS", "[", key="k"),
        "$.stringMatchRewardScorer.jsonMatchExpression.valueStringMatchExpression",
        "unterminated character set",
    ),
    "bad regex to extract": (
        {**GOOD, "parseResponseConfig": {"parseType": "REGEX_EXTRACT", "regexExtractExpression": r"\p{L}"}},
        "$.parseResponseConfig.regexExtractExpression",
        r"bad escape \p",
    ),
    "nothing to extract": (
        {**GOOD, "parseResponseConfig": {"parseType": "REGEX_EXTRACT"}},
        "$.parseResponseConfig",
        "expected regexExtractExpression",
    ),
    "extraction that is off": (
        {**GOOD, "parseResponseConfig": {"parseType": "IDENTITY", "regexExtractExpression": "x"}},
        "$.parseResponseConfig",
        "expected parseType REGEX_EXTRACT",
    ),
    "bad regex of a judge": (
        autorater(autoraterResponseParseConfig={"parseType": "REGEX_EXTRACT", "regexExtractExpression": "("}),
        "$.autoraterScorer.autoraterResponseParseConfig.regexExtractExpression",
        "missing )",
    ),
    "judge without a model": (
        autorater(autoraterConfig={}),
        "$.autoraterScorer.autoraterConfig.autoraterModel",
        "missing",
    ),
    "judge without a reading": (
        autorater(parsedResponseConversionScorer=None),
        "$.autoraterScorer",
        "parsedResponseConversionScorer, exactMatchScorer; got none",
    ),
    "a conversion with fields": (
        autorater(parsedResponseConversionScorer={"scale": 2}),
        "$.autoraterScorer.parsedResponseConversionScorer.scale",
        "unknown field",
    ),
    "service without address": (
        {"rewardName": "r", "cloudRunRewardScorer": {}},
        "$.cloudRunRewardScorer.cloudRunUri",
        "missing",
    ),
    "syntax error": (
        composite(GOOD, snippet("def evaluate(example, response):\n  return (")),
        f"{IN}[1].rewardConfig.codeExecutionRewardScorer.pythonCodeSnippet",
        "line 2",
    ),
    "no rewards": ({"weightedRewardConfigs": []}, IN, "expected 1 to 16 rewards, got 0"),
    "seventeen": (composite(*(string_match(f"r{i}") for i in range(17))), IN, "expected 1 to 16 rewards, got 17"),
    "no weight": ({"weightedRewardConfigs": [{"rewardConfig": GOOD}]}, f"{IN}[0].weight", "missing"),
    "equal names": (composite(GOOD, GOOD), f"{IN}[1].rewardConfig.rewardName", "'right' is the name of"),
    "weights that cancel": (
        composite(*(string_match(f"r{i}") for i in range(3)), weights=[0.1, 0.2, -0.3]),
        IN,
        "the weights sum to 0",
    ),
    "weights of zero": (composite(GOOD, weights=[0.0]), IN, "the weights sum to 0"),
    "wrapped": ({"singleRewardConfig": {**GOOD, "x": 1}}, "$.singleRewardConfig.x", "unknown field"),
}


_ALIASES = "[&a0 [x, x, x, x, x, x, x, x, x]" + "".join(
    f", &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 15)
)


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.json", '{"rewardName": "a", "rewardName": "b"}', "'rewardName' is given twice"),
        ("a.json", '{"weightedRewardConfigs": [{"weight": 1, "weight": 2}]}', "'weight' is given twice"),
        ("a.yaml", "rewardName: a\nrewardName: b\n", "'rewardName' is given twice"),
        ("a.yaml", "x: {rewardName: a, rewardName: b}\n", "'rewardName' is given twice"),
        ("a.yaml", f"rewardName: {_ALIASES}]\n", "more than 100,000 values"),
        ("a.yaml", f"{_ALIASES}]\n", "more than 100,000 values"),
        ("a.yaml", "rewardName: &a [*a]\n", "more than 100,000 values"),
        ("a.json", '{"rewardName": [' + "1," * 1000 + "1]}", "should be a valid string, got [1, 1, "),
    ],
)
def test_files_that_mislead(tmp_path, name, content, problem):
    """A key given twice, of which parsers take the last; a few lines that stand for 9^15 values; a list in itself."""
    (tmp_path / name).write_text(content)
    with pytest.raises(RewardConfigError, match=re.escape(problem)) as caught:
        load_reward(tmp_path / name)
    assert len(str(caught.value)) < 300


def test_anchors_serve_to_share_what_rewards_have_in_common(tmp_path):
    (tmp_path / "a.yaml").write_text(
        "weightedRewardConfigs:\n"
        "- {weight: 1, rewardConfig: &first {rewardName: a, stringMatchRewardScorer: {correctAnswerReward: 1,\n"
        "    wrongAnswerReward: 0, stringMatchExpression: {matchOperation: EXACT_MATCH, expression: x}}}}\n"
        "- {weight: 1, rewardConfig: {<<: *first, rewardName: b}}\n"
    )
    with load_reward(tmp_path / "a.yaml") as reward:
        assert reward.names == ("a", "b")
        assert reward(["x", "y"]) == [1.0, 0.0]


def test_what_looks_like_a_placeholder_and_is_none_is_said(caplog):
    load_reward(string_match(expression="{{reference.answer}} {{prompt}}")).close()
    for name in ("reference.answer", "prompt"):
        assert f"stringMatchExpression.expression: {{{{{name}}}}} is no placeholder" in caplog.text


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_said_with_its_path(case, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9")
    config, path, problem = REFUSED[case]
    file = tmp_path / "reward.json"
    file.write_text(json.dumps(config))
    with pytest.raises(RewardConfigError) as caught:
        load_reward(file)
    assert caught.value.path == path
    assert str(caught.value).startswith(f"{file}: {path}: ")
    assert problem in str(caught.value)


def test_broken_files(tmp_path):
    for name, content in {
        "a.json": b"{",
        "b.yaml": b"a: [",
        "c.json": b"\xff\xfe{}",
        "d.yaml": b"!!python/name:os.system",
    }.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataFileError, match=rf"{name}: \$: expected (JSON|YAML)"):
            load_reward(tmp_path / name)
    (tmp_path / "e.yaml").write_text(yaml.safe_dump(GOOD).replace("'{{references.answer}}'", "yes"))
    with pytest.raises(RewardConfigError, match="expression: should be a valid string, got True"):
        load_reward(tmp_path / "e.yaml")
    with pytest.raises(OSError):
        load_reward(tmp_path / "none.json")


SNAKE = {
    "weighted_reward_configs": [
        {
            "weight": 2,
            "reward_config": {
                "reward_name": "right",
                "parse_response_config": {"parse_type": "RESPONSE_PARSE_TYPE_UNSPECIFIED"},
                "string_match_reward_scorer": {
                    "correct_answer_reward": 1,
                    "wrong_answer_reward": -1,
                    "json_match_expression": {
                        "key_name": "a",
                        "value_string_match_expression": {"match_operation": "EXACT_MATCH", "expression": "4"},
                    },
                },
            },
        }
    ]
}


@pytest.mark.parametrize("name", ["r.json", "r.yaml", "r.yml"])
@pytest.mark.parametrize("config", [SNAKE, {"compositeRewardConfig": SNAKE}, {"single_reward_config": GOOD}])
def test_spellings_wrappers_and_formats(tmp_path, name, config):
    file = tmp_path / name
    file.write_text(json.dumps(config) if name == "r.json" else yaml.safe_dump(config), encoding="utf-8")
    with load_reward(file) as reward:
        right = '{"a": "4"}' if config is not None and "single_reward_config" not in config else "4"
        assert reward(completions=[right, "5"], references=[{"answer": "4"}] * 2) == [1.0, -1.0]


def test_arguments():
    with pytest.raises(ValueError, match="nan_policy is 'drop'"):
        load_reward(GOOD, nan_policy="drop")
    for timeout in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"timeout is {timeout}"):
            load_reward(GOOD, timeout=timeout)


# --- the call convention


def test_called_like_any_other_reward_function():
    with load_reward(string_match("right", parse=EXTRACT)) as reward:
        assert reward.__name__ == "right"
        conversation = [[{"role": "assistant", "content": "<ans>4</ans>"}]]
        assert reward(
            prompts=["2 + 2?"],
            completions=conversation,
            completion_ids=[[1, 2]],
            references=[{"answer": "4"}],
            trainer_state=object(),
        ) == [1.0]
        with pytest.raises(ValueError, match=r"got 1 completions but \{'references': 2\}"):
            reward(completions=["a"], references=[{"answer": "4"}] * 2)
    with load_reward(composite(GOOD, string_match("too"))) as reward:
        assert reward.__name__ == "composite_reward"


def test_references_of_whole_rows():
    with load_reward(GOOD) as reward:
        assert reward(completions=["4"], examples=[{"references": {"answer": "4"}}]) == [1.0]


@pytest.mark.parametrize(
    "columns", [{}, {"references": [{}]}, {"references": [{"answer": None}]}, {"references": [None]}]
)
def test_a_reference_that_a_row_lacks(columns):
    with load_reward(GOOD) as reward, pytest.raises(RewardConfigError, match="row 1, whose references are: ") as caught:
        reward(completions=["4"], **columns)
    assert caught.value.path == "$.stringMatchRewardScorer.stringMatchExpression.expression"


def test_snippets_get_example_and_response():
    code = """
def evaluate(example, response):
    print("seen", example["contents"][0]["parts"][0]["text"])
    text = response["parts"][0]["text"]
    if text == "crash":
        raise KeyError("no such thing")
    return 3.0 if text == example["references"]["answer"] else -0.5
"""
    config = {**snippet(code), "parseResponseConfig": EXTRACT}
    with load_reward(config) as reward:
        results = reward.details(
            completions=["<ans>4</ans>", "<ans>5</ans>", "<ans>crash</ans>"],
            prompts=["2 + 2?"] * 3,
            references=[{"answer": "4"}] * 3,
        )
    assert [result.reward for result in results[:2]] == [1.0, -0.5]
    assert results[0].components[0].unclipped == 3.0
    assert "seen 2 + 2?" in results[0].components[0].stages["logs"]
    assert math.isnan(results[2].reward)
    assert "KeyError" in results[2].error


def test_one_time_limit_for_all():
    code = "import time\ndef evaluate(example, response):\n    time.sleep(30)\n    return 1.0\n"
    serve = lambda body, nth: reward_reply(1, delay=1 if nth == 1 else 0)  # noqa: E731
    with FakeReward(serve) as server, load_reward(composite(snippet(code), service(server.url)), timeout=0.3) as reward:
        (result,) = reward.details(completions=["a"])
    assert math.isnan(result.components[0].reward)
    assert result.components[1].reward == 1.0
    assert len(server.requests) == 2  # the first was given up


# --- overlap, order and the fuse


def test_submit_returns_at_once_and_results_come_in_order():
    gate = threading.Event()

    def serve(body, nth):
        gate.wait(10)
        return reward_reply(float(body["response"]["parts"][0]["text"]))

    with FakeReward(serve) as server, load_reward(service(server.url)) as reward:
        first, second = (reward.submit(completions=texts) for texts in (["0.1", "0.2"], ["0.3"]))
        gate.set()
        assert (second.result(), first.result()) == ([0.3], [0.1, 0.2])
    assert [body["metadata"]["step"] for body in server.requests] == [1, 1, 2]


def test_errors_of_a_pending_reward_come_with_its_result():
    with load_reward(GOOD) as reward, pytest.raises(RewardConfigError):
        reward.submit(completions=["4"]).result()


def test_the_fuse_blows_with_counts_per_reason(caplog):
    def serve(body, nth):
        text = body["response"]["parts"][0]["text"]
        return reward_reply(1) if text == "good" else error(404 if text == "lost" else 400)

    with FakeReward(serve) as server, load_reward(service(server.url)) as reward:
        assert reward(completions=["good"] * 4) == [1.0] * 4
        assert all(math.isnan(value) for value in reward(completions=["bad"] * 16))  # 16 of 20 is not more than 80 %
        reward.details(completions=["bad"] * 50)  # looking does not count
        with pytest.raises(
            RewardGoneError, match=r"of the last 21 samples 17 got no reward: 16 x .*HTTP 400, 1 x .*HTTP 404"
        ):
            reward.submit(completions=["lost"]).result()
        assert reward.errors["service: the service gave no reward: HTTP 400"] == 16
    assert sum("no reward: service" in record.message for record in caplog.records) == 2  # each reason once


def test_a_few_failures_and_old_ones_are_borne():
    fails = {"now": True}
    serve = lambda body, nth: error(400) if fails["now"] else reward_reply(1)  # noqa: E731
    with FakeReward(serve) as server, load_reward(service(server.url)) as reward:
        reward(completions=["a"] * 19)  # fewer than 20 say nothing
        fails["now"] = False
        for _ in range(3):
            reward(completions=["a"] * 40)
        fails["now"] = True
        reward(completions=["a"] * 80)  # of the last 100, the first 19 forgotten
        with pytest.raises(RewardGoneError, match="of the last 100 samples 81"):
            reward(completions=["a"])


def test_under_renormalise_a_dead_component_does_not_stop_the_run():
    with FakeReward(lambda body, nth: error(400)) as server:
        config = composite(GOOD, service(server.url))
        columns = {"completions": ["4"] * 30, "references": [{"answer": "4"}] * 30}
        with load_reward(config, nan_policy="renormalise") as reward:
            assert reward(**columns) == [1.0] * 30
        with load_reward(config) as reward, pytest.raises(RewardGoneError, match="30 x service: "):
            reward(**columns)


# --- the sample files

CONFIGS = Path(__file__).resolve().parents[2] / "configs" / "rewards"
WANTED = {"string_match.json", "json_match.yaml", "autorater.yaml", "code_execution.yaml", "cloud_run.json"}
WANTED |= {"composite.yaml", "gsm8k.yaml", "format_length.yaml"}
FILES = sorted(path.name for path in CONFIGS.iterdir())


@pytest.mark.parametrize("name", sorted(WANTED | set(FILES)))
def test_the_sample_files_load(name, monkeypatch):
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9")
    load_reward(CONFIGS / name).close()


SOLUTION = "<think>Two and two.</think>\n<answer>four</answer>"


@pytest.mark.parametrize(
    ("name", "response", "references", "expected"),
    [
        ("string_match.json", "so <answer> PARIS. </answer>", {"answer": "Paris"}, 1.0),
        ("string_match.json", "Paris", {"answer": "Paris"}, -1.0),
        ("json_match.yaml", '{"city": "Paris"}', {"city": "Paris"}, 1.0),
        ("json_match.yaml", "Paris", {"city": "Paris"}, 0.0),
        ("code_execution.yaml", "the red dog", {"answer": "A red fox"}, 1 / 3),
        ("gsm8k.yaml", "1,200 + 34\n#### 1,234", {"answer": "1234"}, 1.0),
        ("gsm8k.yaml", "#### $1234.00", {"answer": "1,234"}, 1.0),
        ("gsm8k.yaml", "#### 12", {"answer": "1234"}, 0.0),
        ("gsm8k.yaml", "1234", {"answer": "1234"}, -1.0),
        ("questions.json", " White.", {"answer": "white"}, 1.0),
        ("questions.json", "white or black", {"answer": "white"}, 0.0),
        ("format_length.yaml", SOLUTION, {}, 1.0),
        ("format_length.yaml", "four", {}, 1 / 3),
        ("format_length.yaml", "four " * 300, {}, 0.0),
        ("format_length.yaml", "four " * 1000, {}, -1 / 3),
    ],
)
def test_what_the_sample_files_reward(name, response, references, expected):
    with load_reward(CONFIGS / name) as reward:
        assert reward(completions=[response], references=[references]) == pytest.approx([expected])


def test_the_sample_files_with_a_judge():
    def answer(body):
        asked = body["messages"][0]["content"]
        return completion("Fine. <score>0.75</score>" if "What the assistant wrote: 4" in asked else "No.")

    with FakeOpenAI(answer) as server:
        columns = {"prompts": ["2 + 2?"], "references": [{"answer": "4"}], "system_instruction": ["Be brief."]}
        with load_reward(CONFIGS / "autorater.yaml", base_url=server.url) as reward:
            assert reward(completions=["4"], **columns) == [0.75]
        with load_reward(CONFIGS / "composite.yaml", base_url=server.url) as reward:
            assert reward(completions=["<answer>4</answer>"], **columns) == [0.75]
