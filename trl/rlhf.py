"""What four-model PPO needs besides the policy, as its flags describe it (Ouyang et al. 2022)."""

from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from peft import LoraConfig
from transformers import PreTrainedTokenizerBase

from trl.builtin import locate_model
from trl.data.sentiment import load_texts
from trl.models import RewardModel
from trl.rewards import PreferenceReward, TextClassifier
from trl.rewards.adjusted import AdjustedReward
from trl.summary import RLHFArgs, locate_device
from trl.trainer.collectives import most_of_all
from trl.trainer.pretraining import PretrainingMix
from trl.trainer.zero import prepare_frozen, stage_of

PUBLIC_TEXT: dict[str, Any] = {"prefix": "<|startoftext|>", "append_eos": False}
"""How the public 6B reward model was trained to read a text."""


def adapter(args: RLHFArgs) -> LoraConfig | None:
    """The policy's LoRA where the reference is its base model."""
    if args.reference_kind != "adapter":
        return None
    return LoraConfig(r=args.lora_r, lora_alpha=2 * args.lora_r, task_type="CAUSAL_LM")


def value_network(args: RLHFArgs) -> tuple[RewardModel, torch.optim.Optimizer] | tuple[None, None]:
    """A value network with its optimizer; none where the policy's value head does.

    It freezes as many lower blocks as the policy does. Exits with one line where the weights don't fit.
    """
    if args.value_model_path is None:
        return None, None
    try:
        model = RewardModel.from_pretrained(locate_model(args.value_model_path), config_name=args.reward_model_config)
        if args.num_shared_layers is not None:
            model.freeze_lower_blocks(args.num_shared_layers)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    rate = args.ppo_config.learning_rate if args.value_learning_rate is None else args.value_learning_rate
    return model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate, fused=True)


def pretraining_mix(args: RLHFArgs, tokenizer: PreTrainedTokenizerBase) -> PretrainingMix | None:
    """The language-model loss on plain text that the flags ask for."""
    if args.ptx_file is None:
        return None
    return PretrainingMix(load_texts(args.ptx_file, "train"), tokenizer, args.ptx_coef)


@dataclass(frozen=True)
class CommonPasses:
    """As many passes as the process with the most texts makes, since each is a collective; keeps DeepSpeed's engine."""

    accelerator: Accelerator
    engine: Any

    def __call__(self, needed: int) -> int:
        return most_of_all(self.accelerator, needed)


def preference_environment(args: RLHFArgs, accelerator: Accelerator) -> tuple[AdjustedReward, RewardModel]:
    """The reward model's score with its adjustments, and the reward model.

    By default it goes where the policy is, and its body is in bf16 where training is in mixed bf16; ZeRO-3 then
    divides it too. Exits with one line where the reward model's weights or its tokenizer don't fit.
    """
    try:
        reward = PreferenceReward(
            locate_model(str(args.reward_model_ckpt_path)),
            batch_size=args.rw_batch_size,
            device=accelerator.device if args.reward_model_device is None else locate_device(args.reward_model_device),
            dtype=torch.bfloat16 if accelerator.mixed_precision == "bf16" else None,
            config_name=args.reward_model_config,
            **(PUBLIC_TEXT if args.reward_model_config is not None else {}),
        )
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if stage_of(accelerator) == 3 and args.reward_model_device is None:
        if args.use_intrinsic_reward and args.quoting_critic == "attribution":
            raise SystemExit(
                "error: the attribution critic asks the reward model, which ZeRO-3 divides over processes: keep it "
                "whole (--reward_model_device cpu), or name another --critic"
            )
        reward.passes = CommonPasses(accelerator, prepare_frozen(reward.model, accelerator))
    adjusted = AdjustedReward(
        reward,
        length_penalty=args.length_penalty,
        min_words=args.min_words,
        guard=None if args.gibberish_guard is None else TextClassifier(args.gibberish_guard),
        gibberish_penalty=args.gibberish_penalty,
        nan_policy=args.nan_policy,
    )
    return adjusted, reward.model
