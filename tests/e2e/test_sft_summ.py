"""sft_summ.py as a user runs it: files that load anywhere, a kill that costs nothing, errors in one line."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import tiny_llama, tiny_tokenizer
from trl.generation import Sampling, sample_continuations
from trl.jsonl import read_jsonl
from trl.rewards import RougeReward

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "examples/summarization/sft_summ.py"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny model and data whose summaries are the same four words, so that they can be learned."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny_llama(layers=3).save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    (folder / "data").mkdir()
    for name, count in (("train", 60), ("valid", 9)):
        rows = [
            {
                "prompt": f"SUBREDDIT: r/films\nPOST: Film {i} of {name} was bad.\nTL;DR:",
                "label": " Bad film, no sense.",
            }
            for i in range(count)
        ]
        (folder / "data" / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return ["--model_name", str(folder / "model"), "--dataset", str(folder / "data"), "--batch_size", "8"]


def command(*flags: str) -> list[str]:
    return [sys.executable, SCRIPT, *flags]


def environment() -> dict[str, str]:
    settings = {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return os.environ | settings


def run(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*flags), cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=280, check=False
    )


def timeless(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_jsonl(folder / "metrics.jsonl")]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def test_a_run_learns_reports_and_saves_a_plain_model(inputs: list[str], tmp_path: Path) -> None:
    flags = ["--learning_rate", "1e-2", "--epochs", "6", "--eval_rows", "8", "--eval_summaries", "5"]
    flags += ["--max_new_tokens", "30", "--warmup_ratio", "0.1", "--gradient_accumulation_steps", "2"]
    done = run(*inputs, *flags, "--num_frozen_layers", "1", "--output_dir", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr[-3000:]
    final = json.loads(done.stdout.splitlines()[-1])
    rows = read_jsonl(tmp_path / "out" / "metrics.jsonl")
    first, last = (row for row in rows if "eval/loss" in row)
    assert final["steps"] == last["step"] == 48 and final["eval/loss"] == last["eval/loss"] < 0.2 * first["eval/loss"]
    assert final["rouge1_greedy"] == 100 and 50 < final["rouge1_sampled"] <= 100
    assert json.loads((tmp_path / "out" / "run.json").read_text())["args"]["learning_rate"] == 1e-2

    # The folder is an ordinary model, and it writes the summaries that the scores are of.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    summaries = read_jsonl(tmp_path / "out" / "summaries.jsonl")
    assert [row["query"].split()[4] for row in summaries] == list("01234")
    prompts = [row["query"] for row in summaries]
    again = sample_continuations(model, tokenizer, prompts, Sampling(max_new_tokens=30, do_sample=False), seed=0)
    assert [text for [text] in again] == [row["greedy"] for row in summaries] == [" Bad film, no sense."] * 5
    scores = RougeReward()(
        completions=[row["sampled"] for row in summaries], references=[row["label"] for row in summaries]
    )
    assert final["rouge1_sampled"] == pytest.approx(sum(score or 0.0 for score in scores) / 5)


def test_a_killed_run_resumes_as_if_nothing_had_happened(inputs: list[str], tmp_path: Path) -> None:
    flags = [*inputs, "--epochs", "12", "--save_steps", "5", "--eval_summaries", "0", "--learning_rate", "1e-3"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    done = run(*flags, "--output_dir", str(whole))
    assert done.returncode == 0, done.stderr[-3000:]

    log = (tmp_path / "log.txt").open("w")
    process = subprocess.Popen(
        command(*flags, "--output_dir", str(cut)), cwd=ROOT, env=environment(), stdout=log, stderr=log
    )
    deadline = time.monotonic() + 250
    while not (cut / "checkpoint-10").exists():
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "log.txt").read_text()[-3000:]
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    log.close()
    assert not (cut / "model.safetensors").exists()

    refused = run(*flags, "--output_dir", str(cut))
    assert refused.returncode == 1 and "already holds a run" in refused.stderr
    resumed = run(*flags, "--output_dir", str(cut), "--resume")
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert timeless(cut) == timeless(whole)
    first, second = weights(whole), weights(cut)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    assert sorted(path.name for path in cut.glob("checkpoint-*")) == ["checkpoint-95", "checkpoint-96"]


def test_a_dry_run_prints_the_plan_and_one_file_gives_both_sets(inputs: list[str], tmp_path: Path) -> None:
    rows = (Path(inputs[3]) / "train.jsonl").read_text().splitlines()
    (tmp_path / "all.jsonl").write_text("\n".join([*rows[-5:], *rows]) + "\n")  # 5 of the last posts come twice
    flags = [*inputs, "--dataset", str(tmp_path / "all.jsonl"), "--eval_rows", "20", "--eval_summaries", "0"]
    done = run(*flags, "--dry_run", "--num_frozen_layers", "2", "--output_dir", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "posts       40 from" in done.stdout and "20 held out" in done.stdout and "steps       5 of" in done.stdout
    model = tiny_llama(layers=3)
    trained = [p.numel() for p in (*model.model.layers[2].parameters(), *model.model.norm.parameters())]
    trained += [p.numel() for p in model.lm_head.parameters()]
    assert f"{sum(trained):,} of {model.num_parameters():,} parameters are trained" in done.stdout
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--eval_split", "nosuch"], "nosuch"),
        (["--max_length", "4"], "rows have more than 4 tokens; allow longer ones (max_length)"),
        (["--resume", "/no/such/checkpoint-3"], "is not a whole checkpoint"),
    ],
)
def test_what_the_user_can_mend_ends_in_one_line(
    flags: list[str], says: str, inputs: list[str], tmp_path: Path
) -> None:
    done = run(*inputs, "--output_dir", str(tmp_path / "out"), *flags)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: ") and says in done.stderr.splitlines()[-1]


def test_the_help_is_complete_and_quick() -> None:
    done = run("--help")
    assert done.returncode == 0
    for flag in ("model_name", "dataset", "learning_rate", "batch_size", "gradient_accumulation_steps", "epochs"):
        assert f"--{flag}" in done.stdout
    for flag in ("steps", "max_length", "warmup_ratio", "gradient_checkpointing", "bf16", "seed", "save_steps"):
        assert f"--{flag}" in done.stdout
    code = "import sys; sys.path.insert(0, 'examples/summarization'); import sft_summ; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), check=False).returncode == 0
