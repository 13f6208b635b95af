"""How toxic a text is: the environment reward of the toxicity task, and scorers for evaluation.

A scorer is a built-in model or any sequence classifier of transformers that has a class for harmless text (such
as ``facebook/roberta-hate-speech-dynabench-r4-target``) or, with several labels at once, one called toxic.
"""

import math
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
import torch

from trl.builtin import is_builtin, resolve
from trl.builtin.catalog import find_item
from trl.rewards.classifiers import TextClassifier
from trl.rewards.perspective import Text, response_text

NONTOXIC_NAMES = (
    "nothate",
    "not hate",
    "not-hate",
    "non-hate",
    "not_hate",
    "non-toxic",
    "non_toxic",
    "nontoxic",
    "not_toxic",
    "not toxic",
    "non-offensive",
    "not-offensive",
    "neutral",
)
"""What the class of harmless text is called in published models, in lower case; the first match counts."""
TOXIC_NAMES = ("toxicity", "toxic")
"""The label of a model that gives several labels at once."""


class ToxicityScorer(Protocol):
    """Judges texts, each by itself. Blank texts get a number too, which means nothing."""

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """(len(texts),) P(toxic)."""

    def nontoxic_logits(self, texts: Sequence[str]) -> np.ndarray:
        """(len(texts),): higher is less toxic. The class's raw logit, or the log-odds where there is but one."""


class ClassifierToxicity:
    """A transformers sequence classifier as a ``ToxicityScorer``.

    Args:
        model: hub id or local folder.
        label: the class of harmless text; default: found by name (``NONTOXIC_NAMES``). A model of independent
            labels (``problem_type`` "multi_label_classification") has none, and its label "toxicity" or "toxic" is
            taken, or the ``label`` given, as that of toxic text.
        device: default: the accelerator if there is one.
        batch_size: texts per forward pass.

    Raises ``OSError`` if the model cannot be loaded, ``ValueError`` listing its labels if none fits.
    """

    def __init__(
        self,
        model: str,
        label: str | None = None,
        *,
        device: str | torch.device | None = None,
        batch_size: int = 32,
    ) -> None:
        self.classifier = TextClassifier(model, device, batch_size)
        self.independent = self.classifier.model.config.problem_type == "multi_label_classification"
        names = TOXIC_NAMES if self.independent else NONTOXIC_NAMES
        self.index = self.classifier.label_index(names if label is None else (label,))

    def nontoxic_logits(self, texts: Sequence[str]) -> np.ndarray:
        """(len(texts),) float32."""
        logits = self.classifier.logits(texts)[:, self.index].numpy()
        return -logits if self.independent else logits

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """(len(texts),) float32."""
        logits = self.classifier.logits(texts)
        if self.independent:
            return logits[:, self.index].sigmoid().numpy()
        return (1 - logits.softmax(dim=1)[:, self.index]).numpy()


def load_toxicity_scorer(
    name: str,
    label: str | None = None,
    *,
    device: str | torch.device | None = None,
    batch_size: int = 32,
) -> ToxicityScorer:
    """A callable from texts to P(toxic), numpy (len(texts),).

    ``name`` is ``builtin:toxicity``, ``builtin:toxicity-eval`` (which no policy should be trained against), a hub
    id or a local folder; ``label``, ``device`` and ``batch_size`` are for the latter two, see ``ClassifierToxicity``.
    Raises ``BuiltinError``, ``OSError`` if it cannot be loaded, ``ValueError`` if no label fits.
    """
    if not is_builtin(name):
        return ClassifierToxicity(name, label, device=device, batch_size=batch_size)
    folder = resolve(name, "toxicity network", "linear toxicity model")
    if label is not None:
        raise ValueError(f"{name!r} has no labels to choose from; leave out the label {label!r}")
    if find_item(name).kind == "toxicity network":
        from trl.builtin.toxicity import ToxicityModel

        return ToxicityModel.load(folder)
    from trl.builtin.toxicity_eval import LinearToxicity

    return LinearToxicity.load(folder)


class ToxicityReward:
    """How harmless a classifier finds each response. The prompt, which may be toxic, is not judged.

    Args:
        model: hub id, local folder, or ``builtin:toxicity``.
        label: the class of harmless text; default: found by name, see ``ClassifierToxicity``.
        kind: "logit" for the raw logit of that class, "probability" for 1 − P(toxic).
        batch_size: texts per forward pass.
        device: default: the accelerator if there is one.

    Raises ``OSError`` if the model cannot be loaded, ``ValueError`` listing its labels if none fits.
    """

    def __init__(
        self,
        model: str,
        label: str | None = None,
        *,
        kind: Literal["logit", "probability"] = "logit",
        batch_size: int = 32,
        device: str | torch.device | None = None,
    ) -> None:
        if kind not in ("logit", "probability"):
            raise ValueError(f"kind is {kind!r}; expected 'logit' or 'probability'")
        self.kind = kind
        self.scorer = load_toxicity_scorer(model, label, device=device, batch_size=batch_size)
        self.__name__ = "toxicity_reward"  # trainers that take a list of reward functions report by this

    def __call__(self, *, completions: Sequence[Text], **_ignored: object) -> list[float | None]:
        """One reward per response, higher is less toxic; None (no verdict) for a blank response.

        Texts must already be free of the policy's special tokens (decode with ``skip_special_tokens=True``).
        """
        texts = [response_text(completion) for completion in completions]
        judged = [index for index, text in enumerate(texts) if text.strip()]
        chosen = [texts[index] for index in judged]
        scores = self.scorer.nontoxic_logits(chosen) if self.kind == "logit" else 1 - self.scorer(chosen)
        rewards: list[float | None] = [None] * len(texts)
        for index, score in zip(judged, scores.tolist(), strict=True):
            rewards[index] = score if math.isfinite(score) else None
        return rewards
