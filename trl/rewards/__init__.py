"""Reward functions: callables with keyword lists ``(prompts=…, completions=…, **columns)``.

Each returns ``list[float | None]``; None means "no verdict, leave this sample out".
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl.rewards.classifiers import TextClassifier, load_classifier
    from trl.rewards.moderation import ModerationReward
    from trl.rewards.perspective import PerspectiveClient, PerspectiveReward
    from trl.rewards.rouge import RougeReward
    from trl.rewards.sentiment import SentimentReward
    from trl.rewards.toxicity import ToxicityReward, load_toxicity_scorer

_HOME = {
    "ModerationReward": "trl.rewards.moderation",
    "PerspectiveClient": "trl.rewards.perspective",
    "PerspectiveReward": "trl.rewards.perspective",
    "RougeReward": "trl.rewards.rouge",
    "SentimentReward": "trl.rewards.sentiment",
    "TextClassifier": "trl.rewards.classifiers",
    "ToxicityReward": "trl.rewards.toxicity",
    "load_classifier": "trl.rewards.classifiers",
    "load_toxicity_scorer": "trl.rewards.toxicity",
}
__all__ = [
    "ModerationReward",
    "PerspectiveClient",
    "PerspectiveReward",
    "RougeReward",
    "SentimentReward",
    "TextClassifier",
    "ToxicityReward",
    "load_classifier",
    "load_toxicity_scorer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trl.rewards' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
