"""The one place where an `accelerate.Accelerator` is made, with the choices that CPU runs need."""

import importlib.util
import logging
import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration

logger = logging.getLogger(__name__)


def make_accelerator(
    log_with: str | None = None,
    accelerator_kwargs: dict[str, Any] | None = None,
    project_kwargs: dict[str, Any] | None = None,
) -> Accelerator:
    """An accelerator for whatever `accelerate launch` set up.

    Without CUDA, plain `Accelerator()` under a multi-process launch gives unsynchronised copies: ``cpu=True``
    selects gloo and real gradient synchronisation. Under DeepSpeed the backend is asked for by a handler,
    which elsewhere would switch the synchronisation off.
    """
    if log_with is not None and importlib.util.find_spec(log_with) is None:
        raise ValueError(f"log_with={log_with!r}, but {log_with} is not installed: pip install {log_with}")
    folders = {"logging_dir": "runs"} if log_with == "tensorboard" else {}  # TensorBoard's own default
    kwargs: dict[str, Any] = {
        "log_with": log_with,
        "project_config": ProjectConfiguration(**{**folders, **(project_kwargs or {})}),
    }
    if not torch.cuda.is_available():
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            kwargs["kwargs_handlers"] = [InitProcessGroupKwargs(backend="gloo")]
        else:
            kwargs["cpu"] = True
        _warn_of_idle_cores()
    return Accelerator(**{**kwargs, **(accelerator_kwargs or {})})


def _warn_of_idle_cores() -> None:
    """`accelerate launch` quietly gives each process one thread unless it is told otherwise."""
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and os.environ.get("LOCAL_RANK", "0") == "0"
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if launched and os.environ.get("OMP_NUM_THREADS") == "1" and cores > 1:
        logger.warning(
            "torch uses 1 of %d cores here, accelerate's default; `accelerate launch --num_cpu_threads_per_process %d` "
            "uses them all",
            cores,
            cores,
        )
