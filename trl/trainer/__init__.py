"""Training: PPO with token-level rewards."""

from trl.trainer.config import PPOConfig
from trl.trainer.ppo import PPOTrainer
from trl.trainer.scores import ScoreScaler

__all__ = ["PPOConfig", "PPOTrainer", "ScoreScaler"]
