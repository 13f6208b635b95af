"""The models of a run that are loaded: which sits where, and how many bytes it takes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

ADAM_BYTES = 8
"""Two fp32 moments per trained parameter."""


@dataclass(frozen=True)
class Placement:
    """One model of a run. Storage that an earlier model of the plan already holds counts as shared, not again."""

    name: str
    device: str
    dtype: str
    parameters: int
    shared: int
    trained: int
    weight_bytes: int
    training_bytes: int
    """Gradients and Adam's moments of the trained parameters."""


def memory_plan(models: "Mapping[str, nn.Module]") -> list[Placement]:
    """The models' places and sizes, in the given order; one row per model.

    Of models that ZeRO-3 divides, bytes are those of this process's share.
    """
    from trl.trainer.zero import num_weights, share_of

    seen: set[int] = set()
    rows = []
    for name, model in models.items():
        tensors: dict[int, nn.Parameter] = {share_of(p).data_ptr(): p for p in model.parameters()}  # tied weights once
        own = [p for pointer, p in tensors.items() if pointer not in seen]
        trained = [p for p in own if p.requires_grad]
        rows.append(
            Placement(
                name,
                device=", ".join(sorted({str(p.device) for p in tensors.values()})),
                dtype=", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in tensors.values()})),
                parameters=num_weights(tensors.values()),
                shared=num_weights(tensors.values()) - num_weights(own),
                trained=num_weights(trained),
                weight_bytes=sum(share_of(p).numel() * p.element_size() for p in own),
                training_bytes=sum(share_of(p).numel() * (p.element_size() + ADAM_BYTES) for p in trained),
            )
        )
        seen |= tensors.keys()
    return rows


def memory_table(models: "Mapping[str, nn.Module]") -> str:
    """`memory_plan` for people, with the total; activations and generation caches come on top."""
    rows = memory_plan(models)
    lines = [f"{'model':<16}{'device':<8}{'dtype':<18}{'parameters':>14}{'shared':>14}{'trained':>14}{'MB':>9}"]
    for row in rows:
        megabytes = (row.weight_bytes + row.training_bytes) / 1e6
        counts = f"{row.parameters:>14,}{row.shared:>14,}{row.trained:>14,}"
        lines.append(f"{row.name:<16}{row.device:<8}{row.dtype:<18}{counts}{megabytes:>9,.0f}")
    weights, training = sum(r.weight_bytes for r in rows) / 1e6, sum(r.training_bytes for r in rows) / 1e6
    lines.append(f"total {weights + training:,.0f} MB: weights {weights:,.0f}, gradients and Adam {training:,.0f}")
    return "\n".join(lines)
