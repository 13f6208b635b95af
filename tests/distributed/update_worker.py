"""One process of steps on fixed global batches, once per kind of trainer: update_worker.py FOLDER KIND…

What must not depend on how the batch was divided goes to FOLDER/KIND/RANK.json, the models to FOLDER/KIND/model.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig

from tests.tiny import perturb_weights, ragged_batch, tiny_gpt2, tiny_llama, tiny_tokenizer
from tests.trainer.test_supervised import ROWS, Regression, config
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model, set_seed
from trl.models import RewardModel
from trl.trainer.pretraining import PretrainingMix
from trl.trainer.supervised import SupervisedTrainer

WORLD = int(os.environ.get("WORLD_SIZE", "1"))
RESUMED = ("plain", "value model", "lora")
SAMPLES = 17  # the processes' shares differ, and so do the numbers of passes that they need
QUERIES, RESPONSES = ragged_batch([5, 2, 7, 3, 1, 4, 6, 2] * 2 + [3], [6, 9, 1, 4, 8, 3, 5, 2] * 2 + [7])
SCORES = [round(0.7 * ((5 * i) % 8 - 3), 2) for i in range(SAMPLES)]


def make_trainer(kind: str) -> PPOTrainer:
    set_seed(0)
    whole = {"batch_size": 18 // WORLD, "mini_batch_size": 18 // WORLD, "ppo_epochs": 2}
    accumulated = {**whole, "mini_batch_size": 6 // WORLD, "gradient_accumulation_steps": 3}
    settings: dict[str, Any] = {
        "plain": whole,
        "trunk": accumulated,
        "value model": {**accumulated, "max_grad_norm": 0.3},
        "lora": whole,
        "pretraining": accumulated,
        "dropped": {**accumulated, "ratio_threshold": 0.5},
        "stopped": {**whole, "early_stopping": True, "target_kl": 1e-9},
    }[kind]
    lora = LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False) if kind == "lora" else None
    lm = tiny_llama(layers=4) if kind in ("trunk", "lora") else tiny_gpt2(layers=2)  # whose embeddings are tied
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(lm, peft_config=lora)
    perturb_weights(policy.v_head, seed=5)
    reference = None if kind == "lora" else create_reference_model(policy, 2 if kind == "trunk" else None)
    if reference is not None and kind != "trunk":
        perturb_weights(reference.pretrained_model, seed=9)
    extra: dict[str, Any] = {}
    if kind == "value model":
        extra["value_model"] = RewardModel.from_pretrained(tiny_llama(seed=3))
        perturb_weights(extra["value_model"].head, seed=4, scale=0.1)
        extra["value_optimizer"] = torch.optim.SGD(extra["value_model"].parameters(), lr=0.05)
    if kind == "pretraining":  # one block, so that every process draws the same
        extra["pretraining"] = PretrainingMix(["The film was a quiet wonder."], tiny_tokenizer(), 0.5, block_length=8)
        extra["pretraining"].blocks = extra["pretraining"].blocks[:1]
    # Adam blows rounding noise in zero gradients up to the learning rate
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.05)
    return PPOTrainer(PPOConfig(**settings), policy, reference, tiny_tokenizer(), optimizer=optimizer, **extra)


def run_supervised(folder: Path) -> SupervisedTrainer:
    """Four steps of a summed loss, and the last two of them again from a checkpoint."""
    sizes: dict[str, Any] = {"batch_size": 8 // WORLD, "gradient_accumulation_steps": 2, "steps": 4, "save_steps": 2}
    groups = [list(range(start, start + 7)) for start in (0, 7)]  # batches of seven rows, which two can't share evenly
    losses = []
    for resume in (None, str(folder / "checkpoint-2")):
        settings = config(folder, max_grad_norm=0.5, resume=resume, keep_checkpoints=2, **sizes)
        trainer = Regression(settings, dropout=0.0, rows=ROWS[:14], groups=groups)
        losses.append(trainer.train()["loss"])
    result = {"world": trainer.accelerator.num_processes, "losses": losses}
    (folder / f"{trainer.accelerator.process_index}.json").write_text(json.dumps(result))
    return trainer


def run(kind: str, folder: Path) -> PPOTrainer:
    trainer = make_trainer(kind)
    accelerator = trainer.accelerator
    rank = accelerator.process_index
    queries, responses, scores = QUERIES[rank::WORLD], RESPONSES[rank::WORLD], SCORES[rank::WORLD]
    if kind == "stopped":  # the policy moves away from these samples
        scores = [-score for score in scores]
    first = trainer.step(queries, responses, scores)
    trainer.save_state(folder / "state")
    stats = trainer.step(queries, responses, scores)
    # the processes end at different tokens
    greedy = {"do_sample": False, "max_new_tokens": 4 + 3 * rank, "return_prompt": False}
    own, reference = trainer.generate(queries, generate_ref_response=True, **greedy)
    trainer.save_pretrained(folder / "model")
    kept = {name: value for name, value in stats.items() if not name.startswith("time/")}
    texts = [[each.tolist()[:4] for each in pair] for pair in zip(own, reference, strict=True)]
    kl = [row["kl"].sum().item() for row in trainer.last_rollout]
    result: dict[str, Any] = {
        "world": accelerator.num_processes,
        "stats": kept,
        "greedy": texts,
        "kl": kl,
        "first_kl": first["objective/kl"],
        "caches_trunk": trainer.passes.caches_trunk,
    }
    if kind in RESUMED:
        trainer = make_trainer(kind)
        trainer.load_state(folder / "state")
        result["resumed"] = trainer.step(queries, responses, scores)
    (folder / f"{rank}.json").write_text(json.dumps(result))
    return trainer


for name in sys.argv[2:]:
    target = Path(sys.argv[1]) / name
    target.mkdir(parents=True, exist_ok=True)
    last: PPOTrainer | SupervisedTrainer = run_supervised(target) if name == "supervised" else run(name, target)
last.accelerator.wait_for_everyone()  # who leaves early closes connections that the other still reads
last.accelerator.end_training()
