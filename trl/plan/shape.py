"""The sizes of a causal language model that a plan needs, from its configuration alone: no weights are read."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

PUBLIC: dict[str, tuple[str, dict[str, Any]]] = {
    "distilgpt2": ("gpt2", {"n_layer": 6}),
    "gpt2": ("gpt2", {}),
    "lvwerra/gpt2-imdb": ("gpt2", {}),
    "gpt2-medium": ("gpt2", {"n_layer": 24, "n_embd": 1024, "n_head": 16}),
    "gpt2-large": ("gpt2", {"n_layer": 36, "n_embd": 1280, "n_head": 20}),
    "gpt2-xl": ("gpt2", {"n_layer": 48, "n_embd": 1600, "n_head": 25}),
    "meta-llama/Llama-2-7b-hf": ("llama", {"max_position_embeddings": 4096}),
    "meta-llama/Llama-2-7b-chat-hf": ("llama", {"max_position_embeddings": 4096}),
}
"""Public models whose sizes need no hub: architecture, and what differs from its defaults in `transformers`."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a dense causal language model. A "weight" is an entry of a matrix that a token is multiplied by."""

    name: str
    layers: int
    width: int
    vocab: int
    attention: int
    """Heads times a head's width."""
    keys: int
    """Key heads times a head's width: what one token leaves in one block's key cache."""
    block_weights: int
    block_parameters: int
    """With biases and norms."""
    parameters: int
    tied: bool
    """Whether the LM head is the embedding table."""

    @property
    def head_weights(self) -> int:
        """Weights of the LM head."""
        return self.vocab * self.width

    @property
    def body_parameters(self) -> int:
        """Without an LM head of its own: what a reward or value model keeps."""
        return self.parameters - (0 if self.tied else self.head_weights)

    def check_shared_layers(self, shared_layers: int) -> None:
        """Raise ValueError unless a block is left above ``shared_layers``."""
        if not 0 <= shared_layers < self.layers:
            raise ValueError(f"{shared_layers} shared layers of {self.name}: expected 0 to {self.layers - 1}")


def shape_of(config: "PreTrainedConfig", name: str) -> ModelShape:
    """The sizes of the causal LM that ``config`` describes, counted on a model without storage.

    Raises ValueError for a mixture of experts, of whose weights a token meets only some.
    """
    import torch
    from torch import nn
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(config)
    text = config.get_text_config()
    layers, heads = int(text.num_hidden_layers), int(text.num_attention_heads)
    lists = (m for m in lm.modules() if isinstance(m, nn.ModuleList) and len(m) == layers)
    blocks = [p for module in next(lists) for p in module.parameters()]
    if any(p.dim() > 2 for p in blocks):
        raise ValueError(f"{name} ({text.model_type}) is a mixture of experts or no plain transformer: not covered")
    written = text.to_dict()  # some configurations have no such fields
    head_width = written.get("head_dim") or text.hidden_size // heads
    head, table = lm.get_output_embeddings(), lm.get_input_embeddings()
    return ModelShape(
        name,
        layers=layers,
        width=head.in_features,
        vocab=table.num_embeddings,
        attention=heads * head_width,
        keys=(written.get("num_key_value_heads") or heads) * head_width,
        block_weights=sum(p.numel() for p in blocks if p.dim() == 2) // layers,
        block_parameters=sum(p.numel() for p in blocks) // layers,
        parameters=sum(p.numel() for p in lm.parameters()),
        tied=head.weight is table.weight,
    )


def find_shape(name: str) -> ModelShape:
    """The sizes of a public model listed here, a ``builtin:`` name, a local folder, or a hub id that can be reached.

    Raises ValueError, saying what to give instead, where there is no configuration to read.
    """
    from transformers import AutoConfig

    from trl.builtin import locate_model

    if name in PUBLIC:
        family, sizes = PUBLIC[name]
        return shape_of(AutoConfig.for_model(family, **sizes), name)
    try:
        config = AutoConfig.from_pretrained(locate_model(name))
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"no sizes of {name}: {reason}. Known without a hub: {', '.join(PUBLIC)}. Or give the sizes themselves: "
            "--layers, --width, --heads and --vocab (for Llama's blocks --family llama, --mlp_width, --kv_heads)"
        ) from None
    return shape_of(config, name)
