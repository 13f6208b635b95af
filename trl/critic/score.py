"""Label scores of many phrases after one few-shot prompt, in a few forward passes.

All sequences of a batch begin with the same prompt, and many share more. Sorted, they form a trie; each
token of it is computed once. The tokens of many branches are packed into one sequence whose attention mask
lets a token see the prompt (its keys and values computed once) and its own branch only, at its own position.
The result is that of a plain forward pass over each sequence alone, without padding and without a copy of the
prompt per phrase.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import Cache, PreTrainedModel

logger = logging.getLogger(__name__)

_TOKENS_PER_PASS = 512
"""Attention cost grows with the square of a pass, overhead with the number of passes; flat around this."""


@torch.no_grad()
def label_margins(
    model: PreTrainedModel,
    sequences: Sequence[Sequence[int]],
    labels: tuple[int, int],
    *,
    tokens_per_pass: int = _TOKENS_PER_PASS,
) -> Tensor:
    """logit(labels[0]) - logit(labels[1]) for the token that follows each sequence.

    Args:
        model: a causal language model that takes 4-D attention masks and position ids, in evaluation mode.
        sequences: S non-empty lists of token ids, any lengths; equal ones are computed once.
        labels: the ids of the two label tokens.
        tokens_per_pass: tokens packed into one forward pass.

    Returns:
        (S,) float32, CPU.
    """
    wanted = sorted({tuple(sequence) for sequence in sequences})
    if not wanted or not wanted[0]:
        if wanted:
            raise ValueError("a sequence to score is empty; expected at least one token id")
        return torch.empty(0)
    # Of sorted sequences, the first and last differ most. Each must keep a token of its own, to be read at.
    length = min(_common(wanted[0], wanted[-1]), min(map(len, wanted)) - 1)
    shared = wanted[0][:length]
    cache: Cache | None = None
    if shared:
        prompt = torch.tensor([shared], device=model.device)
        cache = model(input_ids=prompt, use_cache=True, logits_to_keep=1).cache
    margins: dict[tuple[int, ...], float] = {}
    for part in _passes([sequence[len(shared) :] for sequence in wanted], tokens_per_pass):
        logits = _forward(model, part, cache, len(shared))
        values = (logits[:, labels[0]] - logits[:, labels[1]]).tolist()
        margins.update(zip([shared + branch for branch in part.ends], values, strict=True))
        if cache is not None:
            cache.crop(-len(part.tokens))
    return torch.tensor([margins[tuple(sequence)] for sequence in sequences], dtype=torch.float32)


@torch.no_grad()
def plain_label_margins(
    model: PreTrainedModel, sequences: Sequence[Sequence[int]], labels: tuple[int, int], *, batch_size: int = 16
) -> Tensor:
    """What :func:`label_margins` computes, by one whole row per sequence: slow, and right for any causal LM."""
    margins: list[float] = []
    for start in range(0, len(sequences), batch_size):
        rows = sequences[start : start + batch_size]
        lengths = torch.tensor([len(row) for row in rows])
        ids = torch.zeros(len(rows), int(lengths.max()), dtype=torch.long)
        for row, sequence in zip(ids, rows, strict=True):
            row[: len(sequence)] = torch.tensor(sequence)
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
        logits = model(
            input_ids=ids.to(model.device), attention_mask=mask.long().to(model.device), use_cache=False
        ).logits
        last = logits[torch.arange(len(rows)), lengths - 1].float()
        margins += (last[:, labels[0]] - last[:, labels[1]]).tolist()
    return torch.tensor(margins, dtype=torch.float32)


def can_pack(model: PreTrainedModel, sequences: Sequence[Sequence[int]], labels: tuple[int, int]) -> bool:
    """Whether packing is exact for this model, tried on a few sequences.

    It is not where positions come from somewhere else than ``position_ids`` (ALiBi), where the state is
    recurrent, or where the attention kernel takes no mask of this kind; some of these fail without an error.
    """
    plain = plain_label_margins(model, sequences, labels)
    try:
        packed = label_margins(model, sequences, labels)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        logger.info("packed scoring does not run on %s: %s", type(model).__name__, error)
        return False
    exact = model.dtype == torch.float32 and not torch.is_autocast_enabled(model.device.type)
    tolerance = 1e-4 if exact else 0.5  # 16-bit logits of size 16 are 0.125 apart
    return torch.allclose(packed, plain, rtol=1e-4, atol=tolerance)


@dataclass
class _Trie:
    """Branches packed for one pass: T tokens, each with its parent's index (-1: the prompt) and its depth."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ends: dict[tuple[int, ...], int] = field(default_factory=dict)
    """Index of each branch's last token."""


def _passes(branches: Sequence[tuple[int, ...]], limit: int) -> Iterator[_Trie]:
    """Split sorted branches into tries of at most ``limit`` tokens (more, for one branch that is longer)."""
    trie = _Trie()
    path: list[int] = []  # indices of the previous branch's tokens
    previous: tuple[int, ...] = ()
    for branch in branches:
        common = _common(previous, branch)
        if trie.tokens and len(trie.tokens) + len(branch) - common > limit:
            yield trie
            trie, path, common = _Trie(), [], 0
        del path[common:]
        for depth in range(common, len(branch)):
            trie.parents.append(path[-1] if path else -1)
            path.append(len(trie.tokens))
            trie.tokens.append(branch[depth])
            trie.depths.append(depth)
        trie.ends[branch] = path[-1]
        previous = branch
    if trie.tokens:
        yield trie


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common beginning."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


def _forward(model: PreTrainedModel, trie: _Trie, cache: Cache | None, prompt_length: int) -> Tensor:
    """Logits after each branch of the trie, (branches, V) float32."""
    count, device = len(trie.tokens), model.device
    seen = torch.zeros(count, prompt_length + count, dtype=torch.bool)
    seen[:, :prompt_length] = True
    for index, parent in enumerate(trie.parents):
        if parent >= 0:
            seen[index] = seen[parent]
        seen[index, prompt_length + index] = True
    # Additive, because eager attention adds the mask to its scores.
    dtype = torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else model.dtype
    mask = torch.zeros(1, 1, *seen.shape, dtype=dtype).masked_fill_(~seen, torch.finfo(dtype).min)
    output = model(
        input_ids=torch.tensor([trie.tokens], device=device),
        position_ids=prompt_length + torch.tensor([trie.depths], device=device),
        attention_mask=mask.to(device),
        cache=cache,
        use_cache=cache is not None,
        logits_to_keep=torch.tensor(list(trie.ends.values()), device=device),
    )
    logits: Tensor = output.logits[0]
    return logits.float()
