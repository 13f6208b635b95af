"""The reward model's script as a user runs it: it learns a preference from a file, survives a kill, names bad rows."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from tests.tiny import tiny_llama, tiny_tokenizer
from trl.jsonl import read_jsonl
from trl.models import RewardModel
from trl.rewards import PreferenceReward

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "examples/summarization/reward_model_summ.py"
ENVIRONMENT = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
GOOD, BAD = ("great", "lovely", "warm", "funny"), ("dull", "bad", "loud", "slow")
OTHER = ("film", "cast", "plot", "music", "camera", "ending", "story")


def pair(number: int) -> dict[str, str]:
    """The chosen summary holds a good word, the rejected one a bad word in its place, among others."""
    words = [OTHER[number % 7], OTHER[3 * number % 7]]
    chosen, rejected = ([*words[: number % 3], word, *words[number % 3 :]] for word in
                        (GOOD[number % 4], BAD[number // 4 % 4]))  # fmt: skip
    prompt = f"The {words[1]} was shown to friends in {number}. TL;DR:"
    return {"prompt": prompt, "chosen": " " + " ".join(chosen), "rejected": " " + " ".join(rejected)}


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("inputs")
    tiny_llama().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    rows = [pair(number) for number in range(96)]
    rows.insert(5, {**rows[0], "rejected": rows[0]["chosen"]})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"model": str(folder / "model"), "pairs": str(folder / "pairs.jsonl")}


def command(names: dict[str, str], out: Path, *more: str) -> list[str]:
    flags = (
        f"--model_name {names['model']} --dataset {names['pairs']} --output_dir {out} --eval_pairs 24 --batch_size 12"
        " --learning_rate 5e-3 --epochs 10 --save_steps 4 --eval_every 20 --seed 3 --loss_mode span_nopad"
    )
    return [sys.executable, SCRIPT, *flags.split(), *more]


def launch(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)


def timeless(folder: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_jsonl(folder / "metrics.jsonl")]


@pytest.fixture(scope="module")
def whole(names, tmp_path_factory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "run"
    done = launch(*command(names, out))
    assert done.returncode == 0, done.stderr[-3000:]
    return out, done


def test_accuracy_rises_and_the_model_can_be_used(whole):
    out, done = whole
    evaluations = [row for row in read_jsonl(out / "metrics.jsonl") if "eval/accuracy" in row]
    assert [row["step"] for row in evaluations] == [0, 20, 40, 60]
    assert evaluations[0]["eval/accuracy"] < 0.9  # an untrained head prefers some words, but knows nothing
    assert evaluations[-1]["eval/accuracy"] >= 0.95
    assert "left out 1 of 97 rows of two equal texts" in done.stderr
    text, final = done.stdout.strip().splitlines()[-2:]
    assert text.startswith("held-out pairwise accuracy")
    assert json.loads(final)["eval/accuracy"] == evaluations[-1]["eval/accuracy"]
    assert json.loads(final)["steps"] == 60
    assert (out / "calibration.png").stat().st_size > 1000

    reward = PreferenceReward(out, device="cpu")
    good, bad = reward(prompts=[pair(500)["prompt"]] * 2, completions=[pair(500)["chosen"], pair(500)["rejected"]])
    assert good > bad
    assert AutoModel.from_pretrained(out).config.model_type == "llama"
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-56", "checkpoint-60"]


def test_a_killed_run_goes_on_to_the_same_end(names, whole, tmp_path):
    out = tmp_path / "run"
    running = subprocess.Popen(
        command(names, out), cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 240
    while not (out / "checkpoint-8").exists():
        assert running.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    running.send_signal(signal.SIGKILL)
    running.wait()
    assert not (out / "config.json").exists()  # it was not finished

    again = launch(*command(names, out, "--resume"))
    assert again.returncode == 0, again.stderr[-3000:]
    assert "resumed from" in again.stderr
    assert timeless(out) == timeless(whole[0])
    ours, theirs = (RewardModel.from_pretrained(folder).state_dict() for folder in (out, whole[0]))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_dry_run_prints_the_plan_and_writes_nothing(names, tmp_path):
    done = launch(*command(names, tmp_path / "run", "--dry_run", "--num_frozen_layers", "1"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "72 from" in done.stdout
    assert "24 held out" in done.stdout
    assert "60 of up to 12 pairs" in done.stdout
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("row", "flags", "message"),
    [
        ({"prompt": "A TL;DR:", "chosen": "", "rejected": "b"}, [], "line 98: chosen is empty"),
        (None, ["--max_length", "5000"], "max_length is 5000, but the reward model has 128 positions"),
    ],
)
def test_bad_input_is_one_clear_line(names, tmp_path, row, flags, message):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text(Path(names["pairs"]).read_text() + (json.dumps(row) + "\n" if row else ""))
    done = launch(*command({**names, "pairs": str(pairs)}, tmp_path / "run", *flags))
    assert done.returncode != 0
    assert "error: " in done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
