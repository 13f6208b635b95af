"""Training: PPO with token-level rewards, reward models, supervised. Loaded on first use: ``--help`` needs no torch."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl.trainer.config import PPOConfig
    from trl.trainer.ppo import PPOTrainer
    from trl.trainer.reward import RewardTrainer
    from trl.trainer.reward_config import RewardConfig
    from trl.trainer.sft import SFTTrainer
    from trl.trainer.sft_config import SFTConfig

_HOME = {
    "PPOConfig": "trl.trainer.config",
    "PPOTrainer": "trl.trainer.ppo",
    "RewardConfig": "trl.trainer.reward_config",
    "RewardTrainer": "trl.trainer.reward",
    "SFTConfig": "trl.trainer.sft_config",
    "SFTTrainer": "trl.trainer.sft",
}
__all__ = ["PPOConfig", "PPOTrainer", "RewardConfig", "RewardTrainer", "SFTConfig", "SFTTrainer"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trl.trainer' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
