"""Numbers of all processes put together; every process must call these."""

import math
from collections.abc import Sequence

import torch
from accelerate import Accelerator


def sums_of_all(accelerator: Accelerator, values: Sequence[float]) -> list[float]:
    """Each value's sum over the processes, in float64."""
    own = torch.tensor(values, dtype=torch.float64, device=accelerator.device)
    return [float(total) for total in accelerator.reduce(own, reduction="sum")]


def values_of_all(accelerator: Accelerator, values: Sequence[float], most: int) -> list[float]:
    """The values of every process, of which none has more than ``most``; NaN is left out."""
    padded = torch.full((most,), torch.nan, dtype=torch.float64)
    padded[: len(values)] = torch.tensor(values, dtype=torch.float64)
    gathered = accelerator.gather(padded.to(accelerator.device)).tolist()
    return [value for value in gathered if not math.isnan(value)]


def most_of_all(accelerator: Accelerator, count: int) -> int:
    """The largest of the processes' numbers."""
    return int(accelerator.gather(torch.tensor([count], device=accelerator.device)).max())
