"""What four-model PPO needs besides the policy, as its flags describe it (Ouyang et al. 2022)."""

import torch
from peft import LoraConfig
from transformers import PreTrainedTokenizerBase

from trl.builtin import locate_model
from trl.data.sentiment import load_texts
from trl.models import RewardModel
from trl.rewards import AdjustedReward, PreferenceReward, TextClassifier
from trl.summary import RLHFArgs
from trl.trainer.pretraining import PretrainingMix


def adapter(args: RLHFArgs) -> LoraConfig | None:
    """The policy's LoRA where the reference is its base model."""
    if args.reference_kind != "adapter":
        return None
    return LoraConfig(r=args.lora_r, lora_alpha=2 * args.lora_r, task_type="CAUSAL_LM")


def value_network(args: RLHFArgs) -> tuple[RewardModel, torch.optim.Optimizer] | tuple[None, None]:
    """A value network with its optimizer; none where the policy's value head does."""
    if args.value_model_path is None:
        return None, None
    model = RewardModel.from_pretrained(locate_model(args.value_model_path), config_name=args.reward_model_config)
    rate = args.ppo_config.learning_rate if args.value_learning_rate is None else args.value_learning_rate
    return model, torch.optim.Adam(model.parameters(), lr=rate)


def pretraining_mix(args: RLHFArgs, tokenizer: PreTrainedTokenizerBase) -> PretrainingMix | None:
    """The language-model loss on plain text that the flags ask for."""
    if args.ptx_file is None:
        return None
    return PretrainingMix(load_texts(args.ptx_file, "train"), tokenizer, args.ptx_coef)


def preference_environment(args: RLHFArgs, device: torch.device) -> tuple[AdjustedReward, RewardModel]:
    """The reward model's score with its adjustments, and the reward model."""
    model = RewardModel.from_pretrained(
        locate_model(str(args.reward_model_ckpt_path)),
        config_name=args.reward_model_config,
        device=args.reward_model_device or device,
        dtype=torch.bfloat16 if args.bf16 else None,
    )
