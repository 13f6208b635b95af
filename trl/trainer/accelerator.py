"""The one place where an `accelerate.Accelerator` is made, with the choices that CPU runs need."""

import importlib.util
import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs, ProjectConfiguration


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
    return Accelerator(**{**kwargs, **(accelerator_kwargs or {})})
