"""Reward functions: callables with keyword lists ``(prompts=…, completions=…, **columns)``.

Each returns ``list[float | None]``; None means "no verdict, leave this sample out".
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl.rewards.classifiers import TextClassifier, load_classifier
    from trl.rewards.moderation import ModerationReward
    from trl.rewards.perspective import PerspectiveClient, PerspectiveReward
    from trl.rewards.sentiment import SentimentReward

_HOME = {
    "ModerationReward": "trl.rewards.moderation",
    "PerspectiveClient": "trl.rewards.perspective",
    "PerspectiveReward": "trl.rewards.perspective",
    "SentimentReward": "trl.rewards.sentiment",
    "TextClassifier": "trl.rewards.classifiers",
    "load_classifier": "trl.rewards.classifiers",
}
__all__ = [
    "ModerationReward",
    "PerspectiveClient",
    "PerspectiveReward",
    "SentimentReward",
    "TextClassifier",
    "load_classifier",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'trl.rewards' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
