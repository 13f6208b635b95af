"""A PPO run's state on disk, from which it goes on as if it had never stopped; and its model, as others load it.

A state folder has

    policy.safetensors, policy_optimizer.pt            trained weights and the value head; Adam's moments
    value_model.safetensors, value_model_optimizer.pt  of a separate value network
    policy/, value_model/                              under DeepSpeed, instead of these: its engines' own files
    process-I.pt                                       what `snapshot` took in process I, and the run's identity

Weights that are not trained come from where they came from at first; their fingerprint is in the identity, which a run
must have in common with the state that it goes on from. Files are read with ``torch.load(weights_only=True)``: a state
that somebody sends can't run code.

Continued runs are the uninterrupted ones to the bit on the CPU in fp32, with one or two processes (three sum up
gradients in an order that is not ours).
"""

import copy
import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trl.jsonl import DataFileError
from trl.models import AutoModelForCausalLMWithValueHead, RewardModel
from trl.report.model_card import write_model_card
from trl.trainer import zero
from trl.trainer.batches import ShardedBatches
from trl.trainer.checkpoint_folders import (
    make_working_folder,
    move_files_into,
    put_in_place,
    working_path,
    writing,
)
from trl.trainer.scores import RunningMoments
from trl.trainer.world import LaunchError

if TYPE_CHECKING:
    from trl.trainer.ppo import PPOTrainer

_MAY_DIFFER = {
    # trackers, and names that are only recorded; the weights and data themselves are compared
    *("log_with", "tracker_project_name", "tracker_kwargs", "project_kwargs", "exp_name"),
    *("model_name", "query_dataset", "reward_model", "remove_unused_columns"),
    "accelerator_kwargs",  # what they set is compared
}
_SAMPLED = 256
"""Values of a tensor, and rows of the data, that a fingerprint looks at, evenly spaced."""


def check_can_save(trainer: "PPOTrainer") -> None:
    """Raise ``LaunchError`` under FSDP, whose divided moments a state does not hold."""
    if trainer.accelerator.distributed_type == DistributedType.FSDP:
        raise LaunchError(
            "a run under FSDP has no checkpoints to go on from: leave --save_freq and --resume out, or use a "
            "deepspeed_zero file of configs/accelerate"
        )


def save_state(trainer: "PPOTrainer", folder: Path) -> None:
    """Write a state folder; it is whole or not there. Called in every process."""
    check_can_save(trainer)
    working, is_main = working_path(folder), trainer.accelerator.is_main_process
    if is_main:
        make_working_folder(folder)
    trainer.accelerator.wait_for_everyone()
    with writing(working):
        write_state(trainer, working, snapshot(trainer))
    trainer.accelerator.wait_for_everyone()
    if is_main:
        with writing(working):
            put_in_place(working, folder)
    trainer.accelerator.wait_for_everyone()


def write_state(trainer: "PPOTrainer", folder: Path, moment: Mapping[str, Any]) -> None:
    """Write this process's part of a state into an existing folder. ``moment``: a `snapshot` of now."""
    state = {"identity": _identity(trainer), **moment}
    torch.save(state, folder / f"process-{trainer.accelerator.process_index}.pt")
    is_divided = zero.stage_of(trainer.accelerator) > 0
    for network in _networks(trainer) if is_divided else ():
        zero.save_engine(network.prepared, folder, network.name)
    if not trainer.accelerator.is_main_process:
        return
    for network in () if is_divided else _networks(trainer):
        weights = {key: value.detach().cpu().contiguous() for key, value in trained(network.module).items()}
        save_file(weights, folder / f"{network.name}.safetensors", metadata={"format": "pt"})
        torch.save(network.optimizer.state_dict(), folder / f"{network.name}_optimizer.pt")


def load_state(trainer: "PPOTrainer", folder: Path) -> None:
    """Go on from a state. Called in every process, with the trainer made as it was for the run that saved it.

    Raises ``DataFileError`` where the folder holds no state, or one of another run; nothing is changed then.
    """
    check_can_save(trainer)
    own, first = (folder / f"process-{i}.pt" for i in (trainer.accelerator.process_index, 0))
    if not first.exists():
        raise DataFileError(f"{folder} holds no trainer state (there is no {first.name}); give a folder of save_state")
    moment = _load(own if own.exists() else first)  # of fewer processes, which is said next
    check_same(moment["identity"], _identity(trainer), folder)
    networks = _networks(trainer)
    if zero.stage_of(trainer.accelerator):
        for network in networks:
            zero.load_engine(network.prepared, folder, network.name)
    else:
        _load_networks(networks, folder)
    _restore(trainer, moment)


def _load_networks(networks: Sequence["_Network"], folder: Path) -> None:
    weights = {network.name: load_file(folder / f"{network.name}.safetensors") for network in networks}
    for network in networks:
        _check_fits(weights[network.name], trained(network.module), folder / f"{network.name}.safetensors")
    for network in networks:
        with torch.no_grad():
            for key, parameter in trained(network.module).items():
                parameter.copy_(weights[network.name][key])
        network.optimizer.load_state_dict(_load(folder / f"{network.name}_optimizer.pt"))


def check_same(found: Mapping[str, Any], wanted: Mapping[str, Any], folder: Path, prefix: str = "") -> None:
    """Raise ``DataFileError`` that names every setting that was another one when ``folder`` was saved."""
    changed = [f"{prefix}{k}: {found[k]!r} → {v!r}" for k, v in wanted.items() if k in found and found[k] != v]
    if changed:
        raise DataFileError(
            f"{folder} belongs to a run with other settings ({', '.join(changed)}); repeat the old settings, or start "
            "a new run in another output_dir"
        )


def snapshot(trainer: "PPOTrainer") -> dict[str, Any]:
    """What changes from step to step, besides weights and optimizers, of this process: plain values, copied."""
    scheduler, scaler = trainer.lr_scheduler, trainer.accelerator.scaler
    return {
        "step": trainer.current_step,
        "kl_coef": trainer.kl_ctl.value,
        "score_moments": asdict(trainer.score_scaler.moments),
        "lr_scheduler": None if scheduler is None else copy.deepcopy(scheduler.state_dict()),
        "loss_scaler": None if scaler is None else scaler.state_dict(),
        "batches": None if (batches := _batches(trainer)) is None else batches.state_dict(),
        "random": _random_state(trainer.accelerator.device),
    }


def _restore(trainer: "PPOTrainer", moment: Mapping[str, Any]) -> None:
    trainer.current_step = moment["step"]
    trainer.kl_ctl.value = moment["kl_coef"]
    trainer.score_scaler.moments = RunningMoments(**moment["score_moments"])
    if trainer.lr_scheduler is not None:
        trainer.lr_scheduler.load_state_dict(moment["lr_scheduler"])
    if trainer.accelerator.scaler is not None:
        trainer.accelerator.scaler.load_state_dict(moment["loss_scaler"])
    batches = _batches(trainer)
    if batches is not None:
        batches.load_state_dict(moment["batches"])
    _set_random_state(moment["random"], trainer.accelerator.device)


def _random_state(device: torch.device) -> dict[str, Any]:
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": (version, words, gauss),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
    }


def _set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"] is not None:
        torch.cuda.set_rng_state(state["cuda"], device)


# ------------------------------------------------------------------ what belongs together


def _identity(trainer: "PPOTrainer") -> dict[str, Any]:
    config = {name: value for name, value in asdict(trainer.config).items() if name not in _MAY_DIFFER}
    # under ZeRO-3 a process has its own share only, and the first one's has no padding
    sees_weights = zero.stage_of(trainer.accelerator) < 3 or trainer.accelerator.is_main_process
    return {
        "processes": trainer.accelerator.num_processes,
        "zero_stage": zero.stage_of(trainer.accelerator),
        "mixed_precision": trainer.accelerator.mixed_precision,
        **config,
        "optimizers": [type(network.optimizer.optimizer).__name__ for network in _networks(trainer)],
        "lr_scheduler": None if trainer.lr_scheduler is None else type(trainer.lr_scheduler).__name__,
        "weights that are not trained": _fingerprint(_given_tensors(trainer)) if sees_weights else None,
        "data": _data_fingerprint(trainer),
    }


def _given_tensors(trainer: "PPOTrainer") -> Iterable[tuple[str, Tensor]]:
    """What the run depends on and does not change."""
    for network in _networks(trainer):
        own, named = trained(network.module), network.module.named_parameters()
        yield from ((f"{network.name}.{key}", p) for key, p in named if key not in own)
    if trainer.ref_model is not None:
        yield from ((f"reference.{key}", p) for key, p in trainer.ref_model.base_lm.named_parameters())
    if trainer.updater.pretraining is not None:
        yield "pretraining", trainer.updater.pretraining.blocks


def _fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Tells other weights apart: names, shapes, and values of every tensor, of large ones a sample."""
    digest = hashlib.sha256()
    for name, tensor in tensors:
        values = zero.share_of(tensor).detach().reshape(-1)
        sample = values[:: max(1, len(values) // _SAMPLED)][:_SAMPLED].float().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} ".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def _data_fingerprint(trainer: "PPOTrainer") -> str | None:
    """Of the queries' number and their ids, of many a sample; None without a data loader of the trainer's kind."""
    batches = _batches(trainer)
    if batches is None or trainer.dataloader is None:
        return None
    digest = hashlib.sha256(str(batches.size).encode())
    for i in range(0, batches.size, max(1, batches.size // _SAMPLED)):
        row = trainer.dataloader.dataset[i]
        if "input_ids" in row:
            digest.update(str(list(map(int, row["input_ids"]))).encode())
    return digest.hexdigest()[:16]


@dataclass
class _Network:
    """One of the models that are trained: the module itself, as it was prepared, and its optimizer."""

    name: str
    module: AutoModelForCausalLMWithValueHead | RewardModel
    prepared: nn.Module
    optimizer: AcceleratedOptimizer


def _networks(trainer: "PPOTrainer") -> list[_Network]:
    policy, *others = trainer.updater.networks
    found = [_Network("policy", trainer.policy, *policy)]
    if trainer.value_model is not None:
        found.append(_Network("value_model", trainer.value_model, *others[0]))
    return found


def trained(network: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that a state keeps: all that are trained, and a value head in any case."""
    return {k: p for k, p in network.named_parameters() if p.requires_grad or k.startswith("v_head.")}


def _batches(trainer: "PPOTrainer") -> ShardedBatches | None:
    sampler = None if trainer.dataloader is None else trainer.dataloader.batch_sampler
    return sampler if isinstance(sampler, ShardedBatches) else None


def _check_fits(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor], file: Path) -> None:
    shapes, own = ({key: tuple(t.shape) for key, t in tensors.items()} for tensors in (saved, wanted))
    odd = sorted(key for key in shapes.keys() | own.keys() if shapes.get(key) != own.get(key))
    if odd:
        raise DataFileError(
            f"{file} does not fit what is trained here: {len(odd)} parameters differ, such as {odd[0]} "
            f"({shapes.get(odd[0], 'missing')} there, {own.get(odd[0], 'missing')} here); make model and trainer as "
            "for the run that saved it"
        )


def _load(file: Path) -> Any:
    return torch.load(file, map_location="cpu", weights_only=True)


# ------------------------------------------------------------------ the model as others load it


def save_model(trainer: "PPOTrainer", folder: Path) -> None:
    """Write what `write_model` writes into a folder that may hold other files, as the files are whole."""
    working = working_path(folder / "model")
    if trainer.accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        make_working_folder(folder / "model")
    trainer.accelerator.wait_for_everyone()
    with writing(working):
        write_model(trainer, working)
    if trainer.accelerator.is_main_process:
        with writing(working):
            move_files_into(working, folder)
    trainer.accelerator.wait_for_everyone()


def write_model(trainer: "PPOTrainer", folder: Path) -> None:
    """Policy, value head and tokenizer as ordinary `transformers` files, with a model card; a separate value model in
    ``value_model/``."""
    for network in _networks(trainer):
        target = folder if network.name == "policy" else folder / network.name
        weights = zero.whole_state(trainer.accelerator, network.prepared)
        if trainer.accelerator.is_main_process:
            target.mkdir(exist_ok=True)
            network.module.save_pretrained(target, state_dict=weights)
            trainer.tokenizer.save_pretrained(str(target))
    if trainer.accelerator.is_main_process:
        write_model_card(folder, asdict(trainer.config))
