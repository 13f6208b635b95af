"""The sentiment script as a user runs it: published flags, tiny local models, every critic that needs no network."""

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, BertConfig, BertForSequenceClassification, pipeline

from tests.tiny import tiny_llama, tiny_tokenizer
from trl.jsonl import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "examples/sentiment/ppo_sentiment.py"
ENVIRONMENT = os.environ | {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "OPENAI_API_KEY": "sk-secret-of-the-test",
}
REVIEW = "The film was a quiet wonder and the acting was better than anything I have seen this year. " * 4


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> dict[str, str]:
    """A policy, a classifier and reviews, each as a local path."""
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = tiny_tokenizer()
    tiny_llama(layers=4).save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        id2label={0: "NEGATIVE", 1: "POSITIVE"},
        label2id={"NEGATIVE": 0, "POSITIVE": 1},
    )
    torch.manual_seed(0)
    BertForSequenceClassification(config).save_pretrained(folder / "classifier")
    tokenizer.save_pretrained(folder / "classifier")
    rows = [{"text": f"{word} {REVIEW}"} for word in ("What", "A", "Nothing", "This", "I", "It", "The", "Such")]
    (folder / "reviews.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows * 3))
    return {name: str(folder / file) for name, file in
            (("policy", "policy"), ("classifier", "classifier"), ("reviews", "reviews.jsonl"))}  # fmt: skip


def published(names: dict[str, str], out: Path, *more: str) -> list[str]:
    """The published command's flags, with local names and small sizes."""
    flags = (
        "--use_instric_reward --positive_reward_value 0.5 --negative_reward_value -0.5"
        " --intrinsic_reward_threshold 10 --prompt_file prompts/prompt_sentiment_3shot_v2.txt --epochs 2"
        f" --query_dataset {names['reviews']} --min_new_tokens 4 --max_new_tokens 6 --num_shared_layers 2"
        f" --save_freq 2 --model_save_path {out} --ppo_config.model_name {names['policy']}"
        " --ppo_config.learning_rate 1.41e-5 --ppo_config.batch_size 8 --ppo_config.mini_batch_size 8"
        " --ppo_config.gradient_accumulation_steps 1 --ppo_config.target_kl 6.0 --ppo_config.kl_penalty kl"
        f" --ppo_config.ppo_epochs 4 --ppo_config.reward_model sentiment-analysis:{names['classifier']}"
    )
    return [*flags.split(), *more]


def launch(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_published_command_trains_and_saves_plain_files(names, tmp_path):
    out = tmp_path / "run"
    prefix = ["-m", "accelerate.commands.launch", "--num_processes", "1", "--mixed_precision", "bf16"]
    launch(*prefix, "--dynamo_backend", "no", SCRIPT, *published(names, out, "--critic", "lexicon"))

    metrics = read_jsonl(out / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]  # 24 reviews, 8 a step, 2 epochs
    assert metrics[0]["objective/kl"] == 0
    assert all(row["tokens/responses"] > 0 and row["ppo/skipped_minibatches"] == 0 for row in metrics)
    assert sum(row["critic/requests"] for row in metrics) > 0
    samples = read_jsonl(out / "samples.jsonl")
    assert len(samples) == 48
    for row in samples:
        written = "".join(token["text"] for token in row["tokens"])
        assert written == row["response"].replace("\r", " ").replace("\n", " ")
    model = AutoModelForCausalLM.from_pretrained(out)
    assert model.config.num_hidden_layers == 4
    assert pipeline("text-generation", str(out))("The film", max_new_tokens=2)
    assert AutoModelForCausalLM.from_pretrained(out / "checkpoint-4")
    assert "sk-secret" not in "".join(p.read_text(errors="ignore") for p in out.rglob("*.json*"))


def test_same_seed_same_run_and_an_old_run_is_not_overwritten(names, tmp_path):
    rows = []
    for name in ("a", "b"):
        done = launch(SCRIPT, *published(names, tmp_path / name, "--critic", "lexicon", "--steps", "2", "--seed", "5"))
        shown = [line.split("  ") for line in done.stderr.splitlines() if line.startswith("step ")]
        assert [line[0] for line in shown] == ["step 1/2", "step 2/2"]  # no terminal: one line per step
        assert [words.split()[0] for words in shown[0][1:4]] == ["reward", "KL", "critic"]
        rows.append([{k: v for k, v in row.items() if not k.startswith(("time/", "critic/latency"))}
                     for row in read_jsonl(tmp_path / name / "metrics.jsonl")])  # fmt: skip
    assert rows[0] == rows[1]
    again = launch(SCRIPT, *published(names, tmp_path / "a", "--critic", "lexicon"), check=False)
    assert again.returncode != 0
    assert "already holds a run" in again.stderr
    assert len(read_jsonl(tmp_path / "a" / "metrics.jsonl")) == 2


def test_dry_run_prints_the_plan_and_writes_nothing(names, tmp_path):
    done = launch(SCRIPT, *published(names, tmp_path / "run", "--critic", "lexicon", "--dry_run"))
    assert "48 samples" in done.stdout
    assert "wonderful" in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--ppo_config.batch_size", "12"], "batch_size (12) must be a multiple of"),
        (["--num_shared_layers", "9"], "expected 1 to 3"),
        (["--prompt_file", "no_such.txt", "--critic", "openai"], "no_such.txt"),
        (["--ppo_config.query_dataset", "no/such.jsonl"], "no/such.jsonl"),
        (["--ppo_config.model_name", "no/such-model"], "no/such-model"),
    ],
)
def test_bad_input_is_one_clear_error_before_training(names, tmp_path, flags, message):
    done = launch(SCRIPT, *published(names, tmp_path / "run", *flags), check=False)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert not (tmp_path / "run").exists()


def test_held_out_reward_is_measured_and_training_is_not_touched(names, tmp_path):
    """``--eval_every``: before the first step, as often as asked, after the last; the model learns the same."""
    plain, watched = tmp_path / "plain", tmp_path / "watched"
    more = ("--critic=lexicon", "--steps=3", "--learning_rate=0.01")
    launch(SCRIPT, *published(names, plain, *more))
    folder = tmp_path / "data"
    folder.mkdir()
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_bytes(Path(names["reviews"]).read_bytes())
    split_names = {**names, "reviews": str(folder)}
    launch(SCRIPT, *published(split_names, watched, *more, "--eval_every=2", "--eval_prompts=3"))
    rows = read_jsonl(watched / "metrics.jsonl")
    assert [(row["step"], "eval/score" in row) for row in rows] == [(0, True), (1, False), (2, True), (3, True)]
    assert rows[0]["eval/score"] != rows[3]["eval/score"]
    assert rows[0]["eval/no_verdict"] == 0
    assert (watched / "model.safetensors").read_bytes() == (plain / "model.safetensors").read_bytes()


def test_a_terminal_shows_a_bar_with_the_time_left(names, tmp_path):
    terminal, end = os.openpty()
    command = [sys.executable, SCRIPT, *published(names, tmp_path / "run", "--critic", "lexicon", "--steps", "2")]
    environment = ENVIRONMENT | {"TERM": "xterm", "COLUMNS": "160"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=end) as process:
        os.close(end)
        shown = b""
        with contextlib.suppress(OSError):  # Linux says so where the other end is closed
            while chunk := os.read(terminal, 65536):
                shown += chunk
    os.close(terminal)
    assert process.returncode == 0, shown[-2000:].decode(errors="replace")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert re.search(r"━ 0/2 +-:--:-- +first step", text)  # the time left is known after a step
    assert re.search(r"━ 2/2 +0:00:00 +reward [+-]\d.*KL .*critic hits \d+%.*s/step", text)
    assert "step 1/2" not in text
