"""Experiment trackers (wandb, tensorboard, trackio) through accelerate."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from trl.trainer.statistics import flat

if TYPE_CHECKING:
    from accelerate import Accelerator

    from trl.trainer.config import PPOConfig

_NOT_SENT = ("tracker_kwargs", "accelerator_kwargs", "project_kwargs")
"""What a caller passes on to libraries, keys among it perhaps."""


def start_tracker(accelerator: "Accelerator", config: "PPOConfig") -> None:
    """Start the tracker of ``config.log_with``, if any, with the settings as its hyperparameters.

    The run is called ``exp_name`` where the tracker has names for runs.
    """
    if config.log_with is None:
        return
    settings = {name: value for name, value in asdict(config).items() if name not in _NOT_SENT}
    named = {} if config.log_with == "tensorboard" else {"name": config.exp_name}
    kwargs = {config.log_with: {**named, **config.tracker_kwargs.get(config.log_with, {})}}
    accelerator.init_trackers(config.tracker_project_name, config=flat(settings), init_kwargs=kwargs)
