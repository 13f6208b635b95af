"""Splitting a decoder-only transformer into a frozen trunk and trainable top blocks.

With n shared frozen blocks, the hidden states below block n are the same for policy, reference and every
PPO epoch. `TrunkSplit` gives two views of one transformer body, `bottom` and `top`, that reuse the body's
own modules (no copies), so that those hidden states can be computed once and fed to the top blocks.
"""

import copy
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from trl.failures import SettingError


@dataclass(frozen=True)
class _Layout:
    """Where the parts of a transformer body are, by attribute name."""

    body: str
    """Path from the causal LM to the module whose forward runs the blocks."""
    blocks: str
    norm: str
    """Final norm, after the last block."""
    entry: tuple[str, ...] = ()
    """Modules applied to the embeddings before the first block, which the top view must not repeat."""
    leave: tuple[str, ...] = ()
    """Modules after the final norm, which belong to the top."""


_LLAMA = _Layout("model", "layers", "norm")
_LAYOUTS = {
    "gpt2": _Layout("transformer", "h", "ln_f", entry=("wpe",)),
    "gptj": _Layout("transformer", "h", "ln_f"),
    "gpt_neox": _Layout("gpt_neox", "layers", "final_layer_norm"),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "opt": _Layout(
        "model.decoder",
        "layers",
        "final_layer_norm",
        entry=("embed_positions", "project_in"),
        leave=("project_out",),
    ),
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}


class _Zero(nn.Module):
    """Stands in for a position embedding that was already added below."""

    def __init__(self, like: Tensor):
        super().__init__()
        self._like = [like]  # a list, so that a parameter isn't registered a second time

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        return torch.zeros((), dtype=self._like[0].dtype, device=self._like[0].device)


def can_split(lm: nn.Module) -> bool:
    """Whether this causal LM's architecture is one that `TrunkSplit` knows."""
    return isinstance(lm, PreTrainedModel) and lm.config.model_type in _LAYOUTS


def _layout(lm: nn.Module) -> _Layout:
    if not isinstance(lm, PreTrainedModel) or not can_split(lm):
        blocks = f" with {lm.config.num_hidden_layers} blocks" if isinstance(lm, PreTrainedModel) else ""
        raise SettingError(
            f"can't share the lower blocks of {type(lm).__name__}{blocks}: its layout isn't known here. Known "
            f"architectures: {', '.join(sorted(_LAYOUTS))}. Leave num_shared_layers unset for this model."
        )
    return _LAYOUTS[lm.config.model_type]


def body_of(lm: PreTrainedModel) -> PreTrainedModel:
    """The module whose forward maps token ids to final hidden states, for an architecture that splits.

    ``lm`` may also be a model without an LM head (what ``AutoModel`` loads).
    """
    path = _layout(lm).body
    if lm.base_model is lm:  # the first part of the path is where a causal LM keeps it
        path = path.partition(".")[2]
    return cast(PreTrainedModel, lm.get_submodule(path))


def _blocks(lm: PreTrainedModel) -> nn.ModuleList:
    return cast(nn.ModuleList, body_of(lm).get_submodule(_layout(lm).blocks))


def check_num_shared_layers(lm: PreTrainedModel, num_shared_layers: int) -> None:
    """Raise ValueError, naming class and block count, unless 1 <= num_shared_layers < number of blocks."""
    total = len(_blocks(lm))
    if not 1 <= num_shared_layers < total:
        raise SettingError(
            f"num_shared_layers={num_shared_layers} is out of range for {type(lm).__name__} with {total} "
            f"blocks: expected 1 to {total - 1} (sharing all of them would leave nothing to train)"
        )


def trunk_parameters(lm: PreTrainedModel, num_shared_layers: int) -> list[nn.Parameter]:
    """Parameters of the embeddings and the first blocks, an LM head tied to the embeddings included."""
    check_num_shared_layers(lm, num_shared_layers)
    layout, body = _layout(lm), body_of(lm)
    upper: list[nn.Module] = [*_blocks(lm)[num_shared_layers:]]
    upper += [module for name, module in body.named_children() if name in (layout.norm, *layout.leave)]
    above = {id(p) for module in upper for p in module.parameters()}
    return [p for p in body.parameters() if id(p) not in above]


class TrunkSplit:
    """Views of ``lm``'s body below and above block ``num_shared_layers``; both share its parameters.

    ``bottom(input_ids=...)`` gives the hidden states (B, T, D) that enter block n; ``top(inputs_embeds=h)``
    continues from them to the final hidden states, bit-equal to one full pass.

    Not an nn.Module: the views must not appear in a model's parameters or state dict a second time.
    """

    def __init__(self, lm: PreTrainedModel, num_shared_layers: int):
        check_num_shared_layers(lm, num_shared_layers)
        layout, body, blocks = _layout(lm), body_of(lm), _blocks(lm)
        below: dict[str, nn.Module | None] = {
            layout.blocks: blocks[:num_shared_layers],
            layout.norm: nn.Identity(),
        }
        below |= {name: None for name in layout.leave}
        above: dict[str, nn.Module | None] = {layout.blocks: blocks[num_shared_layers:]}
        for name in layout.entry:
            module = body._modules.get(name)  # an optional projection may be absent
            # a position embedding is added, so it becomes 0; a projection is applied, so it is left out
            above[name] = _Zero(module.weight) if isinstance(module, nn.Embedding) else None
        self.bottom = _view(body, below, slice(0, num_shared_layers))
        self.top = _view(body, above, slice(num_shared_layers, None))


def _view(body: PreTrainedModel, replaced: dict[str, nn.Module | None], kept: slice) -> PreTrainedModel:
    """A shallow copy of ``body`` with some children replaced; all other children are the same objects."""
    view = copy.copy(body)
    view._modules = {**body._modules, **replaced}
    config = copy.copy(body.config)
    total = config.num_hidden_layers
    config.num_hidden_layers = len(range(*kept.indices(total)))
    if config.to_dict().get("layer_types"):  # per-block attention kinds are looked up by position
        config.layer_types = config.layer_types[kept]
    view.config = config
    return view
