"""Scripts on inputs that nobody means to give: odd prompts, models and rewards of NaN, servers that tell the key."""

import json
import logging
import math
import shutil
import sys
import traceback
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file, save_file

from examples.custom import ppo_custom
from examples.sentiment import ppo_sentiment
from tests.e2e.test_ppo_custom import flags as custom_flags
from tests.e2e.test_ppo_custom import task
from tests.e2e.test_ppo_sentiment import names, published
from tests.fake_openai import FakeOpenAI, completion, error
from tests.tiny import tiny_llama, tiny_tokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from trl.data.fitting import fit_prompts
from trl.failures import SettingError
from trl.jsonl import read_jsonl
from trl.report.heatmap import heatmap_text, measure_scale
from trl.run import run_script

__all__ = ["names", "task"]  # fixtures
pytestmark = pytest.mark.usefixtures("fresh_accelerator_state")

ODD = {
    "empty": "",
    "blank": " \n\t ",
    "control characters": "\x00\x07\x1b[31m\x7f\u202e\u2028",
    "emoji": "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽",
    "right to left": "שלום עולם مرحبا بالعالم",
    "one character, many code points": "e" + "\u0301" * 300,
    "100k characters": "word " * 20_000,
    "100k characters without a blank": "x" * 100_000,
    "twice": "The same film",
    "twice again": "The same film",
}


def run(monkeypatch: pytest.MonkeyPatch, script: ModuleType, *flags: str) -> str:
    """What the script says when it ends early; "" if it does not."""
    monkeypatch.setattr(sys, "argv", ["script.py", *flags])
    try:
        run_script(script.main)
    except SystemExit as stopped:
        return str(stopped.code)
    return ""


def test_odd_prompts_train_like_any_other(task: Path, tmp_path: Path, monkeypatch, caplog) -> None:
    """The policy has 128 positions: long prompts lose their beginning, by count."""
    rows = [{"contents": [{"role": "user", "parts": [{"text": text}]}], "level": 3} for text in ODD.values()]
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    quotes = ["Toxic Span 1: the", "", "None", "\x00", "Toxic Span 1: \u202e👩‍👩‍👧‍👦", "x" * 50_000]
    with FakeOpenAI([completion("OK"), *map(completion, quotes)]) as server:
        more = ("--use_intrinsic_reward", "--critic=openai", f"--critic_base_url={server.url}", "--eval_every=None")
        settings = {"data": tmp_path / "odd.jsonl", "batch_size": 5, "mini_batch_size": 5, "chat_template": "off"}
        settings |= {"critic_style": "toxicity", "prompt_file": task / "critic.txt", "epochs": 2}
        reward = tmp_path / "half.py"
        reward.write_text("def half(completions, **_):\n    return [0.5 * len(text) % 1 for text in completions]\n")
        said = run(monkeypatch, ppo_custom, *custom_flags(task, f"{reward}:half", tmp_path / "run", *more, **settings))
    assert said == ""
    assert "3 of 10 prompts have more than 122 tokens and lose their beginnings" in caplog.text
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]
    assert all(math.isfinite(row["ppo/loss/total"]) for row in metrics)
    samples = read_jsonl(tmp_path / "run" / "samples.jsonl")
    assert sorted(row["query"] for row in samples) == sorted([*ODD.values()] * 2)
    scale = measure_scale(samples, "kl")
    for row in samples:
        shown = heatmap_text(row, "kl", scale).plain
        assert not any(character in shown for character in "\x00\x07\x1b\u202e")


def test_prompts_lose_their_beginning_where_the_context_ends(caplog) -> None:
    rows = [{"input_ids": list(range(n)), "query": str(n)} for n in (3, 12, 20)]
    fitted = fit_prompts(rows, positions=16, new_tokens=4)
    assert [row["input_ids"] for row in fitted] == [[0, 1, 2], list(range(12)), list(range(8, 20))]
    assert [row["query"] for row in fitted] == ["3", "12", "20"]
    assert "1 of 3 prompts have more than 12 tokens and lose their beginnings" in caplog.text
    assert fit_prompts(rows, positions=None, new_tokens=4) == rows
    with pytest.raises(SettingError, match="16 new tokens leave a prompt no room in the model's 16 positions"):
        fit_prompts(rows, positions=16, new_tokens=16)


def damaged(folder: str, target: Path, weight: str) -> str:
    """A copy of a model with NaN in one of its weights."""
    shutil.copytree(folder, target)
    weights = load_file(target / "model.safetensors")
    weights[weight] = torch.full_like(weights[weight], math.nan)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return str(target)


def test_a_reward_that_is_always_nan_stops_the_run_with_its_model(names, tmp_path: Path, monkeypatch) -> None:
    reward = damaged(names["classifier"], tmp_path / "nan", "classifier.weight")
    flags = published(names, tmp_path / "run", "--critic", "lexicon", "--reward_model", reward, "--epochs", "9")
    said = run(monkeypatch, ppo_sentiment, *flags)
    assert said.startswith("error: of the last 24 samples 24 got no score from ")
    assert "model so far is in " in said
    metrics = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert [row["reward/no_verdict"] for row in metrics] == [8, 8]  # the third step has made it certain
    assert all(row["objective/score"] is None for row in metrics)
    assert list((tmp_path / "run").glob("*-2/model.safetensors"))


def test_a_policy_of_nan_is_one_line_before_anything_is_trained(names, tmp_path: Path, monkeypatch) -> None:
    policy = damaged(names["policy"], tmp_path / "nan", "lm_head.weight")
    flags = published(names, tmp_path / "run", "--critic", "lexicon", "--model_name", policy)
    said = run(monkeypatch, ppo_sentiment, *flags)
    assert said.startswith("error: policy logits are not finite while sampling for samples ")
    assert "\n" not in said
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl") == []


def test_weights_that_became_nan_replace_no_checkpoint(names, tmp_path: Path, monkeypatch) -> None:
    """A rate that ruins the weights in the second step: what --resume takes up is the step before."""
    steps = []
    step = torch.optim.Adam.step

    def ruinous(optimizer, *arguments, **keywords):
        steps.append(1)
        if len(steps) > 4:  # the four epochs of the first step
            optimizer.param_groups[0]["lr"] = 1e30
        return step(optimizer, *arguments, **keywords)

    monkeypatch.setattr(torch.optim.Adam, "step", ruinous)
    flags = published(names, tmp_path / "run", "--critic", "lexicon", "--save_freq", "1", "--epochs", "9")
    said = run(monkeypatch, ppo_sentiment, *flags)
    assert "logits are not finite" in said and "resume from the last checkpoint" in said
    done = len(read_jsonl(tmp_path / "run" / "metrics.jsonl"))
    assert {path.name for path in (tmp_path / "run").glob("*-*/")} == {f"checkpoint-{n}" for n in range(1, done + 1)}


def test_nan_logits_are_named_by_the_trainer() -> None:
    lm = tiny_llama()
    trainer = PPOTrainer(
        PPOConfig(batch_size=2, mini_batch_size=2),
        AutoModelForCausalLMWithValueHead.from_pretrained(lm),
        tokenizer=tiny_tokenizer(),
    )
    with torch.no_grad():
        lm.lm_head.weight[7] = math.nan
    queries = [torch.tensor([1, 2, 3])] * 2
    with pytest.raises(FloatingPointError, match="policy logits are not finite while sampling"):
        trainer.generate(queries, max_new_tokens=4)
    before = {name: p.clone() for name, p in trainer.policy.named_parameters()}
    with pytest.raises(FloatingPointError, match="policy logits are not finite at sample 0, response token 0"):
        trainer.step(queries, [torch.tensor([4, 5])] * 2, [1.0, 2.0])
    assert all(torch.equal(p.nan_to_num(9), before[n].nan_to_num(9)) for n, p in trainer.policy.named_parameters())


def test_no_key_in_trackers_logs_files_and_tracebacks(task: Path, tmp_path: Path, monkeypatch, caplog, capfd) -> None:
    """Keys in the environment, a server that tells them in every error, a tracker, and code of the user that fails."""
    keys = {"OPENAI_API_KEY": "sk-0123456789", "REWARD_SERVICE_TOKEN": "token-0123456789"}
    keys |= {"PERSPECTIVE_API_KEY": "AIza-0123456789", "HF_TOKEN": "hf_0123456789"}
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.DEBUG)
    (tmp_path / "later.py").write_text(
        "calls = []\ndef reward(completions, **_):\n    calls.append(1)\n"
        "    return [0.0] * len(completions) if len(calls) < 3 else 1 / 0\n"
    )
    telling = [error(400, " ".join(keys.values())), completion(" ".join(keys.values()))]
    with FakeOpenAI([completion("OK"), *telling * 40]) as server:
        more = ("--use_intrinsic_reward", "--critic=openai", f"--critic_base_url={server.url}", "--eval_every=None")
        more += ("--log_with=tensorboard", "--critic_style=toxicity", "--critic_cache=cache", "--save_freq=1")
        monkeypatch.setattr(sys, "argv", ["script.py", *custom_flags(task, "later.py:reward", tmp_path / "run", *more)])
        with pytest.raises(ZeroDivisionError) as failed:
            run_script(ppo_custom.main)
    assert set(server.keys) == {keys["OPENAI_API_KEY"]}
    shown = capfd.readouterr()
    texts = [shown.out, shown.err, caplog.text, "".join(traceback.format_exception(failed.value))]
    texts += [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    assert list(tmp_path.rglob("events.*"))
    assert list((tmp_path / "run").rglob("README.md"))  # the model card
    assert list((tmp_path / "run").rglob("model.safetensors"))
    # this run's own key: what else a server says is text like any other
    assert not any(keys["OPENAI_API_KEY"] in text for text in texts)
    own = [text.replace(" ".join(list(keys.values())[1:]), "") for text in texts]
    assert not any(value in text for text in own for value in keys.values())
