"""Every training script in two processes, under DDP and under ZeRO, as the manual starts them; tiny local models."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.distributed.launching import accelerate, run
from tests.rewards.toy_classifiers import save_classifier
from tests.tiny import perturb_weights, tiny_llama, tiny_tokenizer
from trl.jsonl import read_jsonl
from trl.models import RewardModel

pytestmark = pytest.mark.distributed

WORDS = ("What", "A", "Nothing", "This", "I", "It", "The", "Such", "You", "My", "Bad", "Dull")
REWARD = """
def score(completions, completion_ids, **columns):
    return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, data and a reward function, as local paths."""
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    for name, layers in (("policy", 4), ("reward", 3)):
        lm = tiny_llama(layers=layers, seed=layers)
        lm.config.max_position_embeddings = 512  # rotary positions know no limit of their own
        if name == "policy":
            lm.save_pretrained(folder / name)
        else:
            reward_model = RewardModel.from_pretrained(lm)
            perturb_weights(reward_model.head, seed=4, scale=0.5)
            reward_model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    save_classifier(folder / "sentiment", ["NEGATIVE", "POSITIVE"])
    save_classifier(folder / "toxicity", ["nothate", "hate"])
    post = "SUBREDDIT: r/film\nTITLE: {0}\nPOST: {0} film was a quiet wonder, and the acting was better.\nTL;DR:"
    rows: dict[str, list[dict[str, Any]]] = {
        "reviews": [{"text": f"{word} film was a quiet wonder and the acting was better. " * 4} for word in WORDS],
        "prompts": [{"prompt": {"text": f"{word} film was the", "toxicity": 0.9}} for word in WORDS],
        "posts": [{"prompt": post.format(word), "label": f" {word} film was lovely."} for word in WORDS],
        "pairs": [{"prompt": post.format(word), "chosen": " lovely film", "rejected": " bad film"} for word in WORDS],
        "tasks": [{"contents": [{"role": "user", "parts": [{"text": f"{word} film"}]}]} for word in WORDS],
    }
    for name, lines in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, held_out in (("posts", "valid"), ("reviews", "test")):
        (folder / name).mkdir()
        for split in ("train", held_out):
            (folder / name / f"{split}.jsonl").write_bytes((folder / f"{name}.jsonl").read_bytes())
    (folder / "mine.py").write_text(REWARD)
    return folder


PPO = "--batch_size 2 --mini_batch_size 2 --steps 2 --learning_rate 0.01"
CRITIC = "--use_intrinsic_reward --negative_reward_value -0.5 --intrinsic_reward_threshold 100 --critic"
COMMANDS = {
    "sentiment": f"sentiment/ppo_sentiment.py {PPO} {CRITIC} lexicon --query_dataset IN/reviews --max_new_tokens 6"
    " --min_new_tokens 4 --reward_model sentiment-analysis:IN/sentiment --save_freq 1 --eval_every 1 --eval_prompts 3",
    "toxicity": f"toxicity/ppo_toxicity.py {PPO} {CRITIC} lexicon --query_dataset IN/prompts.jsonl"
    " --reward_model IN/toxicity --output_min_length 4 --output_max_length 6",
    "peft": f"toxicity/ppo_toxicity_peft.py {PPO} --query_dataset IN/prompts.jsonl --reward_model IN/toxicity"
    " --output_min_length 4 --output_max_length 6 --merge",
    "rouge": f"summarization/ppo_summ_rouge.py {PPO} {CRITIC} attribution --query_dataset IN/posts"
    " --output_min_length 4 --output_max_length 6",
    "rlhf": f"summarization/ppo_summ_rlhf.py {PPO} --query_dataset IN/posts --reward_model_ckpt_path IN/reward"
    " --value_model_path IN/reward --output_min_length 4 --output_max_length 6",
    "custom": f"custom/ppo_custom.py {PPO} --data IN/tasks.jsonl --reward IN/mine.py:score --max_new_tokens 6",
    "sft": "summarization/sft_summ.py --dataset IN/posts --batch_size 2 --steps 2 --eval_rows 3 --eval_summaries 2"
    " --max_new_tokens 4 --save_steps 1 --learning_rate 0.01",
    "reward": "summarization/reward_model_summ.py --dataset IN/pairs.jsonl --eval_pairs 3 --batch_size 2 --steps 2"
    " --save_steps 1 --learning_rate 0.01",
}
UNSHARED = ("peft", "sft", "reward")
"""Scripts that share no layers of the policy with a reference."""


def launch(config: str | list[str], name: str, inputs: Path, out: Path, *more: str) -> None:
    """A script's run in ``out``; ``config`` is a file of configs/accelerate, and flags of the launcher behind it."""
    flags = COMMANDS[name].replace("IN/", f"{inputs}/").split()
    run(
        *accelerate(*([config] if isinstance(config, str) else config)),
        f"examples/{flags[0]}",
        *flags[1:],
        f"--model_name={inputs}/policy",
        f"--output_dir={out}",
        *more,
    )


def check_run(name: str, inputs: Path, out: Path, saved_dtype: torch.dtype) -> list[dict[str, Any]]:
    """Metrics of both steps and a model that has learned; returns the rows of the steps."""
    rows = [row for row in read_jsonl(out / "metrics.jsonl") if row["step"] > 0]
    assert [row["step"] for row in rows if "time/step" in row] == [1, 2]
    for row in rows:
        assert all(math.isfinite(value) for value in row.values() if isinstance(value, float)), row
    if name == "reward":
        trained = RewardModel.from_pretrained(out).backbone
        before = AutoModelForCausalLM.from_pretrained(inputs / "policy", dtype=torch.float32).base_model
    else:
        trained = AutoModelForCausalLM.from_pretrained(out / "merged" if name == "peft" else out)
        assert trained.dtype == saved_dtype
        before = AutoModelForCausalLM.from_pretrained(inputs / "policy", dtype=trained.dtype)
    moved = [n for n, w in trained.state_dict().items() if not torch.equal(w, before.state_dict()[n])]
    assert moved
    return [row for row in rows if "time/step" in row]


@pytest.mark.parametrize("name", COMMANDS)
def test_two_processes(name: str, inputs: Path, tmp_path: Path) -> None:
    more = () if name in UNSHARED else ("--num_shared_layers=2",)
    launch("multi_cpu", name, inputs, tmp_path / "run", *more)
    rows = check_run(name, inputs, tmp_path / "run", torch.float32)
    if name in ("sft", "reward"):
        return
    for row in rows:  # two of each process
        assert row["tokens/queries"] / row["tokens/queries_len_mean"] == 4
        if "critic/requests" in row:
            assert row["critic/requests"] + row["critic/skipped"] == 4
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert [row["step"] for row in samples] == [1, 1, 2, 2]  # the main process's


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero(stage: int, name: str, inputs: Path, tmp_path: Path) -> None:
    """The shipped files as they are: bf16."""
    more = ("--num_shared_layers=2",) if name not in UNSHARED and stage < 3 else ()
    launch(f"deepspeed_zero{stage}", name, inputs, tmp_path / "run", *more)
    check_run(name, inputs, tmp_path / "run", torch.bfloat16)
    if name == "sentiment":
        assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-1").config.num_hidden_layers == 4


@pytest.mark.parametrize(
    ("config", "precision"), [("multi_cpu", "bf16"), ("deepspeed_zero1", "no"), ("deepspeed_zero3", "no")]
)
def test_the_other_precision(config: str, precision: str, inputs: Path, tmp_path: Path) -> None:
    launch([config, "--mixed_precision", precision], "sentiment", inputs, tmp_path / "run")
    check_run("sentiment", inputs, tmp_path / "run", torch.float32)


def test_zero3_divides_the_reward_model_and_scores_as_ever(inputs: Path, tmp_path: Path) -> None:
    """Sampled alike, since the whole copy that samples is the same; fp32, so that scores are too."""
    scores = {}
    for device in (None, "cpu"):
        out = tmp_path / f"run_{device}"
        more = ("--eval_every=1", "--eval_prompts=3", f"--reward_model_device={device}", "--rw_batch_size=1")
        launch(["deepspeed_zero3", "--mixed_precision", "no"], "rlhf", inputs, out, *more)
        rows = check_run("rlhf", inputs, out, torch.float32)
        scores[device] = [row["objective/score"] for row in rows] + [row["eval/score"] for row in rows]
    assert scores[None] == pytest.approx(scores["cpu"], abs=1e-5)


@pytest.mark.parametrize(
    ("name", "more", "message"),
    [
        ("sentiment", ["--num_shared_layers=2"], "error: policy and reference share 2 blocks, but ZeRO-3 divides"),
        ("sentiment", ["--critic=score"], "error: this critic asks the policy's initial weights, which ZeRO-3 divides"),
        (
            "rlhf",
            ["--use_intrinsic_reward", "--critic=attribution"],
            "error: the attribution critic asks the reward model, which ZeRO-3 divides",
        ),
    ],
)
def test_what_zero3_can_not_do_is_one_line(
    name: str, more: list[str], message: str, inputs: Path, tmp_path: Path
) -> None:
    flags = COMMANDS[name].replace("IN/", f"{inputs}/").split()
    command = [*accelerate("deepspeed_zero3"), f"examples/{flags[0]}", *flags[1:], f"--model_name={inputs}/policy"]
    done = run(*command, f"--output_dir={tmp_path / 'run'}", *more, check=False)
    assert done.returncode != 0
    assert any(line.startswith(message) for line in done.stderr.splitlines())
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
