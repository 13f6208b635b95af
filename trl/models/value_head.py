"""A causal language model with a value head: PPO's policy and its state-value estimator in one module."""

import json
import logging
from pathlib import Path
from typing import Any, cast
from zipfile import is_zipfile

import torch
import torch.nn.functional as F
from peft import PeftConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import NewGELUActivation
from transformers.utils import PushToHubMixin, cached_file

from trl.core import entropy_from_logits, logprobs_from_logits
from trl.jsonl import DataFileError
from trl.model_files import load_language_model
from trl.models.head import TiedGradient, chosen_logprobs, embed
from trl.models.trunk import TrunkSplit, body_of, can_split

logger = logging.getLogger(__name__)

VALUE_HEAD_FILE = "value_head.safetensors"
_PREFIX = "v_head."


class FullPrecisionLinear(nn.Linear):
    """A linear map computed in fp32, whatever the dtype of its weights and its input.

    A module of its own, since ZeRO-3 brings the weights of a module together where that module is called.
    """

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return F.linear(hidden.float(), self.weight.float(), bias)


class ValueHead(nn.Module):
    """Linear map from the final hidden state (…, D) to a scalar value (…), computed in fp32."""

    def __init__(self, hidden_size: int):
        super().__init__()
        self.summary = FullPrecisionLinear(hidden_size, 1)
        # small initial values (Stiennon et al. 2020, appendix B.1): early advantages then follow the rewards
        nn.init.normal_(self.summary.weight, std=1 / (hidden_size + 1))
        nn.init.zeros_(self.summary.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        values: Tensor = self.summary(hidden)
        return values.squeeze(-1)


class AutoModelForCausalLMWithValueHead(nn.Module, PushToHubMixin):
    """Any `transformers` causal LM (or PEFT model of one) plus a `ValueHead`.

    Attributes: ``pretrained_model`` (the causal LM), ``v_head``, ``num_shared_layers`` (0, or the number of
    frozen blocks shared with a reference, set by `create_reference_model`).
    """

    def __init__(self, pretrained_model: PreTrainedModel | PeftModel):
        super().__init__()
        if isinstance(pretrained_model, PeftModel) and pretrained_model.active_peft_config.is_prompt_learning:
            raise ValueError(
                f"{type(pretrained_model.active_peft_config).__name__} puts virtual tokens before the prompt, "
                "which token-level rewards can't be aligned with; use an adapter such as LoRA"
            )
        self.pretrained_model: Any = pretrained_model
        # the width that the LM head reads, which some architectures project to after the last block
        self.v_head = ValueHead(self.base_lm.get_output_embeddings().in_features)
        self.v_head.to(pretrained_model.device)
        self.num_shared_layers = 0
        self._split: TrunkSplit | None = None
        switch_dropout_off(pretrained_model)
        fuse_gelu(pretrained_model)

    @classmethod
    def from_pretrained(
        cls,
        name_or_model: str | Path | PreTrainedModel | PeftModel,
        *,
        dtype: torch.dtype | None = None,
        peft_config: PeftConfig | None = None,
        expects_value_head: bool = True,
        **hf_kwargs: Any,
    ) -> "AutoModelForCausalLMWithValueHead":
        """Load a hub id or local folder (plain, PEFT adapter, legacy value-head checkpoint), or wrap a model.

        Weights load in fp32 unless ``dtype`` is given: a bf16 weight trained at lr 1e-5 rounds its updates
        away. ``hf_kwargs`` go to `transformers`. Warns when the checkpoint has no value head, unless none is expected:
        PPO usually starts from a plain language model.
        """
        if isinstance(name_or_model, nn.Module):
            lm, source = name_or_model, None
        else:
            source = str(name_or_model)
            lm = load_lm(source, dtype or torch.float32, hf_kwargs)
        if peft_config is not None:
            lm = cast(PeftModel, get_peft_model(cast(PreTrainedModel, lm), peft_config))
        model = cls(lm)
        if source is not None:
            state = _find_value_head(source, hf_kwargs)
            if state is None:
                level = logging.WARNING if expects_value_head else logging.DEBUG
                logger.log(level, "%s holds no value head: it is newly initialised, for PPO to train", source)
            else:
                model.v_head.load_state_dict(state)
        return model

    @property
    def is_peft(self) -> bool:
        """Whether the policy is a PEFT model, whose reference is itself with adapters disabled."""
        return isinstance(self.pretrained_model, PeftModel)

    @property
    def base_lm(self) -> Any:
        """The `transformers` causal LM itself (a PreTrainedModel), inside PEFT's wrapper if there is one."""
        lm = self.pretrained_model
        return lm.get_base_model() if isinstance(lm, PeftModel) else lm

    def split_at(self, num_shared_layers: int) -> None:
        """Declare the first blocks frozen, so that `trunk` and ``trunk_states`` can be used."""
        self._split = TrunkSplit(self.base_lm, num_shared_layers)
        self.num_shared_layers = num_shared_layers

    def trunk(self, input_ids: Tensor) -> Tensor:
        """Hidden states (B, T, D) entering the first unshared block, for right-padded ids (B, T)."""
        if self._split is None:
            raise RuntimeError("trunk() needs shared layers: see create_reference_model")
        with torch.no_grad():
            embeddings = self.base_lm.get_input_embeddings()(input_ids)
            return self._split.bottom(inputs_embeds=embeddings, use_cache=False).last_hidden_state

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        trunk_states: Tensor | None = None,
        next_ids: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Next-token logits, LM loss (None without ``labels``) and values.

        input_ids, attention_mask: (B, T), padded on either side. Returns logits (B, T, V) and values (B, T)
        in fp32. With ``positions``, a bool mask (B, T), only M selected positions are projected: logits
        (M, V) and values (M,), in row-major order; the ids must then be right-padded (causal attention never
        looks right, so no mask is needed). ``trunk_states`` (B, T, D), from `trunk`, replaces ``input_ids``.
        With ``next_ids`` (M,) too, the logits stay inside: log-probabilities of these tokens, entropies (without a
        gradient) and values, all (M,) in fp32.
        """
        if positions is not None and can_split(self.base_lm):
            head = self.base_lm.get_output_embeddings()
            hidden, tied = self._final_hidden(input_ids, trunk_states, head)
            hidden = hidden[positions]
            if next_ids is not None:
                return *chosen_logprobs(hidden, head, next_ids, tied), self.v_head(hidden)
            return head(hidden), None, self.v_head(hidden)
        if attention_mask is not None and position_ids is None:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
        output = self.pretrained_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            labels=labels,
            output_hidden_states=True,
            use_cache=False,
            **kwargs,
        )
        hidden = output.hidden_states[-1]
        if positions is not None:  # an unknown architecture may do more than project: select afterwards
            logits, values = output.logits[positions], self.v_head(hidden[positions])
            if next_ids is not None:
                return logprobs_from_logits(logits, next_ids), entropy_from_logits(logits.detach()), values
            return logits, None, values
        return output.logits, output.loss, self.v_head(hidden)

    def _final_hidden(
        self, input_ids: Tensor | None, trunk_states: Tensor | None, head: nn.Module
    ) -> tuple[Tensor, TiedGradient | None]:
        """Hidden states after the final norm, (B, T, D), and what `embed` gave for ``head`` beside them."""
        if trunk_states is not None:
            if self._split is None:
                raise RuntimeError("trunk_states need shared layers: see create_reference_model")
            if torch.is_grad_enabled() and self.base_lm.is_activation_checkpointing:
                # reentrant checkpointing gives no gradient to blocks none of whose inputs wants one
                trunk_states = trunk_states.detach().requires_grad_()
            return self._split.top(inputs_embeds=trunk_states, use_cache=False).last_hidden_state, None
        # embedded here, since some architectures take a pad id in input_ids for a forgotten mask and warn
        embeddings, tied = embed(self.base_lm.get_input_embeddings(), cast(Tensor, input_ids), head)
        return body_of(self.base_lm)(inputs_embeds=embeddings, use_cache=False).last_hidden_state, tied

    def generate(self, *args: Any, **kwargs: Any) -> Tensor:
        """`transformers` generation of the language model; see there for the arguments."""
        return cast(Tensor, self.pretrained_model.generate(*args, **kwargs))

    def save_pretrained(
        self, save_directory: str | Path, state_dict: dict[str, Tensor] | None = None, **kwargs: Any
    ) -> None:
        """Save ordinary `transformers` (or PEFT adapter) files plus the value head in safetensors.

        ``state_dict`` (of this whole module) replaces the model's own weights, for sharded training.
        """
        state = self.state_dict() if state_dict is None else state_dict
        head = {k.removeprefix(_PREFIX): v for k, v in state.items() if k.startswith(_PREFIX)}
        if state_dict is not None:
            kwargs["state_dict"] = {
                k.removeprefix("pretrained_model."): v for k, v in state.items() if not k.startswith(_PREFIX)
            }
        if isinstance(self.pretrained_model, PeftModel):
            for config in self.pretrained_model.peft_config.values():
                sets = {name: sorted(value) for name, value in vars(config).items() if isinstance(value, set)}
                vars(config).update(sets)  # a set would be written in another order by every process
        self.pretrained_model.save_pretrained(str(save_directory), **kwargs)
        head = {k: v.detach().cpu().contiguous() for k, v in head.items()}
        save_file(head, Path(save_directory) / VALUE_HEAD_FILE, metadata={"format": "pt"})


def load_lm(source: str, dtype: torch.dtype, hf_kwargs: dict[str, Any]) -> PreTrainedModel | PeftModel:
    """The causal LM of a hub id or folder, with its adapter if it is one.

    Raises ``DataFileError`` where the files are of no model that `transformers` knows, or don't fit each other.
    """
    if find_file(source, "adapter_config.json", hf_kwargs) is None:
        return load_language_model(source, dtype=dtype, **hf_kwargs)
    base = PeftConfig.from_pretrained(source).base_model_name_or_path
    if base is None:
        raise DataFileError(f"{source}/adapter_config.json names no base model (base_model_name_or_path)")
    return PeftModel.from_pretrained(load_language_model(base, dtype=dtype, **hf_kwargs), source, is_trainable=True)


def switch_dropout_off(lm: nn.Module) -> None:
    """Zero every dropout probability except LoRA's: PPO's ratio compares two passes of one policy.

    The modules stay in train mode, which gradient checkpointing needs. Besides `nn.Dropout`, architectures
    keep probabilities in float attributes (attention_dropout, layerdrop, …) read in train mode only.
    """
    for name, module in lm.named_modules():
        if "lora_" in name:
            continue
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for attribute, value in vars(module).items():
            if "drop" in attribute and isinstance(value, float):
                setattr(module, attribute, 0.0)


def fuse_gelu(lm: nn.Module) -> None:
    """Let GPT-2's activation be one operator: spelled out, it keeps some eight tensors of an MLP's width per block."""
    for module in lm.modules():
        for name, child in module.named_children():
            if isinstance(child, NewGELUActivation):
                setattr(module, name, nn.GELU(approximate="tanh"))


_HUB_KWARGS = {"subfolder", "revision", "cache_dir", "token", "local_files_only", "force_download"}
"""Those of `from_pretrained`'s arguments that say where a file is."""


def find_file(source: str, name: str, hf_kwargs: dict[str, Any]) -> str | None:
    """Path of one file of a local folder or hub repository, None where there is none."""
    return cached_file(
        source,
        name,
        **{k: v for k, v in hf_kwargs.items() if k in _HUB_KWARGS},
        _raise_exceptions_for_missing_entries=False,
        _raise_exceptions_for_connection_errors=False,
        _raise_exceptions_for_gated_repo=False,
    )


def _find_value_head(source: str, hf_kwargs: dict[str, Any]) -> dict[str, Tensor] | None:
    """The value head's weights from our own file, or from ``v_head.*`` keys in (sharded) model files."""
    own = find_file(source, VALUE_HEAD_FILE, hf_kwargs)
    if own is not None:
        return read_prefixed(own, "")
    for single, index in (
        ("model.safetensors", "model.safetensors.index.json"),
        ("pytorch_model.bin", "pytorch_model.bin.index.json"),
    ):
        index_path = find_file(source, index, hf_kwargs)
        if index_path is not None:
            weight_map = json.loads(Path(index_path).read_text())["weight_map"]
            names = sorted({shard for key, shard in weight_map.items() if key.startswith(_PREFIX)})
        else:
            names = [single]
        state: dict[str, Tensor] = {}
        for path in (find_file(source, name, hf_kwargs) for name in names):
            if path is not None:
                state |= read_prefixed(path, _PREFIX)
        if state:
            return state
    return None


def read_prefixed(path: str, prefix: str) -> dict[str, Tensor]:
    """Tensors of one checkpoint file whose keys start with ``prefix``, which is cut off."""
    if path.endswith(".safetensors"):
        with safe_open(path, framework="pt") as file:
            return {k.removeprefix(prefix): file.get_tensor(k) for k in file.keys() if k.startswith(prefix)}  # noqa: SIM118
    weights = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    return {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
