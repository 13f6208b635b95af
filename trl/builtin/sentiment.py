"""``builtin:sentiment``: MiniLM fine-tuned on Rotten Tomatoes, the reward model of the offline sentiment task.

Only the upper half of the network learns. What the lower half makes of each text never changes, so it is
computed once and kept, which is most of what makes two epochs fit into two minutes on two cores. The result is
an ordinary transformers sequence-classification folder with the labels NEGATIVE and POSITIVE.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForSequenceClassification,
    PreTrainedTokenizerBase,
)

from trl.builtin.catalog import Progress, resolve
from trl.builtin.reviews import read_rows

FROZEN_BLOCKS = 3
EPOCHS = 2
BATCH = 32
LEARNING_RATE = 1e-4
WARMUP_STEPS = 20
MAX_TOKENS = 128
SEED = 0


def build(target: Path, source: Path, progress: Progress) -> dict[str, float]:
    """Train on the train split, save to ``target``, and return the accuracy on the held-out split."""
    data = resolve("builtin:rotten-tomatoes", "data set")
    train, test = read_rows(data / "train.jsonl"), read_rows(data / "test.jsonl")
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(source.parent)
    model = AutoModelForSequenceClassification.from_pretrained(
        source.parent,
        id2label={0: "NEGATIVE", 1: "POSITIVE"},
        label2id={"NEGATIVE": 0, "POSITIVE": 1},
        dtype=torch.float32,
    )
    progress("reading the texts with the frozen half", 0.0)
    states = _lower_states(model, _tokenize(tokenizer, train))
    labels = torch.tensor([row["label"] for row in train])
    _train(model, states, labels, progress)
    progress("measuring on held-out texts", 0.95)
    held_out = _lower_states(model, _tokenize(tokenizer, test))
    accuracy = _accuracy(model, held_out, torch.tensor([row["label"] for row in test]))
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return {"rotten-tomatoes accuracy": accuracy}


def _tokenize(tokenizer: PreTrainedTokenizerBase, rows: Sequence[dict]) -> list[Tensor]:
    texts = [row["text"] for row in rows]
    return [torch.tensor(ids) for ids in tokenizer(texts, truncation=True, max_length=MAX_TOKENS).input_ids]


def _run(blocks: nn.ModuleList, hidden: Tensor, mask: Tensor) -> Tensor:
    """``hidden`` (B, T, C) through ``blocks``; ``mask`` (B, T) is True at real tokens."""
    for block in blocks:
        hidden = block(hidden, mask[:, None, None, :])
    return hidden


def _batches(sequences: Sequence[Tensor], size: int) -> list[list[int]]:
    """Indices in batches of similar length, so that little is padding."""
    order = sorted(range(len(sequences)), key=lambda index: len(sequences[index]))
    return [order[start : start + size] for start in range(0, len(order), size)]


def _pad(sequences: list[Tensor]) -> tuple[Tensor, Tensor]:
    """(B, T, …) padded with zeros and its mask (B, T)."""
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    padded = nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    return padded, torch.arange(padded.shape[1]) < lengths[:, None]


@torch.no_grad()
def _lower_states(model: BertForSequenceClassification, ids: list[Tensor]) -> list[Tensor]:
    """What the frozen blocks make of each text: (T_i, C) each."""
    model.eval()
    states: list[Tensor] = [torch.empty(0)] * len(ids)
    for batch in _batches(ids, 64):
        padded, mask = _pad([ids[index] for index in batch])
        embedded = model.bert.embeddings(input_ids=padded)
        hidden = _run(model.bert.encoder.layer[:FROZEN_BLOCKS], embedded, mask)
        for row, index in enumerate(batch):
            states[index] = hidden[row, : len(ids[index])].clone()
    return states


def _pooler(model: BertForSequenceClassification) -> nn.Module:
    return model.bert.get_submodule("pooler")  # optional in BertModel, always there in a classifier


def _logits(model: BertForSequenceClassification, states: list[Tensor]) -> Tensor:
    """Class logits (B, 2) from the cached states of a batch."""
    padded, mask = _pad(states)
    hidden = _run(model.bert.encoder.layer[FROZEN_BLOCKS:], padded, mask)
    return model.classifier(model.dropout(_pooler(model)(hidden)))


def _train(model: BertForSequenceClassification, states: list[Tensor], labels: Tensor, progress: Progress) -> None:
    learning = nn.ModuleList([*model.bert.encoder.layer[FROZEN_BLOCKS:], _pooler(model), model.classifier])
    optimizer = torch.optim.AdamW(learning.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    batches = _batches(states, BATCH)
    total = EPOCHS * len(batches)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / WARMUP_STEPS, 1.0) * (1 - step / total)
    )
    order = random.Random(SEED)
    model.train()
    for epoch in range(EPOCHS):
        order.shuffle(batches)
        for step, batch in enumerate(batches):
            loss = F.cross_entropy(_logits(model, [states[index] for index in batch]), labels[batch])
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            done = (epoch * len(batches) + step + 1) / total
            progress(f"training, epoch {epoch + 1} of {EPOCHS}", 0.1 + 0.85 * done)


@torch.no_grad()
def _accuracy(model: BertForSequenceClassification, states: list[Tensor], labels: Tensor) -> float:
    model.eval()
    right = 0
    for batch in _batches(states, 64):
        predicted = _logits(model, [states[index] for index in batch]).argmax(dim=1)
        right += int((predicted == labels[batch]).sum())
    return right / len(states)
