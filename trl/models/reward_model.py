"""A reward model: a causal transformer with one scalar per position (Stiennon et al. 2020; Ouyang et al. 2022)."""

import logging
from pathlib import Path
from typing import Any, cast

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from trl.models.reward_checkpoint import HEAD_KEY, load_public_body, read_public_state
from trl.models.trunk import trunk_parameters
from trl.models.value_head import (
    FullPrecisionLinear,
    find_file,
    fuse_gelu,
    load_lm,
    read_prefixed,
    switch_dropout_off,
)

logger = logging.getLogger(__name__)

REWARD_HEAD_FILE = "reward_head.safetensors"


class RewardModel(nn.Module):
    """The body of any `transformers` causal LM plus a linear map D → 1 without bias on its last hidden states.

    Attributes: ``backbone`` (the body, without an LM head, which no reward needs and which is often a tenth of the
    weights), ``head`` (``nn.Linear``, kept and computed in fp32). A value network of PPO is one of these too.
    Dropout is off: both texts of a pair, and both passes of PPO's value loss, must see one network.
    """

    def __init__(self, backbone: PreTrainedModel):
        super().__init__()
        if backbone.base_model is not backbone:
            raise TypeError(f"{type(backbone).__name__} is a model with a head; RewardModel takes its base_model")
        self.backbone: Any = backbone
        # the width of what an LM head would read, which opt-350m projects to after its last block
        width = cast(nn.Embedding, backbone.get_input_embeddings()).embedding_dim
        self.head = FullPrecisionLinear(width, 1, bias=False, dtype=torch.float32, device=backbone.device)
        nn.init.normal_(self.head.weight, std=(width + 1) ** -0.5)  # Stiennon et al. 2020, appendix B.1
        switch_dropout_off(backbone)
        fuse_gelu(backbone)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path_or_model: str | Path | PreTrainedModel | PeftModel,
        *,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        config_name: str | None = None,
        **hf_kwargs: Any,
    ) -> "RewardModel":
        """Load a reward model, or start one from a causal LM with a newly initialised head (with a warning).

        Args:
            name_or_path_or_model: a folder that `save_pretrained` wrote; a folder, hub repository or ``.bin`` file
                in the public layout (`trl.models.reward_checkpoint`); a plain causal LM or a LoRA adapter of one
                (merged); or such a model as an object, whose body is then used as it is.
            dtype: of the body; default fp32, since a bf16 weight rounds small updates away.
            device: where the weights go, straight from the file.
            config_name: model whose configuration a public checkpoint without a config.json has.
            hf_kwargs: passed to `transformers`.

        Raises ``OSError`` if there is nothing to load, ``ValueError`` listing the keys if the weights don't fit.
        """
        if isinstance(name_or_path_or_model, nn.Module):
            model = cls(_body(name_or_path_or_model))
            return model if device is None else model.to(device)
        source = str(name_or_path_or_model)
        placement = hf_kwargs if device is None else {**hf_kwargs, "device_map": {"": device}}
        own = find_file(source, REWARD_HEAD_FILE, hf_kwargs) if not source.endswith(".bin") else None
        public = read_public_state(source, hf_kwargs) if own is None else None
        if own is not None:
            model = cls(AutoModel.from_pretrained(source, dtype=dtype or torch.float32, **placement))
            model.head.load_state_dict(read_prefixed(own, ""))
        elif public is not None:
            model = cls(load_public_body(source, public, dtype or torch.float32, config_name, placement))
            model.head.load_state_dict({"weight": public[HEAD_KEY]})
        else:
            model = cls(_body(load_lm(source, dtype or torch.float32, placement)))
            logger.warning("%s holds no reward head: it is newly initialised, for training", source)
        return model.eval()

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Values (B, L) in fp32 of ids (B, L) padded on either side; arbitrary numbers at padding.

        With ``positions``, a bool mask (B, L), only the M selected values are computed: (M,) in row-major order.
        The ids must then be right-padded; causal attention never looks right, so that no mask is needed.
        """
        if positions is not None:
            # embedded here, since some architectures take a pad id in input_ids for a forgotten mask and warn
            embeddings = self.backbone.get_input_embeddings()(input_ids)
            hidden = self.backbone(inputs_embeds=embeddings, use_cache=False).last_hidden_state
            return self._values(hidden[positions])
        return self._values(self._hidden(input_ids, attention_mask))

    def end_scores(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """The value at each row's last real token, (B,) fp32; the same for left and right padding.

        Raises ``ValueError`` for a row without tokens.
        """
        ends = last_positions(attention_mask)
        hidden = self._hidden(input_ids, attention_mask)
        return self._values(hidden[torch.arange(len(ends), device=hidden.device), ends.to(hidden.device)])

    def _hidden(self, input_ids: Tensor, attention_mask: Tensor | None) -> Tensor:
        position_ids = None
        if attention_mask is not None:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        output = self.backbone(
            input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, use_cache=False
        )
        return cast(Tensor, output.last_hidden_state)

    def _values(self, hidden: Tensor) -> Tensor:
        values: Tensor = self.head(hidden)
        return values.squeeze(-1)

    def freeze_lower_blocks(self, num_frozen_layers: int) -> None:
        """Stop training the embeddings and the first blocks, which makes the backward pass shorter.

        Raises ``ValueError`` unless the architecture's layout is known and some block is left to train.
        """
        for parameter in trunk_parameters(self.backbone, num_frozen_layers):
            parameter.requires_grad_(False)

    def save_pretrained(self, save_directory: str | Path, state_dict: dict[str, Tensor] | None = None) -> None:
        """Save the body as ordinary `transformers` files, which ``AutoModel`` reads, and the head in safetensors.

        ``state_dict`` (of this whole module) replaces the model's own weights, for sharded training.
        """
        state = self.state_dict() if state_dict is None else state_dict
        body = {key.removeprefix("backbone."): value for key, value in state.items() if key.startswith("backbone.")}
        self.backbone.save_pretrained(str(save_directory), state_dict=body)
        head = {"weight": state["head.weight"].detach().cpu().contiguous()}
        save_file(head, Path(save_directory) / REWARD_HEAD_FILE, metadata={"format": "pt"})


def last_positions(attention_mask: Tensor) -> Tensor:
    """Index of the last 1 in each row of a mask (B, L), as (B,); ``ValueError`` for a row without any."""
    mask = attention_mask.bool()
    if not bool(mask.any(dim=1).all()):
        rows = (~mask.any(dim=1)).nonzero().flatten().tolist()
        raise ValueError(f"rows {rows} hold no token (their attention mask is all 0), so that they have no end score")
    return mask.shape[1] - 1 - mask.flip(1).long().argmax(dim=1)


def _body(lm: nn.Module) -> PreTrainedModel:
    if isinstance(lm, PeftModel):
        lm = cast(Any, lm).merge_and_unload()
    if not isinstance(lm, PreTrainedModel):
        raise TypeError(f"expected a transformers model, got {type(lm).__name__}")
    return cast(PreTrainedModel, lm.base_model)
