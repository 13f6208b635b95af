"""SFTTrainer: supervised fine-tuning of a causal language model on prompts and reference answers."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl.jsonl import DataFileError
from trl.metrics import position_limit
from trl.models.trunk import body_of, can_split, trunk_parameters
from trl.trainer.sft_config import SFTConfig
from trl.trainer.supervised import SupervisedTrainer, enable_gradient_checkpointing

__all__ = ["SFTConfig", "SFTTrainer"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Example:
    """A prompt of Q tokens and its answer of A tokens, the last of which is EOS."""

    prompt: list[int]
    answer: list[int]


class TargetLogits(nn.Module):
    """A causal LM that projects only the positions that predict an answer's token.

    Of a summary, that is a fifth of the positions; the LM head is most of a small model's work and memory.
    """

    def __init__(self, lm: PreTrainedModel):
        super().__init__()
        self.lm: Any = lm

    def forward(self, input_ids: Tensor, targets: Tensor) -> Tensor:
        """Next-token logits (M, V) at the M positions where the bool mask ``targets`` (B, L) is set, row by row.

        The ids (B, L) are right-padded; causal attention never looks right, so that no mask is needed.
        """
        if not can_split(self.lm):  # an unknown architecture may do more than project: select afterwards
            return cast(Tensor, self.lm(input_ids=input_ids, use_cache=False).logits[targets])
        # embedded here, since some architectures take a pad id in input_ids for a forgotten mask and warn
        embeddings = self.lm.get_input_embeddings()(input_ids)
        hidden = body_of(self.lm)(inputs_embeds=embeddings, use_cache=False).last_hidden_state
        return cast(Tensor, self.lm.get_output_embeddings()(hidden[targets]))


class SFTTrainer(SupervisedTrainer[Example]):
    """Minimises the cross-entropy of answer tokens, EOS included, given their prompts; prompts are not learned.

    Args:
        config: see `SFTConfig`.
        model: a `transformers` causal LM; its weights are changed in place. Dropout stays as its config says.
        tokenizer: of the model; it must have an EOS token, which ends every answer.
        rows: training rows with ``prompt`` and ``answer`` (texts; the answer follows the prompt as it is, so it starts
            with its space).
        eval_rows: held-out rows; the loss and perplexity of their answer tokens are measured.

    Rows of more than ``max_length`` tokens (default: the model's positions) are left out and counted in the log: cut,
    they would teach to stop anywhere, or lose the end of the prompt.
    """

    def __init__(
        self,
        config: SFTConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[dict[str, str]],
        eval_rows: Sequence[dict[str, str]] = (),
    ):
        self.tokenizer = tokenizer
        limit = min(config.max_length or math.inf, position_limit(model))
        self.eval_examples = _within(limit, tokenizer, eval_rows, "held-out")
        if config.num_frozen_layers is not None:
            for parameter in trunk_parameters(model, config.num_frozen_layers):
                parameter.requires_grad_(False)
        if config.gradient_checkpointing:
            enable_gradient_checkpointing(model)
        super().__init__(config, TargetLogits(model), _within(limit, tokenizer, rows, "training"))
        self.lm = model

    def units(self, row: Example) -> int:
        return len(row.answer)

    def loss(self, model: nn.Module, rows: Sequence[Example]) -> tuple[Tensor, dict[str, Tensor]]:
        """Summed cross-entropy (nats), and how many answer tokens are the most likely ones, as ``token_accuracy``."""
        device = self.accelerator.device
        input_ids, targets, labels = (tensor.to(device) for tensor in collate(rows))
        logits = model(input_ids=input_ids, targets=targets).float()  # (M, V)
        hits = (logits.detach().argmax(-1) == labels).sum()
        return F.cross_entropy(logits, labels, reduction="sum"), {"token_accuracy": hits}

    def evaluate(self) -> dict[str, float]:
        """Mean cross-entropy of held-out answer tokens and its exponential."""
        if not self.eval_examples:
            return {}
        sums = {name: torch.zeros((), dtype=torch.float64) for name in ("loss", "token_accuracy", "tokens")}
        for numbers, weight in self._passes(list(range(len(self.eval_examples)))):
            rows = [self.eval_examples[number] for number in numbers]
            loss, logged = self.loss(self.model, rows)
            for name, value in {"loss": loss, **logged, "tokens": torch.tensor(sum(map(self.units, rows)))}.items():
                sums[name] += value.double().cpu() * weight
        total = self._summed(sums)
        mean = {name: total[name] / total["tokens"] for name in ("loss", "token_accuracy")}
        return {**mean, "perplexity": math.exp(min(mean["loss"], 700.0))}

    def save_model(self, folder: Path, state_dict: dict[str, Tensor]) -> None:
        """Ordinary `transformers` files of model and tokenizer."""
        weights = {name.removeprefix("lm."): value for name, value in state_dict.items()}
        self.lm.save_pretrained(folder, state_dict=weights)
        self.tokenizer.save_pretrained(folder)


def encode(tokenizer: PreTrainedTokenizerBase, prompt: str, answer: str) -> Example:
    """Token ids of a prompt, as PPO's queries have them, and of what follows, with EOS.

    The answer's tokens are those that it has in the whole text; some tokenizers would start it differently if it
    stood alone. Where a token reaches across the border, it does: a prompt's ids can't depend on its answer.
    Raises ``DataFileError`` for a tokenizer without EOS, or a prompt without tokens.
    """
    eos = tokenizer.eos_token_id
    if eos is None:
        raise DataFileError("the tokenizer has no EOS token, so that answers could not end; give it one")
    before, whole = (list(tokenizer(text, verbose=False)["input_ids"]) for text in (prompt, prompt + answer))
    if before[-1:] == [eos] and len(before) > 1:  # some tokenizers close every text
        before = before[:-1]
    if whole[-1:] == [eos]:
        whole = whole[:-1]
    if not before:
        raise DataFileError("a prompt without tokens has no position that could predict its answer's first token")
    if whole[: len(before)] == before:
        after = whole[len(before) :]
    else:
        after = list(tokenizer(answer, add_special_tokens=False, verbose=False)["input_ids"])
    return Example(before, [*after, eos])


def collate(rows: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded ids (B, L), the bool mask (B, L) of positions that predict answer tokens, and these tokens (M,)."""
    ids = [torch.tensor([*row.prompt, *row.answer]) for row in rows]
    input_ids = nn.utils.rnn.pad_sequence(ids, batch_first=True)
    targets = torch.zeros_like(input_ids, dtype=torch.bool)
    for number, row in enumerate(rows):
        start = len(row.prompt) - 1
        targets[number, start : start + len(row.answer)] = True
    return input_ids, targets, torch.tensor([token for row in rows for token in row.answer])


def _within(
    limit: float, tokenizer: PreTrainedTokenizerBase, rows: Sequence[dict[str, str]], which: str
) -> list[Example]:
    """The rows as tokens, those of more than ``limit`` left out; all of them: ``DataFileError``."""
    examples = [encode(tokenizer, row["prompt"], row["answer"]) for row in rows]
    kept = [example for example in examples if len(example.prompt) + len(example.answer) <= limit]
    if len(kept) < len(examples):
        logger.info("left out %d of %d %s rows of more than %d tokens", len(rows) - len(kept), len(rows), which, limit)
    if rows and not kept:
        raise DataFileError(
            f"all {len(rows)} {which} rows have more than {limit} tokens; allow longer ones (max_length)"
        )
    return kept
