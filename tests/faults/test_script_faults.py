"""Flags and files that once ended a script with a traceback, or with the wrong result after minutes of work."""

import json
from pathlib import Path

import pytest

from examples.demo import Args as DemoArgs
from examples.sentiment.ppo_sentiment import Args
from tests.tiny import tiny_tokenizer
from trl.data.sentiment import load_sentiment_prompts
from trl.jsonl import DataFileError, read_jsonl, read_prompts
from trl.report.heatmap import heatmap_text, measure_scale
from trl.report.runlog import load_runs
from trl.report.table import EvaluationTable
from trl.run import parse_args

HALF_A_CHARACTER = '{"text": "\\ud83d%s"}\n' % ("abc " * 100)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--steps", "0"),  # 0 was taken for "no limit"
        ("--steps", "-3"),
        ("--epochs", "0"),
        ("--save_freq", "-1"),
        ("--num_shared_layers", "0"),
        ("--intrinsic_reward_threshold", "nan"),
        ("--positive_reward_value", "nan"),
        ("--min_new_tokens", "21"),
        ("--max_new_tokens", "0"),
        ("--learning_rate", "-1"),
        ("--target_kl", "nan"),
    ],
)
def test_flags_out_of_range_are_refused_before_anything_is_loaded(flag, value, capsys):
    with pytest.raises(SystemExit) as stopped:
        parse_args(Args, [flag, value])
    message = capsys.readouterr().err + str(stopped.value)
    assert stopped.value.code not in (0, None)
    assert value.rstrip("0") in message.lower()
    assert "Traceback" not in message


@pytest.mark.parametrize(("name", "value"), [("steps", 1), ("eval_prompts", 0), ("eval_returns", 0)])
def test_the_demo_refuses_sizes_that_would_fail_at_its_end(name, value):
    with pytest.raises(ValueError, match=name):
        DemoArgs(**{name: value})


def test_a_line_nested_too_deeply_is_a_bad_line(tmp_path: Path):
    path = tmp_path / "deep.jsonl"
    path.write_text('{"text": "a"}\n' + "[" * 100_000 + "\n")
    with pytest.raises(DataFileError, match="line 2"):
        read_jsonl(path)


def test_half_a_character_is_named_where_tokenizers_would_fail(tmp_path: Path):
    data, prompts = tmp_path / "reviews.jsonl", tmp_path / "prompts.jsonl"
    data.write_text(HALF_A_CHARACTER)
    with pytest.raises(DataFileError, match=r"line 1: expected a string called text, of whole characters"):
        load_sentiment_prompts(str(data), tiny_tokenizer())
    prompts.write_text('{"prompt": {"text": "fine"}}\n{"prompt": {"text": "\\ude00"}}\n')
    with pytest.raises(DataFileError, match=r"row 2: expected.*whole characters") as error:
        read_prompts(prompts)
    str(error.value).encode()  # it can be printed
    prompts.write_text('{"prompt": {"text": "a"}, "generations": [{"text": "\\ude00"}]}\n')
    read_prompts(prompts)
    with pytest.raises(DataFileError, match="row 1"):
        read_prompts(prompts, with_generations=True)


def test_a_table_of_other_columns_says_so(tmp_path: Path):
    path = tmp_path / "reviews.csv"
    path.write_text("a,b\n1,2,3\n")
    with pytest.raises(DataFileError, match=r"row 1.*called text"):
        load_sentiment_prompts(str(path), tiny_tokenizer())


def test_a_folder_of_broken_files_says_so(tmp_path: Path, monkeypatch):
    (tmp_path / "reviews").mkdir()
    (tmp_path / "reviews" / "data.json").write_text("{broken")
    with pytest.raises(DataFileError, match="cannot load the split 'train'"):
        load_sentiment_prompts(str(tmp_path / "reviews"), tiny_tokenizer())


def test_a_report_of_files_that_are_none_of_its_own(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"loss": 1.0}\n')
    with pytest.raises(DataFileError, match=r"row 1.*step"):
        load_runs([tmp_path])
    table = tmp_path / "evaluation.json"
    for content in ([{"model": "a", "reward": [1, 2]}], {"columns": ["a"], "rows": [[1, 2]]}):
        table.write_text(json.dumps(content))
        with pytest.raises(DataFileError, match="expected"):
            EvaluationTable.from_file(table)


def test_a_terminal_is_not_given_commands_by_a_model():
    sample = {"query": "a\x1b]0;title\x07", "tokens": [{"text": "\x1b[31mred\u202e\x9b2J", "kl": 1.0}]}
    shown = heatmap_text(sample, "kl", measure_scale([sample], "kl")).plain
    assert shown == "a�]0;title��[31mred��2J"
