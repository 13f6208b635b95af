"""Small PPO runs of every kind that a state must hold, for tests that break them off and take them up."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor

from tests.tiny import perturb_weights, tiny_gpt2, tiny_llama, tiny_tokenizer
from trl import AutoModelForCausalLMWithValueHead, LengthSampler, PPOConfig, PPOTrainer, create_reference_model
from trl.core import merge_rewards, set_seed
from trl.critic import IntrinsicReward
from trl.critic.lexicon import LexiconCritic
from trl.models import RewardModel
from trl.trainer.pretraining import PretrainingMix

ROWS = [{"query": f"film {i}", "input_ids": [5 + i, 7, 9 + 2 * i][: 1 + i % 3]} for i in range(22)]
"""At 8 a batch, a pass is two whole steps and one of 6."""
LENGTHS = LengthSampler(2, 6)
TEXT = ["The film was a quiet wonder. " * 40]


def scalar(**changes: Any) -> PPOTrainer:
    """Shared layers, scores that are scaled by all that came before, a rate that falls."""
    settings = {"use_score_scaling": True, "use_score_norm": True, "max_grad_norm": 1.0} | changes
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_llama(layers=3))
    reference = create_reference_model(policy, 1)
    optimizer = torch.optim.Adam([p for p in policy.parameters() if p.requires_grad], lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 6)
    return trainer_of(policy, reference, optimizer=optimizer, lr_scheduler=schedule, **settings)


def critic(**changes: Any) -> PPOTrainer:
    return trainer_of(AutoModelForCausalLMWithValueHead.from_pretrained(tiny_gpt2()), **changes)


def lora(**changes: Any) -> PPOTrainer:
    """With dropout, which draws random numbers in the update."""
    adapter = LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return trainer_of(AutoModelForCausalLMWithValueHead.from_pretrained(tiny_llama(), peft_config=adapter), **changes)


def value_model(**changes: Any) -> PPOTrainer:
    """And a mix of plain text."""
    network = RewardModel.from_pretrained(tiny_llama(seed=3))
    perturb_weights(network.head, seed=4, scale=0.1)
    mix = PretrainingMix(TEXT, tiny_tokenizer(), 0.5, block_length=8, batch_size=2)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_llama(layers=3))
    return trainer_of(policy, create_reference_model(policy), value_model=network, pretraining=mix, **changes)


KINDS: dict[str, Callable[..., PPOTrainer]] = {
    "scalar": scalar,
    "critic": critic,
    "lora": lora,
    "value model": value_model,
}


def trainer_of(policy: AutoModelForCausalLMWithValueHead, reference: Any = None, **parts: Any) -> PPOTrainer:
    settings: dict[str, Any] = {"batch_size": 8, "mini_batch_size": 4, "ppo_epochs": 2, "learning_rate": 1e-2}
    own = {key: parts.pop(key) for key in list(parts) if key in PPOConfig.__dataclass_fields__}
    config = PPOConfig(**(settings | own))
    return PPOTrainer(config, policy, reference, tiny_tokenizer(), dataset=Dataset.from_list(ROWS), **parts)


def make(kind: str, **changes: Any) -> PPOTrainer:
    set_seed(0)  # what is new (a value head, an adapter) is the same in every run
    return KINDS[kind](**changes)


def advance(trainer: PPOTrainer, steps: int, kind: str) -> list[dict[str, float]]:
    """Train for so many more steps, pass after pass over the data; the statistics without times."""
    intrinsic = None
    if kind == "critic":
        intrinsic = IntrinsicReward(
            LexiconCritic("sentiment"), trainer.tokenizer, "sentiment", threshold=9, positive_value=0.5,
            negative_value=-0.5
        )  # fmt: skip
    rows = []
    for batch in batches(trainer, steps):
        responses = trainer.generate(batch["input_ids"], LENGTHS, return_prompt=False)
        scores = [float(response.sum() % 7) / 3 - 1 for response in responses]
        rewards: list[float] | list[Tensor] = scores
        if intrinsic is not None:
            token_rewards = intrinsic.submit(batch["input_ids"], responses, scores).result()
            rewards = merge_rewards(trainer.score_scaler.numbers(scores), token_rewards)
        stats = trainer.step(batch["input_ids"], responses, rewards)
        rows.append({name: value for name, value in stats.items() if not name.startswith("time/")})
    return rows


def batches(trainer: PPOTrainer, steps: int) -> Iterator[dict[str, Any]]:
    given = 0
    while given < steps:
        for batch in trainer.dataloader:
            yield batch
            given += 1
            if given == steps:
                return


def weights(trainer: PPOTrainer) -> dict[str, Tensor]:
    """All of policy and value model."""
    networks = {"policy": trainer.policy, "value": trainer.value_model}
    return {
        f"{name} {key}": value.clone()
        for name, network in networks.items()
        if network is not None
        for key, value in network.state_dict().items()
    }
