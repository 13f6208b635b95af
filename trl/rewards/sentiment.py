"""The environment reward of the sentiment task: how positive a classifier finds prompt + response."""

import math
from collections.abc import Sequence
from typing import Any

import torch

from trl.rewards.classifiers import POSITIVE_NAMES, TextClassifier

Text = str | list[dict[str, Any]]
"""A plain string, or a conversation of ``{"role", "content"}`` messages."""


class SentimentReward:
    """Raw logit of the positive class of a sentiment classifier, for each prompt with its completion.

    Args:
        model: hub id, local folder, or ``builtin:sentiment``.
        label: the label whose logit is the reward, in any case; default: the one called POSITIVE, POS or
            LABEL_1.
        batch_size: texts per forward pass.
        device: default: the accelerator if there is one.

    Raises ``OSError`` if the model cannot be loaded, ``ValueError`` listing its labels if the label is missing.
    """

    def __init__(
        self,
        model: str,
        label: str | None = None,
        *,
        batch_size: int = 32,
        device: str | torch.device | None = None,
    ) -> None:
        self.classifier = TextClassifier(model, device, batch_size)
        self.index = self.classifier.label_index(POSITIVE_NAMES if label is None else (label,))
        self.__name__ = "sentiment_reward"  # trainers that take a list of reward functions report by this

    def __call__(
        self, *, prompts: Sequence[Text], completions: Sequence[Text], **_ignored: object
    ) -> list[float | None]:
        """One logit per sample; None (no verdict) where prompt and completion are both blank.

        Texts must already be free of the policy's special tokens (decode with ``skip_special_tokens=True``).
        """
        if len(prompts) != len(completions):
            raise ValueError(f"got {len(prompts)} prompts and {len(completions)} completions; expected as many")
        texts = [as_text(prompt) + as_text(answer) for prompt, answer in zip(prompts, completions, strict=True)]
        judged = [index for index, text in enumerate(texts) if text.strip()]
        logits = self.classifier.logits([texts[index] for index in judged])[:, self.index].tolist()
        rewards: list[float | None] = [None] * len(texts)
        for index, logit in zip(judged, logits, strict=True):
            rewards[index] = logit if math.isfinite(logit) else None
        return rewards


def as_text(text: Text) -> str:
    """A conversation's contents, a message a line; a string as it is."""
    if isinstance(text, str):
        return text
    return "\n".join(str(message["content"]) for message in text) + ("\n" if text[-1:] else "")
