"""One of several processes that leave right after a collective whose threads are slow to let go of it."""

import os
from pathlib import Path

import torch

from trl.trainer.accelerator import make_accelerator

accelerator = make_accelerator()
for _ in range(20):
    accelerator.reduce(torch.ones(1000))
    for task in Path("/proc/self/task").iterdir():  # behind the busy processes that the test has started
        if "gloo" in (task / "comm").read_text():
            os.setpriority(os.PRIO_PROCESS, int(task.name), 19)
accelerator.wait_for_everyone()
