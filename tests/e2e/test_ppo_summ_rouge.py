"""ppo_summ_rouge.py as a user runs it: the published command, critics with and without an LLM, what it refuses."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.fake_openai import Answer, FakeOpenAI, completion
from tests.tiny import tiny_llama, tiny_tokenizer
from trl.critic import CritiqueRequest
from trl.critic.attribution import AttributionCritic
from trl.critic.template import single_line
from trl.jsonl import read_jsonl
from trl.rewards import RougeReward
from trl.summary import check_policy, of_documents

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "examples/summarization/ppo_summ_rouge.py"
ENVIRONMENT = os.environ | {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "OPENAI_API_KEY": "sk-secret-of-the-test",
}
WORDS = ("What", "A", "Nothing", "This", "I", "It", "The", "Such", "You", "My")
# words and letters that the tiny model's noise has too
LABEL = "The film was a quiet wonder and it is too long: a b c d e f g h i j k l m n o p q r s t u v w x y z"
FLAWED = re.compile(r"Summary:\n(?P<summary>.*)\n\nScore \(out of 10\): (?P<score>.*)\n\nIdentified.*:\s*\Z")


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> dict[str, str]:
    """A policy of 13 blocks and ten posts, one of them twice with different human summaries, as local paths."""
    folder = tmp_path_factory.mktemp("inputs")
    policy = tiny_llama(layers=13)
    policy.config.max_position_embeddings = 512  # rotary positions know no limit of their own
    policy.save_pretrained(folder / "policy")
    tiny_tokenizer().save_pretrained(folder / "policy")
    rows = [{"prompt": f"TITLE: {word}\nPOST: {word} film\nTL;DR:", "label": f"{word} {LABEL}"} for word in WORDS[:9]]
    rows.append({**rows[0], "label": "My music is loud, the camera shakes"})
    (folder / "posts").mkdir()
    for split in ("train", "valid"):
        (folder / "posts" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"policy": str(folder / "policy"), "posts": str(folder / "posts")}


def launch(*command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


def small(names: dict[str, str], out: Path, *more: str) -> list[str]:
    flags = (
        f"--model_name {names['policy']} --query_dataset {names['posts']} --output_dir {out} --batch_size 5"
        " --mini_batch_size 5 --output_min_length 20 --output_max_length 24 --learning_rate 0.003"
    )
    return [SCRIPT, *flags.split(), *more]


def references(names: dict[str, str]) -> dict[str, list[str]]:
    found = defaultdict(list)
    for row in read_jsonl(Path(names["posts"]) / "train.jsonl"):
        found[row["prompt"]].append(row["label"])
    return found


def quote_last_word(body: dict[str, Any]) -> Answer:
    """What a critic would say who finds the last word of every summary flawed."""
    summary = FLAWED.search(body["messages"][-1]["content"])
    assert summary is not None
    words = re.findall("[A-Za-z]+", summary["summary"])
    return completion(f"Span 1: {words[-1]} (Label: Irrelevant)" if words else "None identified")


def test_published_command(names, tmp_path):
    out = tmp_path / "run"
    flags = (
        "--use_instric_reward --positive_reward_value 0.5 --negative_reward_value -0.5"
        " --intrinsic_reward_threshold 100 --use_score_scaling --num_shared_layers 12"
        f" --model_name {names['policy']} --epochs 2 --output_min_length 30 --output_max_length 50 --batch_size 8"
        " --mini_batch_size 8 --gradient_accumulation_steps 1 --ppo_epochs 4 --learning_rate 1.41e-5 --target_kl 6"
        " --kl_penalty kl --prompt_file prompts/prompt_summ_3shot_rouge_v2.txt --save_freq 3"
        f" --model_save_path {out} --query_dataset {names['posts']}"
    )
    prefix = ["-m", "accelerate.commands.launch", "--num_processes", "1", "--mixed_precision", "bf16"]
    with FakeOpenAI(quote_last_word) as critic:
        launch(*prefix, "--dynamo_backend", "no", SCRIPT, *flags.split(), "--critic_base_url", critic.url)

    metrics = read_jsonl(out / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]  # 8 and 2 of ten posts, 2 epochs
    assert metrics[0]["objective/kl"] == 0
    assert (out / "checkpoint-3" / "config.json").exists()
    settings = json.loads((out / "run.json").read_text())["args"]
    assert settings["ppo_config"]["use_score_scaling"] is True
    before, after = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (names["policy"], out))
    moved = {re.search(r"\d+", name)[0] for name, weight in before.items() if not torch.equal(weight, after[name])
             and "layers" in name}  # fmt: skip
    assert moved == {"12"}

    samples = read_jsonl(out / "samples.jsonl")
    assert len(samples) == 20
    known = references(names)
    expected = RougeReward()(
        completions=[row["response"] for row in samples], references=[known[row["query"]] for row in samples]
    )
    assert [row["score"] for row in samples] == pytest.approx(expected)
    assert 0 < sum(expected) / 20 < 100
    for row in samples:
        lengths = len(row["tokens"])
        assert lengths <= 50 and (lengths >= 30 or row["tokens"][-1]["text"] == "")
        values = {token["intrinsic"] for token in row["tokens"] if token["text"].strip()}
        assert values <= {0.5, -0.5}
        assert row["status"] in ("ok", "none") or not row["response"].strip()
    assert sum(any(token["intrinsic"] < 0 for token in row["tokens"]) for row in samples) > 10

    # the critic saw the post, not the whole prompt, and the score out of ten, which is ROUGE / 10
    asked = [body["messages"][-1]["content"].split("#####")[-1] for body in critic.requests]
    asked = [text for text in asked if FLAWED.search(text)]
    assert all("TITLE" not in text and "TL;DR" not in text and "<|endoftext|>" not in text for text in asked)
    shown = {(found["summary"], found["score"]) for found in map(FLAWED.search, asked) if found}
    for row in samples:
        if row["response"].strip():
            assert (single_line(row["response"]), f"{row['score'] / 10:.1f}") in shown
    assert any(f"Document:\n{WORDS[0]} film\n" in text for text in asked)


@pytest.fixture(scope="module")
def attributed(names, tmp_path_factory) -> Path:
    """The run folder of the attribution critic."""
    out = tmp_path_factory.mktemp("attribution") / "run"
    flags = ("--use_intrinsic_reward", "--critic=attribution", "--rouge=rouge1", "--positive_reward_value=0.25")
    launch(*small(names, out, *flags, "--steps=2", "--eval_every=2", "--eval_prompts=3"))
    return out


def test_attribution_asks_for_the_reward_of_each_document(names, attributed):
    rows = [
        {"query": prompt, "document": prompt.split("POST: ")[1].removesuffix("\nTL;DR:"), "label": label}
        for prompt, labels in references(names).items()
        for label in labels
    ]
    document = {row["query"]: row["document"] for row in rows}
    samples = [row for row in read_jsonl(attributed / "samples.jsonl") if row["response"].strip()]
    critic = AttributionCritic(of_documents(RougeReward(), rows), "summary")
    critiques = critic.critique(
        [CritiqueRequest(single_line(row["response"]), document[row["query"]], row["score"] / 10) for row in samples]
    )
    assert [row["status"] for row in samples] == [critique.status for critique in critiques]
    assert [[span["text"] for span in row["spans"]] for row in samples] == [
        [span.text for span in critique.spans] for critique in critiques
    ]
    assert sum(row["status"] == "ok" for row in samples) > 3
    for row in samples:
        marked = {token["intrinsic"] for token in row["tokens"]}
        assert marked <= ({0.0, 0.25, -1.0} if row["status"] in ("ok", "none") else {0.0})
    metrics = read_jsonl(attributed / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2]
    assert "eval/score" in metrics[0] and "eval/score" in metrics[2] and "eval/score" not in metrics[1]


def test_replay_of_a_run_gives_its_rewards(names, attributed, tmp_path):
    recording = attributed / "critiques.jsonl"
    flags = ("--use_intrinsic_reward", "--critic_replay", str(recording), "--positive_reward_value=0.25", "--steps=1")
    launch(*small(names, tmp_path / "run", *flags))
    again, before = (read_jsonl(folder / "samples.jsonl")[:5] for folder in (tmp_path / "run", attributed))
    assert [row["tokens"] for row in again] == [row["tokens"] for row in before]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--use_intrinsic_reward", "--critic", "lexicon"), "summar"),
        (("--critic_score_bounds", "10", "0"), "expected the lower one first"),
        (("--output_min_length", "30"), "expected 1 <= min <= max"),
    ],
)
def test_what_cannot_be_is_one_line(names, tmp_path, flags, message):
    done = launch(*small(names, tmp_path / "run", *flags), check=False)
    assert done.returncode != 0
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_dry_run_shows_the_human_summary_to_environment_and_critic(names, tmp_path):
    done = launch(*small(names, tmp_path / "run", "--use_intrinsic_reward", "--critic=attribution", "--dry_run"))
    assert "environment     rouge1 (a test text scores 100.000)" in done.stdout
    assert "test request    none" in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_policy_must_be_named():
    done = launch(SCRIPT, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "error: --model_name is needed: a supervised checkpoint, such as one of sft_summ.py"


def test_a_start_that_never_learned_to_sum_up_is_said(caplog):
    with pytest.raises(SystemExit, match="--model_name is needed: a supervised checkpoint"):
        check_policy(None)
    check_policy("outputs/sft")
    assert not caplog.records
    check_policy("builtin:smollm2")
    assert "never learned to sum up" in caplog.text
