"""DeepSpeed's ZeRO under the trainers: settings, frozen models, and divided weights put together for sampling.

Stage 1 divides the optimizer's moments over the processes, stage 2 gradients too, stage 3 the weights themselves
(Rajbhandari et al. 2020). Under stage 3 every pass through a model is a collective: all processes must make equally
many.
"""

import copy
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator
from torch import nn

from trl.jsonl import DataFileError
from trl.trainer.world import LaunchError

M = TypeVar("M", bound=nn.Module)


def stage_of(accelerator: Accelerator) -> int:
    """ZeRO's stage, 0 without DeepSpeed."""
    plugin = accelerator.deepspeed_plugin
    return 0 if plugin is None else int(plugin.zero_stage)


def num_weights(parameters: Iterable[nn.Parameter]) -> int:
    """How many weights parameters have, all processes together, also where stage 3 left none of them here."""
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in parameters)


def share_of(parameter: torch.Tensor) -> torch.Tensor:
    """The values of a parameter that are here: all, or under stage 3 this process's, at the last one with padding."""
    own: torch.Tensor = getattr(parameter, "ds_tensor", parameter)
    return own


def configure(accelerator: Accelerator, mini_batch_size: int, max_grad_norm: float | None) -> None:
    """Fill in what DeepSpeed must know before a model is prepared; without DeepSpeed nothing.

    Accumulation is the trainer's own work. The sizes are for DeepSpeed's reports alone.
    """
    plugin = accelerator.deepspeed_plugin
    if plugin is None:
        return
    settings: dict[str, Any] = plugin.deepspeed_config
    settings["train_micro_batch_size_per_gpu"] = mini_batch_size
    settings["train_batch_size"] = mini_batch_size * accelerator.num_processes
    settings["gradient_accumulation_steps"] = 1
    settings["gradient_clipping"] = max_grad_norm or 0.0
    if plugin.zero_stage == 3:
        settings["zero_optimization"]["stage3_gather_16bit_weights_on_model_save"] = True


def prepare_frozen(model: nn.Module, accelerator: Accelerator) -> Any:
    """Give a frozen model the dtype that DeepSpeed trains in, and divide it where stage 3 divides; else do nothing.

    The model itself is called as before. Returns the engine that must be kept, if there is one.
    """
    plugin: Any = accelerator.deepspeed_plugin
    if plugin is None:
        return None
    if plugin.zero_stage < 3:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(accelerator.mixed_precision)
        for parameter in model.parameters() if dtype else ():  # buffers, such as rotary frequencies, stay in fp32
            parameter.data = parameter.data.to(dtype)
        return None
    import deepspeed

    settings = copy.deepcopy(plugin.deepspeed_config)
    settings["zero_optimization"].pop("offload_optimizer", None)
    engine, *_ = deepspeed.initialize(model=model, config=settings)
    return engine


def whole_state(accelerator: Accelerator, model: nn.Module) -> dict[str, Any]:
    """All weights of a prepared model by their names in the model itself, in the main process at least.

    All processes take part. Tied weights stay tied, which accelerate's own function unties under stages 1 and 2.
    """
    if stage_of(accelerator) in (1, 2):
        return dict(accelerator.unwrap_model(model).state_dict())
    return dict(accelerator.get_state_dict(model) or {})  # None in the others under stage 3


def save_engine(engine: Any, folder: Path, name: str) -> None:
    """Write what an engine trains, weights and moments of every process's share, to ``folder/name``. All take part."""
    engine.save_checkpoint(str(folder), tag=name, save_latest=False, exclude_frozen_parameters=True)


def load_engine(engine: Any, folder: Path, name: str) -> None:
    """Take up what `save_engine` wrote, in as many processes. Raises DataFileError where it isn't there."""
    with tensors_only():
        path, _ = engine.load_checkpoint(
            str(folder), tag=name, load_module_strict=False, load_lr_scheduler_states=False
        )
    if path is None:
        raise DataFileError(f"{folder / name} holds no state of a DeepSpeed run of as many processes")


@contextmanager
def tensors_only() -> Iterator[None]:
    """Within, DeepSpeed reads its files, which may be anybody's, without running code that is in them."""
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    variable = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
    before = os.environ.get(variable)
    os.environ[variable] = "1"
    try:
        with torch.serialization.safe_globals([LossScaler, ZeroStageEnum, fragment_address]):
            yield
    finally:
        if before is None:
            del os.environ[variable]
        else:
            os.environ[variable] = before


class WholeModels:
    """Models with all their weights in every process, for as long as they are used: where stage 3 divides them, copies.

    Sampling needs the weights at every token, and processes end at different tokens.

    Args:
        models: before they are divided.
    """

    def __init__(self, accelerator: Accelerator, models: Sequence[nn.Module]):
        self._device = accelerator.device
        self._copies: dict[nn.Module, nn.Module] = {}
        for model in models if stage_of(accelerator) == 3 else ():
            # one placeholder per parameter, so that tied weights stay tied
            empty: dict[int, Any] = {
                id(p): nn.Parameter(torch.empty(0), requires_grad=False) for p in model.parameters()
            }
            self._copies[model] = copy.deepcopy(model, empty).eval()

    @contextmanager
    def of(self, model: M) -> Iterator[M]:
        """Within, ``model`` or a copy with the weights that it has now. All processes take part."""
        if model not in self._copies:
            yield model
            return
        import deepspeed

        whole = self._copies[model].to(self._device)  # what is no parameter
        pairs = list(zip(whole.parameters(), model.parameters(), strict=True))
        for own, original in pairs:
            with deepspeed.zero.GatheredParameters([original]):
                own.data = original.detach().clone()
        try:
            yield cast(M, whole)
        finally:
            for own, _ in pairs:
                own.data = torch.empty(0)


def check_can_share(num_shared_layers: int, accelerator: Accelerator) -> None:
    """Raise LaunchError where policy and reference share blocks, which stage 3 would divide."""
    if num_shared_layers and stage_of(accelerator) == 3:
        raise LaunchError(
            f"policy and reference share {num_shared_layers} blocks, but ZeRO-3 divides each model's weights: "
            "leave num_shared_layers unset (--num_shared_layers None), or use ZeRO-1 or 2 "
            "(configs/accelerate/deepspeed_zero2.yaml), which keep the frozen blocks shared"
        )


def check_can_ask_own_weights(accelerator: Accelerator) -> None:
    """Raise LaunchError where a critic would call the reference by itself, which stage 3 divides."""
    if stage_of(accelerator) == 3:
        raise LaunchError(
            "this critic asks the policy's initial weights, which ZeRO-3 divides over processes: name another model "
            "(--critic_model) or another --critic, or use ZeRO-1 or 2"
        )
