"""From final hidden states to log-probabilities of chosen tokens, at the cost of one (M, V) buffer.

A vocabulary is wide: for a small model the logits weigh more than all its activations. Plain autograd holds them up to
five times over (logits, log-softmax, entropy's products, their gradient). Here the softmax takes the logits' place, and
becomes their gradient in turn, some rows at a time. Where embeddings and LM head are one weight, both parts of its
gradient go to one buffer too.
"""

from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from trl.core import entropy_from_logits, logprobs_from_logits

_ROWS_BYTES = 4 * 2**20
"""Size of the slices in which logits are worked through: small enough for a CPU's cache."""


class TiedGradient:
    """Carries the LM head's part of a tied weight's gradient to the embedding, which comes last in a backward pass."""

    def __init__(self) -> None:
        self.weight: Tensor | None = None


def chosen_logprobs(hidden: Tensor, head: nn.Module, ids: Tensor, tied: TiedGradient | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities of ``ids`` (M,) under ``head(hidden)``, hidden (M, D), and entropies; both (M,), fp32.

    Entropies carry no gradient. ``tied``: what `embed` gave with these hidden states, if anything. A head that is not a
    plain linear layer (an adapter's, or a partitioned one) takes the plain way.
    """
    if not _is_plain(head, nn.Linear):
        logits = head(hidden)
        return logprobs_from_logits(logits, ids), entropy_from_logits(logits.detach())
    weight, bias = cast(Tensor, head.weight), cast(Tensor | None, head.bias)
    if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
        logprobs, entropy = _ChosenLogprobs.apply(hidden, weight, bias, ids, tied)
        return logprobs, entropy
    found = []
    for rows in _slices(len(hidden), len(weight)):
        logits = F.linear(hidden[rows], weight, bias)
        found.append(_to_softmax(logits, ids[rows]))
    logprobs, entropies, _ = (torch.cat(parts) for parts in zip(*found, strict=True))
    return logprobs, entropies


def embed(embedding: nn.Module, ids: Tensor, head: nn.Module) -> tuple[Tensor, TiedGradient | None]:
    """Embeddings (B, T, D) of ``ids``, and a `TiedGradient` where ``head`` shares the trained weight."""
    if not (_is_plain(embedding, nn.Embedding) and embedding.weight is head.weight and torch.is_grad_enabled()):
        return embedding(ids), None
    if not embedding.weight.requires_grad or embedding.max_norm is not None:
        return embedding(ids), None
    tied = TiedGradient()
    return _TiedEmbedding.apply(ids, embedding.weight, embedding.padding_idx, tied), tied


def _is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether this layer may be used without calling it: no adapter around it, and its weight all here."""
    is_divided = hasattr(module.weight, "ds_id")  # by ZeRO-3, which brings it here when the layer is called
    return type(module) is kind and type(module.weight) is nn.Parameter and not is_divided


def _slices(rows: int, vocabulary: int) -> Iterator[slice]:
    size = max(1, _ROWS_BYTES // (4 * vocabulary))
    for start in range(0, max(rows, 1), size):  # one empty slice where there are no rows
        yield slice(start, min(start + size, rows))


def _to_softmax(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, entropies and normalisers (m,); ``logits`` (m, V) become ``exp(logits - max)`` in place."""
    shifted = logits.float()  # the same tensor if it is fp32
    shifted -= shifted.amax(dim=-1, keepdim=True)
    chosen = shifted.gather(-1, ids.unsqueeze(-1)).squeeze(-1)
    shifted.clamp_(min=-1e4)  # an impossible token (-inf) has no entropy, while 0 * -inf is NaN
    exponentials = shifted.exp()
    total = exponentials.sum(-1)
    log_total = total.log()
    mean = torch.bmm(exponentials.unsqueeze(1), shifted.unsqueeze(2)).view(-1) / total
    logits.copy_(exponentials)
    return chosen - log_total, log_total - mean, total


class _ChosenLogprobs(torch.autograd.Function):
    """`chosen_logprobs` with its gradient: (softmax - one-hot), written over the softmax."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, ids: Tensor, tied: TiedGradient | None
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        inputs, matrix = hidden.to(dtype), weight.to(dtype)
        buffer = F.linear(inputs, matrix, None if bias is None else bias.to(dtype))
        parts = [_to_softmax(buffer[rows], ids[rows]) for rows in _slices(len(hidden), len(weight))]
        logprobs, entropies, totals = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(inputs, matrix, ids, totals)
        ctx.buffer, ctx.tied = buffer, tied
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        inputs, matrix, ids, totals = ctx.saved_tensors
        buffer, ctx.buffer = ctx.buffer, None
        if buffer is None:
            raise RuntimeError("this graph was already differentiated: its softmax was overwritten by its gradient")
        for rows in _slices(len(inputs), len(matrix)):
            part = buffer[rows]
            part *= (-grad[rows] / totals[rows]).unsqueeze(-1).to(part.dtype)
            part.scatter_add_(-1, ids[rows].unsqueeze(-1), grad[rows].unsqueeze(-1).to(part.dtype))
        hidden_dtype, weight_dtype, bias_dtype = ctx.dtypes
        needs_hidden, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        of_hidden = (buffer @ matrix).to(hidden_dtype) if needs_hidden else None
        of_bias = buffer.sum(0).to(bias_dtype) if needs_bias else None
        of_weight = (buffer.t() @ inputs).to(weight_dtype) if needs_weight else None
        if ctx.tied is not None:
            ctx.tied.weight, of_weight = of_weight, None
        return of_hidden, of_weight, of_bias, None, None


class _TiedEmbedding(torch.autograd.Function):
    """An embedding whose gradient is added to the LM head's, instead of to zeros as large as the vocabulary."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None, tied: TiedGradient) -> Tensor:
        ctx.save_for_backward(ids, weight)
        ctx.padding_idx, ctx.tied = padding_idx, tied
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ids, weight = ctx.saved_tensors
        total, ctx.tied.weight = ctx.tied.weight, None
        if total is None:  # the loss did not ask for log-probabilities
            total = torch.zeros_like(weight)
        flat, rows = ids.reshape(-1), grad.reshape(-1, grad.shape[-1]).to(total.dtype)
        if ctx.padding_idx is not None:
            rows = rows * (flat != ctx.padding_idx).unsqueeze(-1)
        return None, total.index_add_(0, flat, rows), None, None
