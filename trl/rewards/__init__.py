"""Reward functions: callables with keyword lists ``(prompts=…, completions=…, **columns)``.

Each returns ``list[float | None]``; None means "no verdict, leave this sample out".
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl.rewards.accuracy import accuracy_reward, get_cosine_scaled_reward, reasoning_accuracy_reward
    from trl.rewards.autorater import JudgeSettings
    from trl.rewards.classifiers import TextClassifier, load_classifier
    from trl.rewards.config_file import RewardConfigError
    from trl.rewards.configured import load_reward
    from trl.rewards.dense import token_overlong, token_repetition_penalty
    from trl.rewards.fuse import RewardGoneError
    from trl.rewards.moderation import ModerationReward
    from trl.rewards.perspective import PerspectiveClient, PerspectiveReward
    from trl.rewards.preference import PreferenceReward
    from trl.rewards.reward_function import ConfiguredReward
    from trl.rewards.rouge import RougeReward
    from trl.rewards.sentiment import SentimentReward
    from trl.rewards.shaping import (
        get_repetition_penalty_reward,
        get_soft_overlong_punishment,
        get_think_format_reward,
        think_format_reward,
    )
    from trl.rewards.toxicity import ToxicityReward, load_toxicity_scorer

_HOME = {
    "ConfiguredReward": "trl.rewards.reward_function",
    "JudgeSettings": "trl.rewards.autorater",
    "RewardConfigError": "trl.rewards.config_file",
    "RewardGoneError": "trl.rewards.fuse",
    "load_reward": "trl.rewards.configured",
    "ModerationReward": "trl.rewards.moderation",
    "PerspectiveClient": "trl.rewards.perspective",
    "PerspectiveReward": "trl.rewards.perspective",
    "PreferenceReward": "trl.rewards.preference",
    "RougeReward": "trl.rewards.rouge",
    "SentimentReward": "trl.rewards.sentiment",
    "TextClassifier": "trl.rewards.classifiers",
    "ToxicityReward": "trl.rewards.toxicity",
    "load_classifier": "trl.rewards.classifiers",
    "load_toxicity_scorer": "trl.rewards.toxicity",
    "accuracy_reward": "trl.rewards.accuracy",
    "get_cosine_scaled_reward": "trl.rewards.accuracy",
    "get_repetition_penalty_reward": "trl.rewards.shaping",
    "get_soft_overlong_punishment": "trl.rewards.shaping",
    "get_think_format_reward": "trl.rewards.shaping",
    "reasoning_accuracy_reward": "trl.rewards.accuracy",
    "think_format_reward": "trl.rewards.shaping",
    "token_overlong": "trl.rewards.dense",
    "token_repetition_penalty": "trl.rewards.dense",
}
__all__ = [
    "ConfiguredReward",
    "JudgeSettings",
    "ModerationReward",
    "PerspectiveClient",
    "PerspectiveReward",
    "PreferenceReward",
    "RewardConfigError",
    "RewardGoneError",
    "RougeReward",
    "SentimentReward",
    "TextClassifier",
    "ToxicityReward",
    "accuracy_reward",
    "get_cosine_scaled_reward",
    "get_repetition_penalty_reward",
    "get_soft_overlong_punishment",
    "get_think_format_reward",
    "load_classifier",
    "load_reward",
    "load_toxicity_scorer",
    "reasoning_accuracy_reward",
    "think_format_reward",
    "token_overlong",
    "token_repetition_penalty",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trl.rewards' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
