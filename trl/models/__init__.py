"""Models: policy with value head, frozen reference, reward model, trunk split."""

from trl.models.reference import create_reference_model
from trl.models.reward_model import RewardModel
from trl.models.value_head import AutoModelForCausalLMWithValueHead, ValueHead

__all__ = ["AutoModelForCausalLMWithValueHead", "RewardModel", "ValueHead", "create_reference_model"]
