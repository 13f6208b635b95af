"""Four-model PPO as a user runs it: reward model, value network, references of all kinds, adjustments, PPO-ptx."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.rewards.toy_classifiers import save_classifier
from tests.tiny import perturb_weights, tiny_llama, tiny_tokenizer
from trl.jsonl import read_jsonl
from trl.models import RewardModel
from trl.rewards import PreferenceReward

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = "examples/summarization/ppo_summ_rlhf.py"
ENVIRONMENT = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
POST = "SUBREDDIT: r/film\nTITLE: {0}\nPOST: {0} film was a quiet wonder, and the acting was better.\nTL;DR:"


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> dict[str, str]:
    """A policy, a reward model with the same tokenizer, posts, plain text, a guard: each as a local path."""
    folder = tmp_path_factory.mktemp("inputs")
    tokenizer = tiny_tokenizer()
    policy = tiny_llama(layers=4)
    policy.config.max_position_embeddings = 512
    policy.save_pretrained(folder / "policy")
    reward_lm = tiny_llama(seed=3)
    reward_lm.config.max_position_embeddings = 512
    reward_model = RewardModel.from_pretrained(reward_lm)
    perturb_weights(reward_model.head, seed=4, scale=0.5)
    reward_model.save_pretrained(folder / "reward")
    for name in ("policy", "reward"):
        tokenizer.save_pretrained(folder / name)
    reward_model.save_pretrained(folder / "endless")
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.bos_token = None
    tokenizer.save_pretrained(folder / "endless")
    (folder / "code").mkdir()
    torch.save({"v_head.weight": torch.ones(1, 32), "x": Path}, folder / "code" / "pytorch_model.bin")
    words = ("What", "A", "Nothing", "This", "I", "It", "The", "Such", "You", "My", "Bad", "Dull")
    rows = [{"prompt": POST.format(word), "label": f"{word} film was lovely."} for word in words]
    (folder / "posts").mkdir()
    for split in ("train", "valid"):
        (folder / "posts" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "text.jsonl").write_text(json.dumps({"text": "The film was a quiet wonder. " * 60}) + "\n")
    save_classifier(folder / "guard", ["clean", "noise"])
    files = {"policy": "policy", "reward": "reward", "posts": "posts", "text": "text.jsonl", "guard": "guard"}
    files |= {"endless": "endless", "code": "code"}
    return {name: str(folder / file) for name, file in files.items()}


def launch(names: dict[str, str], out: Path, *more: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    flags = (
        f"{SCRIPT} --model_name {names['policy']} --query_dataset {names['posts']} --model_save_path {out}"
        f" --reward_model_ckpt_path {names['reward']} --output_min_length 4 --output_max_length 6"
        " --batch_size 6 --mini_batch_size 6 --learning_rate 0.003 --steps 2"
    )
    done = subprocess.run(
        [sys.executable, *flags.split(), *more], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_four_models_train_and_are_saved(names, tmp_path):
    """Scores are the reward model's own, its plan is printed, policy and value network move, and both reload."""
    done = launch(names, tmp_path, f"--value_model_path={names['reward']}", "--value_learning_rate=0.01",
                  "--eval_every=1", "--eval_prompts=4")  # fmt: skip
    for name in ("policy", "reference", "reward model", "value model", "total"):
        assert any(line.startswith(name) for line in done.stderr.splitlines()), name
    samples = read_jsonl(tmp_path / "samples.jsonl")
    preference = PreferenceReward(names["reward"])
    expected = preference(prompts=[row["query"] for row in samples], completions=[row["response"] for row in samples])
    assert [row["score"] for row in samples] == pytest.approx(expected, abs=1e-4)
    metrics = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [0, 1, 2]
    assert all("eval/score" in row for row in metrics)
    first = metrics[1]
    assert first["objective/score"] == pytest.approx(first["reward/preference"], abs=1e-5)
    assert abs(first["objective/rlhf_reward"]) < 5
    value = RewardModel.from_pretrained(tmp_path / "value_model")
    before = RewardModel.from_pretrained(names["reward"])
    assert not torch.equal(value.head.weight, before.head.weight)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.num_hidden_layers == 4


def test_critic_rewards_join_with_the_score_out_of_ten(names, tmp_path):
    """The attribution critic asks the reward model about documents of the data."""
    launch(names, tmp_path, "--use_intrinsic_reward", "--critic=attribution", "--intrinsic_reward_threshold=100",
           "--positive_reward_value=0.5", "--negative_reward_value=-0.5",
           "--critic_score_bounds", "-2", "2")  # fmt: skip
    metrics = read_jsonl(tmp_path / "metrics.jsonl")
    assert sum(row["critic/requests"] for row in metrics) == 12
    assert any(row["objective/intrinsic"] for row in metrics)
    critiques = read_jsonl(tmp_path / "critiques.jsonl")
    assert all(0 <= row["request"]["score"] <= 10 for row in critiques)
    assert critiques[0]["request"]["document"].endswith("film was a quiet wonder, and the acting was better.")


def test_adapter_reference_and_pretraining_mix(names, tmp_path):
    launch(names, tmp_path, "--reference=adapter", "--lora_r=4", f"--ptx_file={names['text']}", "--ptx_coef=0.5")
    metrics = read_jsonl(tmp_path / "metrics.jsonl")
    assert metrics[0]["objective/kl"] == 0.0  # the adapter starts as no change at all
    assert metrics[0]["ppo/loss/pretraining"] > 1
    base = AutoModelForCausalLM.from_pretrained(names["policy"])
    assert PeftModel.from_pretrained(base, tmp_path).peft_config["default"].r == 4


def test_shared_reference_and_adjusted_scores(names, tmp_path):
    launch(names, tmp_path, "--num_shared_layers=2", "--length_penalty=0.25", "--min_words=30",
           f"--gibberish_guard={names['guard']}", "--gibberish_penalty=2", "--nan_policy=renormalise")  # fmt: skip
    for row in read_jsonl(tmp_path / "metrics.jsonl"):
        assert row["reward/length_penalty"] > 0
        assert 0 < row["reward/gibberish_penalty"] < 2
        expected = row["reward/preference"] - row["reward/length_penalty"] - row["reward/gibberish_penalty"]
        assert row["objective/score"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--reference=shared"], "--reference shared and --num_shared_layers None disagree"),
        (["--ptx_coef=0.5"], "--ptx_coef and --ptx_file go together"),
        (["--reward_model_ckpt_path=no/such"], "'no/such' is neither a local folder nor found on the hub"),
        (["--gibberish_guard=no/such"], "cannot load the classifier 'no/such'"),
        (["--critic_score_bounds", "3", "3"], "--critic_score_bounds are 3.0 and 3.0"),
        (["--reward_model_ckpt_path={endless}"], "the reward model's tokenizer has no EOS token"),
        (
            ["--reward_model_ckpt_path={code}", "--reward_model_config={policy}"],
            "holds more than tensors, such as code",
        ),
        (["--value_model_path={code}", "--reward_model_config={policy}"], "holds more than tensors, such as code"),
        (["--value_model_path={reward}", "--num_shared_layers=2"], "expected 1 to 1"),
    ],
)
def test_bad_input_is_one_clear_error_before_training(names, tmp_path, flags, message):
    done = launch(names, tmp_path / "run", *(flag.format(**names) for flag in flags), check=False)
    assert done.returncode in (1, 2)
    shown = " ".join(done.stderr.replace("│", " ").split())  # bad flags are shown in a box
    assert message in shown
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
