"""``validate``: the verdicts and warnings, exit codes, both outputs, one example, and what it refuses."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.fake_openai import FakeOpenAI, completion, error
from tests.fake_reward import FakeReward, reward_reply
from tests.rewards.reward_configs import EXTRACT, composite, judge, service, snippet, string_match
from tests.tiny import tiny_gpt2, tiny_tokenizer
from trl.rewards.__main__ import main
from trl.rewards.display import histogram

ROWS = 20
NUMBER = 'def evaluate(example, response):\n    return float(response["parts"][0]["text"])\n'


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def data(tmp_path):
    rows = [
        {"contents": [{"role": "user", "parts": [{"text": f"{i} + 1?"}]}], "references": {"answer": str(i + 1)}}
        for i in range(ROWS)
    ]
    return write(tmp_path / "train.jsonl", rows)


def validate(capsys, config, data, responses, *flags):
    """(exit code, what was printed) of a configuration on as many responses."""
    files = data.parent / "reward.json", data.parent / "sampled.jsonl"
    files[0].write_text(json.dumps(config))
    write(files[1], [{"response": response} for response in responses])
    argv = ["validate", "--config", str(files[0]), "--data", str(data), "--responses", str(files[1]), *flags]
    with pytest.raises(SystemExit) as end:
        main(argv)
    return end.value.code, capsys.readouterr().out


RIGHT = [str(i + 1) for i in range(ROWS)]
MIXED = [str(i + 1) if i % 2 else "?" for i in range(ROWS)]
NINETEEN = ["?"] * 19 + ["20"]
SPREAD = [str(i / ROWS) for i in range(ROWS)]

CASES = {
    # configuration, responses: verdict, warnings, failed samples, exit code
    "good": (string_match(), MIXED, "OK", [], 0, 0),
    "too hard": (string_match(), ["?"] * ROWS, "OK", ["too_hard"], 0, 0),
    "almost too hard": (string_match(), NINETEEN, "OK", ["too_hard"], 0, 0),
    "too easy": (string_match(), RIGHT, "OK", ["too_easy"], 0, 0),
    "clipped": (string_match(correct=5.0), MIXED, "OK", ["clipped"], 0, 0),
    "clipped and too hard": (string_match(wrong=-2.0), ["?"] * ROWS, "OK", ["too_hard", "clipped"], 0, 0),
    "right and wrong are the same": (string_match(wrong=1.0), MIXED, "OK", ["constant"], 0, 0),
    "numbers": (snippet(NUMBER), SPREAD, "OK", [], 0, 0),
    "numbers, always 0": (snippet(NUMBER), ["0"] * ROWS, "OK", ["too_hard"], 0, 0),
    "numbers, always 1": (snippet(NUMBER), ["0.999"] * ROWS, "OK", ["too_easy"], 0, 0),
    "numbers, always between": (snippet(NUMBER), ["0.5"] * ROWS, "OK", ["constant"], 0, 0),
    "numbers, too large": (snippet(NUMBER), ["-3", "0.5"] * 10, "OK", ["clipped"], 0, 0),
    "numbers, all too large": (snippet(NUMBER), [str(i + 1) for i in range(ROWS)], "OK", ["too_easy", "clipped"], 0, 0),
    "half broken": (snippet(NUMBER), SPREAD[:10] + ["broken"] * 10, "partial", [], 10, 1),
    "broken": (snippet(NUMBER), ["broken"] * ROWS, "error", [], ROWS, 1),
}


@pytest.mark.parametrize("case", CASES)
def test_verdicts(case, data, capsys):
    config, responses, verdict, warnings, failed, code = CASES[case]
    got, out = validate(capsys, config, data, responses, "--json")
    report = json.loads(out)
    (reward,) = report["rewards"].values()
    assert (report["verdict"], reward["verdict"], reward["warnings"]) == (verdict, verdict, warnings)
    assert sum(reward["errors"].values()) == failed
    assert got == code
    got, out = validate(capsys, config, data, responses)
    assert got == code
    assert f"verdict: {verdict}" in out
    assert out.count("warning: ") == len(warnings)
    assert ("error: " in out) == bool(failed)


def test_the_published_shape(data, capsys):
    code, out = validate(capsys, string_match("right"), data, MIXED, "--json")
    assert code == 0
    assert out.count("\n") == 1
    report = json.loads(out)
    assert list(report) == ["verdict", "overall", "rewards"]
    assert report["overall"] == 0.0
    reward = report["rewards"]["right"]
    assert list(reward) == ["verdict", "mean", "min", "max", "n", "errors", "seconds", "warnings"]
    assert (reward["mean"], reward["min"], reward["max"], reward["n"], reward["errors"]) == (0.0, -1.0, 1.0, ROWS, {})
    assert 0 <= reward["seconds"] < 5


def test_of_a_composite_one_reward_may_fail(data, capsys):
    def serve(body, nth):
        return error(400) if body["response"]["parts"][0]["text"] == "?" else reward_reply(0.5)

    with FakeReward(serve) as server, FakeReward(lambda body, nth: error(404)) as gone:
        config = composite(string_match("right"), service(server.url), service(gone.url, "gone"))
        code, out = validate(capsys, config, data, MIXED, "--json")
        report = json.loads(out)
        assert code == 1
        assert (report["verdict"], report["overall"]) == ("partial", None)  # no sample has a total
        assert [each["verdict"] for each in report["rewards"].values()] == ["OK", "partial", "error"]
        assert report["rewards"]["service"]["errors"] == {"the service gave no reward: HTTP 400": 10}
        assert report["rewards"]["gone"]["mean"] is None
        code, out = validate(capsys, config, data, MIXED, "--json", "--nan_policy", "renormalise")
        assert code == 1
        assert json.loads(out)["overall"] == pytest.approx((10 * 0.75 + 10 * -1) / 20)
        _, out = validate(capsys, config, data, MIXED)
    assert "error: gone: 20 x the service gave no reward: HTTP 404" in out
    assert "total" in out


def test_only_the_first_rows_are_used(data, capsys):
    _, out = validate(capsys, string_match(), data, RIGHT[:7], "--limit", "7", "--json")
    assert json.loads(out)["rewards"]["right"]["n"] == 7
    _, out = validate(capsys, string_match(), data, RIGHT, "--limit", "0", "--json")
    assert json.loads(out)["rewards"]["right"]["n"] == ROWS


def test_four_equal_rewards_say_nothing(data, capsys):
    _, out = validate(capsys, string_match(), data, RIGHT, "--limit", "4", "--json")
    assert json.loads(out)["rewards"]["right"]["warnings"] == []


def test_histogram():
    assert histogram([]) == " " * 11
    assert histogram([-1.0]) == "█" + " " * 10
    assert histogram([1.0, 1.0, 0.0]) == "     ▄    █"
    assert histogram([0.0, 1.0], ".#") == "     #    #"


# --- one example


def test_an_example_shows_every_stage(data, tmp_path, capsys):
    row = tmp_path / "row.json"
    row.write_text(json.dumps({"contents": [{"parts": [{"text": "2 + 2?"}]}], "references": {"answer": "4"}}))
    code = 'def evaluate(example, response):\n    print("logged", example["references"]["answer"])\n    return 3.0\n'
    with (
        FakeOpenAI(lambda body: completion("Hm. <ans>0.5</ans>")) as llm,
        FakeReward(lambda b, n: reward_reply(1, "aux!")) as own,
    ):
        parts = [string_match("right", "REGEX_CONTAINS", "^{{references.answer}}$", parse=EXTRACT)]
        parts += [judge("judge", "{{prompt}} -> {{response}}", parse=EXTRACT), snippet(code), service(own.url)]
        config = tmp_path / "reward.json"
        config.write_text(json.dumps(composite(*parts)))
        argv = ["validate", "--config", str(config), "--example", str(row), "--response", "so <ans>4</ans> \x1b[31m"]
        argv += ["--base_url", llm.url]
        with pytest.raises(SystemExit) as end:
            main(argv)
        assert end.value.code == 0
        out = capsys.readouterr().out
        for text in (
            "2 + 2?",
            "--- parsed response\n4\n",
            "^4$",
            "right",
            "2 + 2? -> so <ans>4</ans>",
            "Hm. <ans>0.5</ans>",
        ):
            assert text in out
        for text in ("logged 4", "clipped from 3", "aux!", "reward: 0.875"):
            assert text in out
        assert "\x1b[31m" not in out
        with pytest.raises(SystemExit) as end:
            main([*argv, "--json"])
        result = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert result["reward"] == 0.875
    assert [each["reward"] for each in result["components"]] == [1.0, 0.5, 1.0, 1.0]
    assert result["components"][0]["stages"]["expression"] == "^4$"


def test_an_example_that_fails(tmp_path, capsys):
    row, config = tmp_path / "row.json", tmp_path / "reward.json"
    row.write_text(json.dumps({"contents": [{"parts": [{"text": "x"}]}]}))
    config.write_text(json.dumps(snippet(NUMBER)))
    with pytest.raises(SystemExit) as end:
        main(["validate", "--config", str(config), "--example", str(row), "--response", "no number"])
    assert end.value.code == 1
    assert "ValueError" in capsys.readouterr().out


# --- what is refused


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], "give --data"),
        (["--data", "{data}"], "give --responses FILE, or --model NAME"),
        (["--data", "{data}", "--responses", "x", "--model", "y"], "drop one"),
        (["--data", "{data}", "--responses", "{data}"], '{"response": "…"}'),
        (["--data", "{data}", "--responses", "{short}"], "has 2 responses; expected one for each of the first 20"),
        (["--data", "{data}", "--responses", "{short}", "--limit", "-1"], "--limit is -1"),
        (["--data", "{data}", "--model", "builtin:nonesuch"], "nonesuch"),
        (["--data", "{short}", "--responses", "{short}"], "line 1: contents is missing"),
        (["--data", "none.jsonl", "--responses", "{short}"], "none.jsonl"),
        (["--example", "{short}"], "give both"),
        (["--response", "x"], "give both"),
        (["--example", "{short}", "--response", "x", "--data", "{data}"], "drop --data"),
        (["--example", "{short}", "--response", "x"], "expected one row as JSON"),
    ],
)
def test_usage(flags, problem, data, tmp_path, capsys):
    short = write(tmp_path / "short.jsonl", [{"response": "1"}, {"response": "2"}])
    config = tmp_path / "reward.json"
    config.write_text(json.dumps(string_match()))
    argv = [flag.replace("{data}", str(data)).replace("{short}", str(short)) for flag in flags]
    with pytest.raises(SystemExit) as end:
        main(["validate", "--config", str(config), *argv])
    assert str(end.value.code).startswith("error: ")
    assert problem in str(end.value.code)
    assert capsys.readouterr().out == ""


def test_a_bad_configuration_is_an_error_for_machines_too(data, capsys):
    missing = string_match(expression="{{references.anser}}")
    for config, path in (({}, "$.rewardName"), (missing, "stringMatchExpression.expression: {{references.anser}}")):
        code, out = validate(capsys, config, data, MIXED, "--json")
        report = json.loads(out)
        assert (report["verdict"], report["overall"], report["rewards"]) == ("error", None, {})
        assert path in report["error"]
        assert path in str(code)


def test_half_a_character_from_a_service_is_json_all_the_same(tmp_path):
    """Through a real stdout, which can't take it."""
    example = write(tmp_path / "row.json", [{"contents": [{"parts": [{"text": "?"}]}]}])
    with FakeReward(lambda body, nth: reward_reply(1, "\ud800")) as server:
        (tmp_path / "reward.json").write_text(json.dumps(service(server.url)))
        argv = ["--config", str(tmp_path / "reward.json"), "--example", str(example), "--response", "x", "--json"]
        ended = subprocess.run(
            [sys.executable, "-m", "trl.rewards", "validate", *argv], capture_output=True, timeout=120
        )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout)["components"][0]["stages"] == {"aux info": "\ud800"}


def test_a_missing_key_is_one_line(data, capsys, monkeypatch):
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    code, _ = validate(capsys, judge(), data, MIXED)
    assert "OPENAI_API_KEY" in code


# --- with a model


@pytest.mark.parametrize("chat", [False, True])
def test_a_model_answers(chat, data, tmp_path, capsys):
    model, tokenizer = tiny_gpt2(), tiny_tokenizer()
    if chat:
        tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    config = tmp_path / "reward.json"
    length = 'def evaluate(example, response):\n    return len(response["parts"][0]["text"]) / 1000\n'
    config.write_text(json.dumps(snippet(length)))
    argv = ["validate", "--config", str(config), "--data", str(data), "--model", str(tmp_path / "model")]
    seen = []
    for seed in ("0", "0", "1"):
        with pytest.raises(SystemExit):
            main([*argv, "--limit", "10", "--max_new_tokens", "8", "--seed", seed, "--json"])
        report = json.loads(capsys.readouterr().out)
        assert report["verdict"] == "OK"
        assert report["rewards"]["snippet"]["n"] == 10
        seen.append(report["overall"])
    assert seen[0] == seen[1] != seen[2]


def test_a_model_answers_rows_from_all_over_sorted_data(data, tmp_path, capsys):
    tiny_gpt2().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    number = 'def evaluate(example, response):\n    return float(example["references"]["answer"]) / 100\n'
    (tmp_path / "reward.json").write_text(json.dumps(snippet(number)))
    argv = ["validate", "--config", str(tmp_path / "reward.json"), "--data", str(data), "--limit", "10", "--json"]
    with pytest.raises(SystemExit):
        main([*argv, "--model", str(tmp_path / "model"), "--max_new_tokens", "2"])
    reward = json.loads(capsys.readouterr().out)["rewards"]["snippet"]
    assert reward["n"] == 10
    assert reward["max"] > 0.10  # the first ten rows' answers are 1 to 10


def test_help_answers_at_once_and_the_exit_code_reaches_the_shell(data, tmp_path):
    root = Path(__file__).resolve().parents[2]
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trl.rewards", "validate", "--help"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert "--responses" in done.stdout
    imported = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert not {"torch", "transformers", "openai", "sklearn"} & imported
    assert time.monotonic() - begin < 20  # on a machine with nothing else to do: 0.7 s
    config = tmp_path / "reward.json"
    config.write_text(json.dumps(string_match()))
    responses = write(tmp_path / "r.jsonl", [{"response": "1"}] * ROWS)
    command = [sys.executable, "-m", "trl.rewards", "validate", "--config", config, "--data", data]
    done = subprocess.run(
        [*command, "--responses", responses, "--json"], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert json.loads(done.stdout)["verdict"] == "OK"
    done = subprocess.run([*command, "--responses", data], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr
