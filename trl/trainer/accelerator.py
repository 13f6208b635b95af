"""The one place where an `accelerate.Accelerator` is made, with the choices that CPU runs need."""

import atexit
import importlib.util
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs, ProjectConfiguration

from trl.cpu_matmul import use_fast_matmul
from trl.trainer.world import check_processes

logger = logging.getLogger(__name__)


def make_accelerator(
    log_with: str | None = None,
    accelerator_kwargs: dict[str, Any] | None = None,
    project_kwargs: dict[str, Any] | None = None,
) -> Accelerator:
    """An accelerator for whatever `accelerate launch` set up.

    Without CUDA, plain `Accelerator()` under a multi-process launch gives unsynchronised copies: ``cpu=True``
    selects gloo and real gradient synchronisation. Under DeepSpeed the backend is asked for by a handler,
    which elsewhere would switch the synchronisation off. Raises ``LaunchError`` where the run is not the one that
    the launcher was asked for.
    """
    if log_with is not None and importlib.util.find_spec(log_with) is None:
        raise ValueError(f"log_with={log_with!r}, but {log_with} is not installed: pip install {log_with}")
    folders = {"logging_dir": "runs"} if log_with == "tensorboard" else {}  # TensorBoard's own default
    kwargs: dict[str, Any] = {
        "log_with": log_with,
        "project_config": ProjectConfiguration(**{**folders, **(project_kwargs or {})}),
        # no buffer of these models ever changes; sending them would make every pass a collective
        "kwargs_handlers": [DistributedDataParallelKwargs(broadcast_buffers=False)],
    }
    if not torch.cuda.is_available():
        if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
            kwargs["kwargs_handlers"] = [InitProcessGroupKwargs(backend="gloo")]
            _warn_of_build_locks()
        else:
            kwargs["cpu"] = True
        _warn_of_idle_cores()
        use_fast_matmul()
    accelerator = Accelerator(**{**kwargs, **(accelerator_kwargs or {})})
    if accelerator.deepspeed_plugin is not None:
        # by this object transformers knows of ZeRO-3: it would divide every model that is loaded from here on, reward
        # models and classifiers too, and let `generate` wait for other processes at each token
        accelerator.deepspeed_plugin.dschf = None
    check_processes(accelerator.num_processes, accelerator.distributed_type.value)
    if accelerator.is_main_process:
        logger.info(
            "%d process(es), %s, on %s, mixed precision: %s",
            accelerator.num_processes,
            accelerator.distributed_type.value,
            accelerator.device.type,
            accelerator.mixed_precision,
        )
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
        atexit.register(_let_gloo_come_to_rest)
    return accelerator


def _warn_of_build_locks() -> None:
    """DeepSpeed builds its CPU part at first; a process killed meanwhile leaves a lock that all others heed."""
    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    for lock in root.rglob("lock"):
        logger.warning("DeepSpeed waits for %s: another process is building, or was killed: then remove the file", lock)


def _let_gloo_come_to_rest(longest: float = 5.0) -> None:
    """Wait until gloo's threads are idle, so that none is caught by the end of the interpreter.

    A thread lets go of a collective's tensors a moment after the collective was waited for. If it is the last to hold
    one it needs the interpreter, and where that is already shutting down the thread is ended inside C++ code, which
    aborts the process: "terminate called without an active exception". DDP keeps the group and its threads alive
    whatever is destroyed before.
    """
    quiet, end = 0, time.monotonic() + longest
    while quiet < 2 and time.monotonic() < end:  # twice: a thread that waits for the interpreter looks idle once
        time.sleep(0.02)  # gives the interpreter away
        quiet = quiet + 1 if _gloo_is_idle() else 0


def _gloo_is_idle() -> bool:
    if not sys.platform.startswith("linux"):
        return True
    states = [task.read_text().rsplit(")", 1) for task in Path("/proc/self/task").glob("*/stat")]
    return all(rest.split()[0] == "S" for name, rest in states if "gloo" in name)


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
