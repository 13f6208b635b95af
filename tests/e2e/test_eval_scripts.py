"""The evaluation scripts as users run them: subprocesses, tiny saved models, kills in the middle."""

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from tests.e2e.killing import kill_when_written, tear_last_line
from tests.test_metrics import byte_level_tokenizer, tiny_gpt2
from trl.jsonl import read_jsonl
from trl.metrics import bootstrap_interval, continuation_nll, distinct_n, perplexity_intervals, share_positive

SCRIPTS = Path(__file__).parents[2] / "eval_scripts"
ROWS = 96
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "HF_HUB_OFFLINE": "1",
    "CUDA_VISIBLE_DEVICES": "",
}


def command(script: str, *arguments: Any) -> list[str]:
    return [sys.executable, str(SCRIPTS / script), *map(str, arguments)]


def run(script: str, *arguments: Any) -> dict[str, Any]:
    """Run to the end; the last line on stdout is one strict JSON object."""
    done = subprocess.run(command(script, *arguments), env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1], parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


@pytest.fixture(scope="module")
def lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lm")
    tokenizer = byte_level_tokenizer()
    tiny_gpt2(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "prompts.jsonl"
    starts = ["the film", "I", "the plot was", "the acting"]
    rows = [{"prompt": {"text": starts[index % 4]}, "id": index} for index in range(ROWS)]
    rows[5]["prompt"]["text"] = "the film was long " * 30  # more than the model can read
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def decoded(lm: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    path = tmp_path_factory.mktemp("out") / "generations.jsonl"
    arguments = ("--lm_dir", lm, "--prompts_file", prompts, "--output_file", path, "--num_returns", 3)
    return path, run("decoding.py", *arguments, "--do_sample", "--batch_size", 2)


@pytest.fixture(scope="module")
def generations(decoded: tuple[Path, dict[str, Any]]) -> Path:
    summary = decoded[1]
    assert (summary["prompts"], summary["prompts_cut"], summary["generations"]) == (ROWS, 1, 3 * ROWS)
    return decoded[0]


def test_decoding_keeps_rows_and_adds_generations(generations: Path, prompts: Path) -> None:
    rows = read_jsonl(generations)
    assert [row["id"] for row in rows] == list(range(ROWS))
    assert all(len(row["generations"]) == 3 for row in rows)
    assert [row["prompt"] for row in rows] == [row["prompt"] for row in read_jsonl(prompts)]


def test_a_killed_decoding_ends_with_the_same_file_and_result(
    lm: Path, prompts: Path, decoded: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    output = tmp_path / "generations.jsonl"
    arguments = ("--lm_dir", lm, "--prompts_file", prompts, "--output_file", output, "--num_returns", 3)
    line = command("decoding.py", *arguments, "--do_sample", "--batch_size", 2)
    assert kill_when_written(line, output, random.Random(0).randrange(8, 40), ENVIRONMENT) < ROWS
    tear_last_line(output)
    summary = run("decoding.py", *arguments, "--do_sample", "--batch_size", 2)
    assert output.read_bytes() == decoded[0].read_bytes()
    assert summary == {**decoded[1], "output_file": str(output)}


def test_decoding_samples_prompts_reproducibly(lm: Path, prompts: Path, tmp_path: Path) -> None:
    texts = []
    for name in ("a", "b"):
        output = tmp_path / f"{name}.jsonl"
        arguments = ("--lm_dir", lm, "--prompts_file", prompts, "--output_file", output, "--num_returns", 1)
        run("decoding.py", *arguments, "--sample_size", 5, "--no-do_sample", "--max_length", 4, "--min_length", 0)
        texts.append(output.read_bytes())
    assert texts[0] == texts[1]
    ids = [row["id"] for row in map(json.loads, texts[0].splitlines())]
    assert len(ids) == 5 and ids == sorted(ids) and ids != list(range(5))


def test_changed_settings_are_refused_in_one_line(lm: Path, prompts: Path, generations: Path) -> None:
    arguments = ("--lm_dir", lm, "--prompts_file", prompts, "--output_file", generations, "--num_returns", 3)
    before = generations.read_bytes()
    done = subprocess.run(
        command("decoding.py", *arguments, "--batch_size", 2, "--top_p", 0.5),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "other settings (top_p: 0.9 → 0.5)" in done.stderr and "Traceback" not in done.stderr
    assert generations.read_bytes() == before


def test_perplexity_and_distinct(lm: Path, generations: Path, tmp_path: Path) -> None:
    output = tmp_path / "ppl.jsonl"
    arguments = ("--generations_file", generations, "--output_file", output, "--model", lm)
    summary = run("eval_perplexity_dist.py", *arguments)
    rows = read_jsonl(generations)
    texts = [[item["text"] for item in row["generations"]] for row in rows]
    prompts = [row["prompt"]["text"] for row in rows for _ in row["generations"]]
    tokenizer = byte_level_tokenizer()
    flat = [text for group in texts for text in group]
    scores = continuation_nll(tiny_gpt2(len(tokenizer)), tokenizer, prompts, flat)
    written = [item for row in read_jsonl(output) for item in row["generations"]]
    np.testing.assert_allclose([item["nll"] for item in written], scores.nll, rtol=1e-5)
    assert summary["perplexity"]["mean"] == pytest.approx(scores.perplexity.mean(), rel=1e-5)
    assert summary["perplexity"]["continuations"] == 3 * ROWS
    prompt_of = np.repeat(np.arange(ROWS), 3)
    intervals = perplexity_intervals(scores, prompt_of)
    for name, interval in summary["perplexity"]["intervals"].items():
        assert interval == pytest.approx(intervals[name], rel=1e-4)
        assert interval["low"] < summary["perplexity"][name] < interval["high"]
    for n in (1, 2, 3):
        values = distinct_n(texts, n)
        assert summary[f"dist-{n}"]["mean"] == pytest.approx(np.nanmean(values))
    again = tmp_path / "again.jsonl"
    arguments = ("--generations_file", generations, "--output_file", again, "--model", lm)
    line = command("eval_perplexity_dist.py", *arguments)
    assert kill_when_written(line, again, random.Random(1).randrange(8, 24), ENVIRONMENT) < ROWS
    tear_last_line(again)
    assert run("eval_perplexity_dist.py", *arguments) == {**summary, "output_file": str(again)}
    assert again.read_bytes() == output.read_bytes()


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    folder = tmp_path_factory.mktemp("classifier")
    core = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordPieceTrainer(vocab_size=80, special_tokens=["[UNK]", "[PAD]"], show_progress=False)
    core.train_from_iterator(["the film was a delight", "the plot was dull"], trainer)
    PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(folder)
    torch.manual_seed(1)
    config = BertConfig(
        vocab_size=len(core.get_vocab()),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        initializer_range=1.0,
        label2id={"NEGATIVE": 0, "POSITIVE": 1},
        id2label={0: "NEGATIVE", 1: "POSITIVE"},
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def test_sentiment(lm: Path, prompts: Path, classifier: Path, tmp_path: Path) -> None:
    output = tmp_path / "sst.jsonl"
    arguments = (lm, prompts, "--output_file", output, "--num_return", 4, "--classifier_path", classifier)
    summary = run("eval_sentiment_sst.py", *arguments)
    rows, name = read_jsonl(output), str(classifier)
    items = [item for row in rows for item in row["generations"]]
    assert (summary["prompts"], summary["generations"]) == (ROWS, 4 * ROWS) == (len(rows), len(items))
    assert summary["prompts_cut"] == 1
    assert all((item[name] is None) == (not item["text"].strip()) for item in items)

    from trl.rewards.classifiers import load_classifier

    judged = [item for item in items if item[name] is not None]
    alone = load_classifier(name, device="cpu")([item["text"] for item in judged])
    np.testing.assert_allclose([item[name] for item in judged], alone, atol=1e-5)
    shares = share_positive([[i[name] for i in row["generations"] if i[name] is not None] for row in rows])
    mean, low, high = bootstrap_interval(shares, seed=0)
    assert 0 < mean < 1
    assert summary["classifiers"][name] == {"share_positive": mean, "low": low, "high": high, "prompts": ROWS}

    again = tmp_path / "again.jsonl"
    arguments = (lm, prompts, "--output_file", again, "--num_return", 4, "--classifier_path", classifier)
    line = command("eval_sentiment_sst.py", *arguments)
    assert kill_when_written(line, again, random.Random(2).randrange(4, 40), ENVIRONMENT) < ROWS
    tear_last_line(again)
    assert run("eval_sentiment_sst.py", *arguments) == {**summary, "output_file": str(again)}
    assert again.read_bytes() == output.read_bytes()


@pytest.mark.parametrize("script", ["decoding.py", "eval_sentiment_sst.py"])
def test_an_empty_batch_is_refused(script: str, lm: Path, prompts: Path, tmp_path: Path) -> None:
    named = [lm, prompts] if script.startswith("eval") else ["--lm_dir", lm, "--prompts_file", prompts]
    line = command(script, *named, "--output_file", tmp_path / "out.jsonl", "--batch_size", 0)
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "error: --batch_size is 0; expected at least 1\n")


def test_a_model_that_was_trained_on_meanwhile_is_noticed(lm: Path, generations: Path, tmp_path: Path) -> None:
    model, output = tmp_path / "model", tmp_path / "ppl.jsonl"
    shutil.copytree(lm, model)
    arguments = ("--generations_file", generations, "--output_file", output, "--model", model)
    run("eval_perplexity_dist.py", *arguments)
    before = output.read_bytes()
    other = tiny_gpt2(len(byte_level_tokenizer()))
    other.transformer.wte.weight.data.mul_(1.01)
    other.save_pretrained(model)
    line = command("eval_perplexity_dist.py", *arguments)
    done = subprocess.run(line, env=ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "other settings (version: " in done.stderr
    assert output.read_bytes() == before


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("decoding.py", ["--lm_dir", "--num_returns", "--do_sample", "--top_p", "--max_length", "--sample_size"]),
        ("eval_sentiment_sst.py", ["MODEL PROMPTS", "--num_return", "--classifier_path", "--max_new_tokens"]),
        ("eval_perplexity_dist.py", ["--generations_file", "--output_file", "--model"]),
        ("compare.py", ["RUN RUN", "--output_file", "--judge_model", "--judge_budget_usd"]),
    ],
)
def test_help_is_fast_and_loads_nothing_heavy(script: str, flags: list[str]) -> None:
    start = time.perf_counter()
    done = subprocess.run(command(script, "--help"), env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert time.perf_counter() - start < 3
    assert all(flag in done.stdout for flag in flags)
    probe = f"import runpy, sys; runpy.run_path({str(SCRIPTS / script)!r}); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", probe], env=ENVIRONMENT, text=True).strip() == "False"


def test_another_trl_is_recognised(tmp_path: Path) -> None:
    package = tmp_path / "trl"
    package.mkdir()
    (package / "__init__.py").write_text("__version__ = '0.24.0'\n")
    for script in ("decoding.py", "eval_sentiment_sst.py", "eval_perplexity_dist.py"):
        environment = {**ENVIRONMENT, "PYTHONPATH": str(tmp_path)}
        done = subprocess.run(command(script, "--help"), env=environment, capture_output=True, text=True)
        assert done.returncode == 1
        assert str(package) in done.stderr and "is not relc's" in done.stderr
