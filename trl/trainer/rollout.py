"""One batch of sampled responses and what the models say of it: log-probs, KL, values, trunk states."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from trl.core import entropy_from_logits, kl_penalty, logprobs_from_logits
from trl.models import AutoModelForCausalLMWithValueHead, RewardModel
from trl.models.trunk import trunk_parameters

_MIN_PASS_SIZE = 8
"""Samples per pass without gradients, at least; such a pass needs a fraction of a training pass's memory."""


class Sequences:
    """Query and response ids of a batch of B samples, and their layout for forward passes.

    Sequences are padded on the right and lack their last token, whose prediction nobody needs; causal
    attention never looks right, so no attention mask is needed and padding changes nothing.
    ``exists`` (B, N) marks the response tokens; N is the longest response, at least 1.
    """

    def __init__(self, queries: Sequence[Tensor], responses: Sequence[Tensor], device: torch.device):
        self.ids = [torch.cat([q.to(device), r.to(device)]) for q, r in zip(queries, responses, strict=True)]
        self.query_lengths = [len(q) for q in queries]
        self.response_lengths = [len(r) for r in responses]
        self.device = device
        width = max(1, *self.response_lengths)
        columns = torch.arange(width, device=device)
        self.exists = columns < torch.tensor(self.response_lengths, device=device).unsqueeze(1)

    def __len__(self) -> int:
        return len(self.ids)

    def by_length(self, size: int) -> list[list[int]]:
        """All rows, in chunks of similar length."""
        order = sorted(range(len(self)), key=lambda i: len(self.ids[i]))
        return [order[i : i + size] for i in range(0, len(order), size)]

    def groups(self, rows: Sequence[int], most: int = 4) -> list[list[int]]:
        """``rows`` of one pass in chunks of similar length, where that saves a fifth of the padded tokens or more."""
        order = sorted(rows, key=lambda i: len(self.ids[i]))
        best, least = [order], len(order) * len(self.ids[order[-1]])
        for count in range(2, min(most, len(order)) + 1):
            size = -(-len(order) // count)
            chunks = [order[i : i + size] for i in range(0, len(order), size)]
            padded = sum(len(chunk) * len(self.ids[chunk[-1]]) for chunk in chunks)
            if padded <= 0.8 * least:
                best, least = chunks, padded
        return best

    def inputs(self, i: int) -> Tensor:
        """Ids (T_i,) that the models read of sample i: all but the last, but at least one.

        A one-token query with an empty response keeps its token, since models can't run on none.
        """
        return self.ids[i][: max(1, len(self.ids[i]) - 1)]

    def layout(self, rows: Sequence[int], mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs (b, T), the positions (b, T) whose next token is wanted, and those tokens (M,).

        ``mask`` (b, N) chooses response tokens; M is its sum, in row-major order.
        """
        ids = pad_sequence([self.inputs(i) for i in rows], batch_first=True)
        positions = torch.zeros_like(ids, dtype=torch.bool)
        labels = []
        for row, i in enumerate(rows):
            start, n = self.query_lengths[i], self.response_lengths[i]
            positions[row, start - 1 : start - 1 + n] = mask[row, :n]
            labels.append(self.ids[i][start:][mask[row, :n]])
        return ids, positions, torch.cat(labels)


@dataclass
class Rollout:
    """What policy and reference say of the sampled tokens; all tensors (B, N), fp32, 0 where no token is."""

    logprobs: Tensor
    ref_logprobs: Tensor
    kl: Tensor
    values: Tensor
    entropy: Tensor
    trunk: list[Tensor] | None
    """Per sample (T_i, D): hidden states entering the first unshared block, when the trunk is cached."""
    first_pass: "GraphPass | None" = None


@dataclass
class GraphPass:
    """A pass of the policy with its graph; over the whole batch it is the rollout's and the first epoch's at once."""

    rows: list[int]
    logprobs: Tensor
    """(M,) of all response tokens, row-major in the order of ``rows``."""
    values: Tensor
    """(M,)."""

    @classmethod
    def joined(cls, parts: Sequence["GraphPass"]) -> "GraphPass":
        """One after the other."""
        rows = [row for part in parts for row in part.rows]
        with torch.enable_grad():
            return cls(rows, torch.cat([p.logprobs for p in parts]), torch.cat([p.values for p in parts]))


class RolloutPasses:
    """The passes without gradients over a batch: trunk (once), policy and reference on top of it.

    ``reference`` None means: the policy with its adapters disabled. ``value_model`` None: the policy's value head.
    ``most_of_all`` gives the largest of all processes' numbers: where weights are divided over processes, a pass is a
    collective, so that all must make equally many.
    """

    def __init__(
        self,
        policy: AutoModelForCausalLMWithValueHead,
        reference: AutoModelForCausalLMWithValueHead | None,
        kl_kind: str,
        mini_batch_size: int,
        value_model: RewardModel | None = None,
        most_of_all: Callable[[int], int] = int,
    ):
        self.policy, self.reference, self.kl_kind, self.value_model = policy, reference, kl_kind, value_model
        self.most_of_all = most_of_all
        self.size = max(mini_batch_size, _MIN_PASS_SIZE)
        self.caches_trunk = _same_trunk(policy, reference)

    @torch.no_grad()
    def run(self, sequences: Sequences, trained: Sequence[nn.Module] = ()) -> Rollout:
        """Log-probs, KL, values and entropies of every response token; FloatingPointError if not finite.

        ``trained``: the prepared policy (and value model), in train mode, where one optimizer step takes the whole
        batch. Their pass then keeps its graph, so that the first epoch needs none of its own.
        """
        shape = sequences.exists.shape
        out = {name: torch.zeros(shape, device=sequences.device) for name in _FIELDS}
        trunk: list[Tensor] | None = [torch.empty(0)] * len(sequences) if self.caches_trunk else None
        graphs: list[GraphPass] = []
        if trained:
            chunks = sequences.groups(range(len(sequences)))
        else:
            chunks = sequences.by_length(self.size)
            chunks = chunks + chunks[:1] * (self.most_of_all(len(chunks)) - len(chunks))
        for rows in chunks:
            mask = sequences.exists[rows]
            ids, positions, labels = sequences.layout(rows, mask)
            states = None
            if trunk is not None:
                states = self.policy.trunk(ids)
                for row, i in enumerate(rows):
                    trunk[i] = states[row, : len(sequences.inputs(i))].clone()
            chunk = self._chunk(ids, positions, labels, states, trained)
            if trained:
                graphs.append(GraphPass(rows, chunk["logprobs"], chunk["values"]))
            for name, tensor in out.items():
                target = torch.zeros(mask.shape, device=sequences.device)
                target[mask] = chunk[name].detach()
                tensor[rows] = target
        _check_finite(out, sequences)
        return Rollout(**out, trunk=trunk, first_pass=GraphPass.joined(graphs) if trained else None)

    def _chunk(
        self, ids: Tensor, positions: Tensor, labels: Tensor, states: Tensor | None, trained: Sequence[nn.Module]
    ) -> dict[str, Tensor]:
        """The five statistics of M selected tokens, each (M,)."""
        inputs = {"input_ids": ids} if states is None else {"trunk_states": states}
        whole = self.kl_kind == "full"  # needs distributions, not only what they say of the sampled tokens
        if not whole:
            inputs["next_ids"] = labels
        with reference_weights(self.policy, self.reference) as reference:
            reference_says, _, _ = reference(positions=positions, **inputs)
        policy: nn.Module = trained[0] if trained else self.policy
        value_model: nn.Module | None = self.value_model
        if value_model is not None and trained:
            value_model = trained[1]
        with torch.set_grad_enabled(bool(trained)):
            policy_says, entropy, values = policy(positions=positions, **inputs)
            if value_model is not None:
                values = value_model(ids, positions=positions)
            logprobs = logprobs_from_logits(policy_says, labels) if whole else policy_says
        if whole:
            distribution, ref_distribution = (
                F.log_softmax(x.detach().float(), -1) for x in (policy_says, reference_says)
            )
            entropy = entropy_from_logits(distribution)
            kl = kl_penalty(distribution, ref_distribution, "full")
            reference_says = ref_distribution.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        else:
            kl = kl_penalty(logprobs.detach(), reference_says, self.kl_kind)
        return {
            "logprobs": logprobs,
            "ref_logprobs": reference_says,
            "kl": kl,
            "values": values,
            "entropy": entropy,
        }


_FIELDS = ("logprobs", "ref_logprobs", "kl", "values", "entropy")


@contextmanager
def reference_weights(
    policy: AutoModelForCausalLMWithValueHead, reference: AutoModelForCausalLMWithValueHead | None
) -> Iterator[AutoModelForCausalLMWithValueHead]:
    """The reference model; where there is none, the PEFT policy with its adapters off for the block."""
    if reference is not None:
        yield reference
    else:
        with cast(PeftModel, policy.pretrained_model).disable_adapter():
            yield policy


def _same_trunk(policy: AutoModelForCausalLMWithValueHead, reference: AutoModelForCausalLMWithValueHead | None) -> bool:
    """Whether both models read the same frozen storage below their top blocks."""
    n = policy.num_shared_layers
    if n == 0 or reference is None or reference.num_shared_layers != n:
        return False
    pairs = zip(trunk_parameters(policy.base_lm, n), trunk_parameters(reference.base_lm, n), strict=True)
    return all(a.data_ptr() == b.data_ptr() for a, b in pairs)


def _check_finite(tensors: dict[str, Tensor], sequences: Sequences) -> None:
    names = {"logprobs": "policy logits", "ref_logprobs": "reference logits", "values": "values", "kl": "KL"}
    for name, source in names.items():
        bad = ~tensors[name].isfinite()
        if bad.any():
            sample, token = bad.nonzero()[0].tolist()
            raise FloatingPointError(
                f"{source} are not finite at sample {sample}, response token {token} (id "
                f"{int(sequences.ids[sample][sequences.query_lengths[sample] + token])}); nothing was updated. "
                "Lower the learning rate, or resume from the last checkpoint."
            )
