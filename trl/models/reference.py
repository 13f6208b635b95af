"""The frozen reference model that the KL penalty is measured against."""

import copy

from torch import nn

from trl.models.trunk import trunk_parameters
from trl.models.value_head import AutoModelForCausalLMWithValueHead


def create_reference_model(
    model: AutoModelForCausalLMWithValueHead, num_shared_layers: int | None = None
) -> AutoModelForCausalLMWithValueHead:
    """A frozen copy of ``model``.

    With ``num_shared_layers=n`` (1 to blocks - 1), the embeddings and the first n blocks are the same storage
    in both models and the policy stops training them; an LM head tied to the embeddings freezes with them.
    Raises ValueError for n out of range or an architecture that can't be split.
    """
    if num_shared_layers is None:
        shared: list[nn.Parameter] = []
    elif model.is_peft:
        raise ValueError(
            "num_shared_layers doesn't go with a PEFT policy: its reference is the policy itself with "
            "adapters disabled, which already shares every base weight. Leave num_shared_layers unset."
        )
    else:
        shared = trunk_parameters(model.base_lm, num_shared_layers)
    split, model._split = model._split, None  # views are rebuilt, not copied
    reference = copy.deepcopy(model, {id(p): p for p in shared})
    model._split = split
    for parameter in [*reference.parameters(), *shared]:
        parameter.requires_grad_(False)
    if num_shared_layers is not None:
        model.split_at(num_shared_layers)
        reference.split_at(num_shared_layers)
    return reference
