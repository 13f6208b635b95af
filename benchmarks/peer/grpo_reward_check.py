"""Our reward functions as ``reward_funcs`` of Hugging Face TRL's GRPOTrainer: two real steps, on a CPU.

The files of ``trl/rewards`` are loaded by their path, since the trainer's package is called ``trl`` too; nothing is
adapted. Once with plain prompts, which the peer's own functions cannot take, and once with conversational ones, where
the same two steps with the peer's own functions must log the same figures. Needs the peer's environment, and never
the repository root on its path:

    python -m venv hftrl && hftrl/bin/pip install 'torch>=2.4,<2.14' trl==1.16.0 'math-verify>=0.9'
    hftrl/bin/python benchmarks/peer/grpo_reward_check.py

The model is a random two-layer Llama over 16 words, so that right answers and finished reasoning come up by chance.
"""

import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import trl.rewards as peer
from trl import GRPOConfig, GRPOTrainer

REPO = Path(__file__).resolve().parents[2]
sys.path.append(str(REPO / "tests"))  # not the root: `trl` must stay the peer's

import tiny  # noqa: E402

WORDS = ["<eos>", "<think>", "</think>", r"\boxed{1}", r"\boxed{2}", r"\boxed{\frac{1}{2}}", r"\boxed{0.5}", "so"]
WORDS += ["hence", "one", "two", "half", "user", "assistant", "what", "is"]
QUESTIONS = [("what is one", "1"), ("what is two", "2"), ("what is half", r"\frac{1}{2}"), ("what is what", "unknown")]
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}assistant {% endif %}"
STEPS, LONGEST = 2, 12


def load_by_path(name: str) -> ModuleType:
    """A file of our package as a module of its own."""
    spec = importlib.util.spec_from_file_location(f"relc_{name}", REPO / "trl" / "rewards" / f"{name}.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError(name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reward_functions(accuracy: Any, shaping: Any) -> list[Callable[..., list[float | None]]]:
    """Every function that both libraries have, from two modules of one of them."""
    return [
        accuracy.accuracy_reward,
        accuracy.reasoning_accuracy_reward,
        accuracy.get_cosine_scaled_reward(max_len=LONGEST),
        shaping.think_format_reward,
        shaping.get_repetition_penalty_reward(ngram_size=2, max_penalty=-1.0),
        shaping.get_soft_overlong_punishment(LONGEST, 6),
    ]


def word_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="so"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<eos>",
        padding_side="left",
        chat_template=TEMPLATE,
    )


def train(functions: list[Callable[..., list[float | None]]], conversational: bool) -> list[dict[str, float]]:
    """The logged reward figures of each step."""
    rows = [
        {"prompt": [{"role": "user", "content": question}] if conversational else question, "solution": solution}
        for question, solution in QUESTIONS * 4
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=32,
            num_generations=8,
            max_completion_length=LONGEST,
            max_steps=STEPS,
            learning_rate=1e-3,
            logging_steps=1,
            use_cpu=True,
            bf16=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            seed=0,
        )
        trainer = GRPOTrainer(
            model=tiny.tiny_llama(seed=0, vocab_size=len(WORDS)),
            reward_funcs=functions,
            args=config,
            train_dataset=Dataset.from_list(rows),
            processing_class=word_tokenizer(),
        )
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    return [{key: entry[key] for key in entry if key.startswith("reward") or key == "loss"} for entry in logs]


def same(ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> bool:
    return len(ours) == len(theirs) == STEPS and all(
        a.keys() == b.keys() and all(math.isclose(a[key], b[key], rel_tol=1e-5, abs_tol=1e-6) for key in a)
        for a, b in zip(ours, theirs, strict=True)
    )


def main() -> None:
    print("trl", version("trl"), "torch", version("torch"), "transformers", version("transformers"))
    functions = reward_functions(load_by_path("accuracy"), load_by_path("shaping"))
    show("plain prompts", train(functions, conversational=False))
    ours = train(functions, conversational=True)
    show("conversational prompts", ours)
    theirs = train(reward_functions(peer, peer), conversational=True)
    show("conversational prompts, the peer's own functions", theirs)
    sys.exit(0 if same(ours, theirs) else "error: the figures differ")


def show(title: str, steps: list[dict[str, float]]) -> None:
    print(title)
    for step, figures in enumerate(steps, start=1):
        print(f"  step {step}", json.dumps(figures))


if __name__ == "__main__":
    main()
