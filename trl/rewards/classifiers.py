"""Text classifiers as plain functions: transformers models from the hub or a folder, and the built-in ones.

A text goes in whole where it fits; a longer one loses its beginning, because the response is at its end. What
looks like a special token in a text (``[SEP]``, ``</s>``) is read as ordinary characters.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PretrainedConfig

from trl.builtin import is_builtin, resolve, resolve_model
from trl.model_files import check_model_files

POSITIVE_NAMES = ("positive", "pos", "label_1")
"""What the positive class is called in published sentiment models, in lower case; the first match counts."""

_POSITIONS_AFTER_PADDING = {"camembert", "roberta", "roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "xmod"}
"""Model types whose position ids start behind the padding id, which costs them that many positions."""


class TextClassifier:
    """A sequence-classification model with its tokenizer, in fp32 on one device.

    Args:
        name: hub id, local folder, or ``builtin:`` name.
        device: default: the accelerator if there is one.
        batch_size: texts per forward pass, which are of similar length.

    Raises ``OSError`` in one line if the model cannot be loaded, ``DataFileError`` if its files are damaged.
    """

    def __init__(self, name: str, device: str | torch.device | None = None, batch_size: int = 32) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.name = name
        self.batch_size = batch_size
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        path = resolve_model(name)
        check_model_files(Path(path))
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path, truncation_side="left")
            self.model, report = AutoModelForSequenceClassification.from_pretrained(
                path, dtype=torch.float32, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise OSError(
                f"cannot load the classifier {name!r} ({_first_line(error)}); give a sequence-classification "
                "model on the hub (needs network), its local folder, or builtin:sentiment"
            ) from error
        new = [key for key in sorted(report["missing_keys"]) if not key.startswith(self.model.base_model_prefix)]
        if new:
            raise OSError(f"{name!r} is no trained classifier: it has no weights for {', '.join(new)}")
        self.model.to(self.device).eval()
        if self.tokenizer.pad_token_id is None:  # decoders used as classifiers
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.model.config.pad_token_id = self.tokenizer.pad_token_id
        self.max_tokens = min(self.tokenizer.model_max_length, _positions(self.model.config))

    @property
    def labels(self) -> list[str]:
        """The model's labels, in the order of its logits."""
        names = self.model.config.id2label
        return [names[index] for index in range(len(names))]

    def label_index(self, candidates: Iterable[str]) -> int:
        """The index of the first of ``candidates`` that is a label, ignoring case.

        Raises ``ValueError`` with the model's labels if none is.
        """
        lowered = [label.lower() for label in self.labels]
        wanted = list(candidates)
        for candidate in wanted:
            if candidate.lower() in lowered:
                return lowered.index(candidate.lower())
        raise ValueError(
            f"classifier {self.name!r} has the labels {', '.join(self.labels)}; none of them is called "
            f"{' or '.join(wanted)}. Name the label to use"
        )

    @torch.no_grad()
    def logits(self, texts: Sequence[str]) -> Tensor:
        """Raw outputs (len(texts), number of labels), fp32 on the CPU, in the order of ``texts``."""
        result = torch.empty(len(texts), len(self.labels))
        if not texts:
            return result
        # split_special_tokens: a policy must not be able to write the classifier's own control tokens.
        encoded = self.tokenizer(list(texts), truncation=True, max_length=self.max_tokens, split_special_tokens=True)
        order = sorted(range(len(texts)), key=lambda index: len(encoded["input_ids"][index]))
        for start in range(0, len(order), self.batch_size):
            batch = order[start : start + self.batch_size]
            rows = [{key: encoded[key][index] for key in encoded} for index in batch]
            padded = self.tokenizer.pad(rows, padding_side="right", return_tensors="pt").to(self.device)
            result[batch] = self.model(**padded).logits.float().cpu()
        return result


def load_classifier(
    name: str, device: str | torch.device | None = None, batch_size: int = 32
) -> Callable[[list[str]], np.ndarray]:
    """A function from texts to P(positive), shape (len(texts),).

    ``name`` is a hub id, a local folder, ``builtin:sentiment`` or ``builtin:sentiment-eval``. Raises
    ``OSError`` if it cannot be loaded, ``ValueError`` if no label means positive.
    """
    if is_builtin(name) and resolve(name, "classifier", "linear classifier").joinpath("terms.txt").exists():
        from trl.builtin.evaluator import SentimentEvaluator

        return SentimentEvaluator.load(resolve(name, "linear classifier"))
    classifier = TextClassifier(name, device, batch_size)
    positive = classifier.label_index(POSITIVE_NAMES)

    def probability(texts: list[str]) -> np.ndarray:
        return classifier.logits(texts).softmax(dim=1)[:, positive].numpy()

    return probability


def _positions(config: PretrainedConfig) -> int | float:
    """How many tokens the model has positions for; infinite if it does not say."""
    positions = config.to_dict().get("max_position_embeddings")
    if positions is None or positions < 1:
        return math.inf
    if config.model_type in _POSITIONS_AFTER_PADDING:
        return positions - (config.pad_token_id or 0) - 1
    return positions


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]
