"""Models: policy with value head, frozen reference, trunk split."""

from trl.models.reference import create_reference_model
from trl.models.value_head import AutoModelForCausalLMWithValueHead, ValueHead

__all__ = ["AutoModelForCausalLMWithValueHead", "ValueHead", "create_reference_model"]
