"""The detoxification scripts as a user runs them: published flags, tiny local models, local servers for the scorers."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import AutoPeftModelForCausalLM, PeftModel
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.fake_openai import Answer, FakeOpenAI, completion
from tests.fake_perspective import FakePerspective, google_error, score_of
from tests.rewards.toy_classifiers import save_classifier
from tests.tiny import tiny_llama, tiny_tokenizer
from trl.critic import LocalCritic, PromptTemplate
from trl.critic.types import CritiqueRequest
from trl.jsonl import read_jsonl
from trl.rewards import ToxicityReward

ROOT = Path(__file__).resolve().parents[2]
SCRIPT, PEFT_SCRIPT = "examples/toxicity/ppo_toxicity.py", "examples/toxicity/ppo_toxicity_peft.py"
KEY, OPENAI_KEY = "AIza-secret-of-the-test", "sk-secret-of-the-test"
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PERSPECTIVE_API_KEY"} | {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "OPENAI_API_KEY": OPENAI_KEY,
}
CRITIC_PROMPT = "Which words of\n{}\nare bad?\n"
CHAT = "{% for m in messages %}U {{ m['content'] }}\nA {% endfor %}"


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> dict[str, str]:
    """A policy with a chat template, a classifier, toxic prompts and a short critic prompt, each as a local path."""
    folder = tmp_path_factory.mktemp("inputs")
    policy = tiny_llama(layers=2)
    policy.config.max_position_embeddings = 1024  # rotary positions know no limit of their own
    policy.save_pretrained(folder / "policy")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder / "policy")
    save_classifier(folder / "classifier", ["nothate", "hate"])
    starts = ("What", "A", "Nothing", "This", "I", "It", "The", "Such", "You", "My", "Bad", "Dull", "So", "He", "No")
    rows = [{"prompt": {"text": f"{word} film was the", "toxicity": 0.9}} for word in (*starts, "Her", "We", "Who")]
    rows += [{"prompt": {"text": "A lovely day", "toxicity": score}} for score in (0.1, 0.6, None)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "critic.txt").write_text(CRITIC_PROMPT)
    files = {"policy": "policy", "classifier": "classifier", "prompts": "prompts.jsonl", "critic": "critic.txt"}
    return {name: str(folder / file) for name, file in files.items()}


def published(names: dict[str, str], out: Path, *more: str) -> list[str]:
    """The published command's flags but for the key, with local names and small sizes."""
    flags = (
        f"--use_intrinsic_reward --prompt_file {names['critic']} --positive_reward_value 0.0"
        f" --negative_reward_value -0.5 --intrinsic_reward_threshold 1.0 --model_name {names['policy']}"
        f" --model_save_path {out} --epochs 2 --prompt_toxicity_level 0.6 --output_min_length 4"
        " --output_max_length 6 --learning_rate 1.41e-5 --batch_size 7 --mini_batch_size 7"
        f" --gradient_accumulation_steps 1 --ppo_epochs 4 --query_dataset {names['prompts']}"
    )
    return [*flags.split(), *more]


def launch(*command: str, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=ENVIRONMENT | variables, capture_output=True, text=True, timeout=300
    )
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


def quote_last_word(body: dict[str, Any]) -> Answer:
    """What a critic would say who finds the last word of every text toxic."""
    words = re.findall("[A-Za-z]+", body["messages"][-1]["content"].removesuffix("are bad?\n"))
    return completion(f"Toxic Span 1: {words[-1]}\n")


def assert_nowhere(secret: str, done: subprocess.CompletedProcess[str], folder: Path) -> None:
    assert secret not in done.stdout + done.stderr
    files = [file for file in folder.rglob("*") if file.is_file()]
    assert len(files) > 5
    assert all(secret.encode() not in file.read_bytes() for file in files)


def test_published_command_with_perspective(names, tmp_path):
    out = tmp_path / "run"

    def fault(text: str, nth: int) -> Answer | None:
        if score_of(text) > 0.8:
            return google_error(400, f"Attribute TOXICITY does not support request languages: xx (key {KEY})")
        return google_error(429, f"slow down, {KEY}", retry_after="0") if score_of(text) < 0.3 and nth == 1 else None

    prefix = ["-m", "accelerate.commands.launch", "--num_processes", "1", "--mixed_precision", "bf16"]
    with FakePerspective(fault) as server, FakeOpenAI(quote_last_word) as critic:
        local = ("--perspective_api", KEY, "--toxicity_endpoint", server.url, "--perspective_qps", "500")
        more = ("--critic_base_url", critic.url, "--save_freq", "3", "--log_with", "tensorboard")
        command = published(names, out, *local, *more)
        done = launch(*prefix, "--dynamo_backend", "no", SCRIPT, *command)
    assert set(server.keys) == {KEY}
    assert not any(KEY in path for path in server.paths)
    assert set(critic.keys) == {OPENAI_KEY}

    metrics = read_jsonl(out / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4]  # 14 of 18 prompts above the level, 7 a step, 2 epochs
    assert metrics[0]["objective/kl"] == 0
    samples = read_jsonl(out / "samples.jsonl")
    assert len(samples) == 28
    for row in samples:
        toxicity = score_of(row["response"])
        without = toxicity > 0.8 or not row["response"].strip()
        assert row["score"] == (None if without else 1 - toxicity)
        assert row["status"] == ("skipped" if without else "ok")
        assert {token["intrinsic"] for token in row["tokens"]} <= ({0.0} if without else {0.0, -0.5})
    assert sum(any(token["intrinsic"] for token in row["tokens"]) for row in samples) > 7
    unscored = sum(row["score"] is None for row in samples)
    assert 0 < unscored < 14
    assert sum(row["reward/no_verdict"] for row in metrics) == unscored
    assert "429" not in done.stderr  # asked again, and answered
    events = EventAccumulator(str(out / "trl")).Reload()
    for name in ("objective/kl", "objective/score", "critic/requests", "ppo/loss/value"):
        logged = [(event.step, event.value) for event in events.Scalars(name)]
        assert logged == [(row["step"], pytest.approx(row[name], rel=1e-6)) for row in metrics]
    card = ModelCard.load(out / "README.md")
    assert f"{SCRIPT} --use_intrinsic_reward" in card.text and "--perspective_api '***'" in card.text
    assert "token rewards from a critic" in card.text and f"| critic requests | {28 - unscored} |" in card.text

    assert AutoModelForCausalLM.from_pretrained(out).config.num_hidden_layers == 2
    assert (out / "checkpoint-3" / "value_head.safetensors").exists()
    for secret in (KEY, OPENAI_KEY):
        assert_nowhere(secret, done, out)


def test_the_classifier_judges_where_there_is_no_key(names, tmp_path):
    out = tmp_path / "run"
    command = published(names, out, "--reward_model", names["classifier"], "--steps", "1")
    done = launch(SCRIPT, *command, "--num_shared_layers", "1", "--critic", "attribution")
    samples = read_jsonl(out / "samples.jsonl")
    expected = ToxicityReward(names["classifier"])(completions=[row["response"] for row in samples])
    assert [row["score"] for row in samples] == pytest.approx(expected, abs=1e-5)
    assert len({round(row["score"], 3) for row in samples}) > 3
    assert "Perspective" not in done.stderr


def test_moderation_scores_with_the_endpoint_that_is_named(names, tmp_path):
    out = tmp_path / "run"
    scores = ("harassment", "hate", "violence")

    def moderate(body: dict[str, Any]) -> Answer:
        results = [{"category_scores": {name: score_of(text, name) for name in scores}} for text in body["input"]]
        return Answer(200, json.dumps({"results": results}).encode())

    with FakeOpenAI(moderate) as server:
        local = ("--toxicity_scorer", "moderation", "--toxicity_endpoint", server.url)
        done = launch(SCRIPT, *published(names, out, *local, "--steps", "1", "--critic", "attribution"))
    samples = read_jsonl(out / "samples.jsonl")
    assert [row["score"] for row in samples] == [
        1 - max(score_of(row["response"], name) for name in scores) if row["response"].strip() else None
        for row in samples
    ]
    assert any(row["score"] is not None for row in samples)
    assert_nowhere(OPENAI_KEY, done, out)


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        (SCRIPT, ["--toxicity_scorer", "perspective"], "set the environment variable PERSPECTIVE_API_KEY"),
        (SCRIPT, ["--prompt_toxicity_level", "1.5"], "prompt_toxicity_level is 1.5"),
        (SCRIPT, ["--output_min_length", "9"], "output_min_length is 9"),
        (SCRIPT, ["--prompt_toxicity_level", "0.95"], "0 of 21 prompts with a toxicity above 0.95"),
        (PEFT_SCRIPT, ["--lora_target_modules", "no_such_layer"], "no_such_layer"),
        (PEFT_SCRIPT, ["--num_shared_layers", "1"], "--num_shared_layers"),
        (PEFT_SCRIPT, ["--load_in_4bit", "--load_in_8bit"], "exclude each other"),
    ],
)
def test_bad_input_is_one_clear_line_before_training(names, tmp_path, script, flags, message):
    command = published(names, tmp_path / "run", "--critic", "attribution", "--reward_model", names["classifier"])
    command += flags
    assert_one_line(launch(script, *command, check=False), message)
    assert not (tmp_path / "run").exists()


def test_loading_in_4_bits_names_the_package_that_is_missing(names, tmp_path):
    hidden = "import runpy, sys; sys.modules['bitsandbytes'] = None; del sys.argv[0]; "  # installed or not
    hidden += "runpy.run_path(sys.argv[0], run_name='__main__')"
    flags = published(names, tmp_path / "run", "--load_in_4bit")
    done = launch("-c", hidden, PEFT_SCRIPT, *flags, check=False)
    assert_one_line(done, "pip install bitsandbytes")


def test_a_refused_key_stops_the_run_without_being_shown(names, tmp_path):
    with FakePerspective(lambda text, nth: google_error(403, f"not with {KEY}")) as server:
        local = ("--toxicity_endpoint", server.url, "--perspective_qps", "500", "--critic", "attribution")
        done = launch(SCRIPT, *published(names, tmp_path / "run", *local), check=False, PERSPECTIVE_API_KEY=KEY)
    assert set(server.keys) == {KEY}  # a key in the environment chooses Perspective too
    assert_one_line(done, "answered HTTP 403")
    assert "2026-12-31" in done.stderr
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert KEY not in done.stdout + done.stderr
    assert all(KEY.encode() not in file.read_bytes() for file in files)


def test_dry_run_asks_the_scorer_once_and_shows_no_key(names, tmp_path):
    with FakePerspective() as server:
        local = ("--perspective_api", KEY, "--toxicity_endpoint", server.url, "--critic", "attribution")
        done = launch(SCRIPT, *published(names, tmp_path / "run", *local, "--dry_run"))
    assert "environment     perspective" in done.stdout
    assert "28 samples" in done.stdout
    assert KEY not in done.stdout + done.stderr
    assert len(server.requests) >= 1
    assert not (tmp_path / "run").exists()


def assert_one_line(done: subprocess.CompletedProcess[str], message: str) -> None:
    assert done.returncode != 0
    assert message in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


# --- LoRA with self-critique: one run, several looks at it


@pytest.fixture(scope="module")
def adapted(names, tmp_path_factory) -> Iterator[Path]:
    """The run folder of the published command of the PEFT script, at a rate that moves the adapters visibly."""
    out = tmp_path_factory.mktemp("peft") / "run"
    flags = (
        "--intrinsic_reward_threshold 0.9 --batch_size 8 --mini_batch_size 4 --gradient_accumulation_steps 2"
        " --epochs 3 --learning_rate 2e-3 --lora_r 4 --lora_dropout 0.1 --merge --perspective_qps 500"
    )
    with FakePerspective() as server:
        local = ("--perspective_api", KEY, "--toxicity_endpoint", server.url)
        done = launch(PEFT_SCRIPT, *published(names, out, *flags.split(), *local))
    assert_nowhere(KEY, done, out)
    yield out


def checksums(model: PreTrainedModel) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
        for name, tensor in model.state_dict().items()
    }


def test_the_reference_is_the_policy_with_its_adapters_off(adapted):
    metrics = read_jsonl(adapted / "metrics.jsonl")
    assert len(metrics) == 6
    assert metrics[0]["objective/kl"] == 0
    assert all(token["kl"] == 0 for row in read_jsonl(adapted / "samples.jsonl")[:8] for token in row["tokens"])
    assert metrics[-1]["objective/kl"] != 0
    assert all(row["ppo/optimizer_steps"] == 4 for row in metrics)


def test_adapters_are_trained_and_base_weights_are_not(names, adapted):
    adapters = load_file(adapted / "adapter_model.safetensors")
    card = ModelCard.load(adapted / "README.md")  # ours, not the one that peft wrote before it
    assert card.data.library_name == "peft" and PEFT_SCRIPT in card.text and "## Results" in card.text
    assert {name.split(".")[-2] for name in adapters} == {"lora_A", "lora_B"}
    assert all(tensor.any() for name, tensor in adapters.items() if "lora_B" in name)  # B is 0 at first
    # The run merged its own base with its adapters; a fresh base merged with them must have the same bits.
    fresh = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(names["policy"]), adapted)
    assert checksums(AutoModelForCausalLM.from_pretrained(adapted / "merged")) == checksums(fresh.merge_and_unload())
    untouched = checksums(AutoModelForCausalLM.from_pretrained(names["policy"]))
    merged = checksums(AutoModelForCausalLM.from_pretrained(adapted / "merged"))
    changed = {name.split(".")[-2] for name in merged if merged[name] != untouched[name]}
    assert changed == {"q_proj", "v_proj"}


@torch.no_grad()
def test_plain_peft_loads_the_adapters_and_plain_transformers_the_merged_model(names, adapted):
    tokenizer = AutoTokenizer.from_pretrained(adapted)
    ids = tokenizer("The film was the dullest of this year", return_tensors="pt")["input_ids"]
    adapter = AutoPeftModelForCausalLM.from_pretrained(adapted).eval()
    merged = AutoModelForCausalLM.from_pretrained(adapted / "merged")
    assert not isinstance(merged, PeftModel)
    assert AutoTokenizer.from_pretrained(adapted / "merged")("A film")["input_ids"] == tokenizer("A film")["input_ids"]
    logits = adapter(input_ids=ids).logits
    torch.testing.assert_close(merged(input_ids=ids).logits, logits, rtol=0, atol=1e-5)
    base = AutoModelForCausalLM.from_pretrained(names["policy"])
    assert (base(input_ids=ids).logits - logits).abs().max() > 1e-2


def test_critiques_are_those_of_a_frozen_copy_of_the_base(names, adapted):
    rows = read_jsonl(adapted / "critiques.jsonl")
    assert len(rows) > 20
    tokenizer = AutoTokenizer.from_pretrained(names["policy"])
    template = PromptTemplate.from_file(names["critic"], style="toxicity")

    def replies(model: PreTrainedModel) -> list[str | None]:
        critic = LocalCritic(template, model, tokenizer, "generate")
        return [critique.reply for critique in critic.critique([CritiqueRequest(**row["request"]) for row in rows])]

    written = [row["reply"] for row in rows]
    assert replies(AutoModelForCausalLM.from_pretrained(names["policy"]).eval()) == written
    assert replies(AutoModelForCausalLM.from_pretrained(adapted / "merged").eval()) != written
