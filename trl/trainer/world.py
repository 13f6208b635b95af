"""How many processes a run has, against how many its launcher was asked for.

`accelerate launch` starts one process where it was asked for several on CPUs, and a run can be several processes that
know nothing of each other; both look like a run that works. See `configs/accelerate` for files that do what they say.
"""

import os
from collections.abc import Mapping

_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Where launchers (torchrun, DeepSpeed's, accelerate's; MPI) tell a process how many of them they started."""


class LaunchError(RuntimeError):
    """The run is not the one that its launcher was asked for."""


def check_processes(found: int, kind: str, environment: Mapping[str, str] = os.environ) -> None:
    """Compare the ``found`` number of processes, of this ``kind`` (accelerate's), with what the launcher was asked for.

    Raises LaunchError, with what to do, where it is another one; the right one is logged.
    """
    launched = next((int(environment[name]) for name in _SIZES if environment.get(name)), None)
    if launched is None and "ACCELERATE_MIXED_PRECISION" in environment and "MASTER_PORT" in environment:
        # set by accelerate's launcher of a single process, if it was asked for more
        raise LaunchError(
            "accelerate launch was asked for several processes but started one, as it does with --cpu, with a "
            "MULTI_CPU file and on machines without GPUs. For several on CPUs: accelerate launch --config_file "
            "configs/accelerate/multi_cpu.yaml --num_processes N. (If one process is what you want: the environment "
            "variable MASTER_PORT says otherwise; unset it.)"
        )
    if found != (launched or 1):
        raise LaunchError(
            f"{launched or 1} processes were started, but this one is in a group of {found} ({kind}): each would train "
            "a model of its own. Start them with a file of configs/accelerate and without accelerator_kwargs for the "
            "device"
        )
    for name, wanted in (("ACCELERATE_USE_FSDP", "FSDP"), ("ACCELERATE_USE_DEEPSPEED", "DEEPSPEED")):
        if environment.get(name) == "true" and kind != wanted:
            raise LaunchError(
                f"{wanted} was asked for, but accelerate runs {kind} here: FSDP needs GPUs. On CPUs use "
                "configs/accelerate/multi_cpu.yaml or a deepspeed_zero file"
            )
