"""Runs that are killed within a step, and runs that go on from what those saved: kill_worker.py FOLDER KIND/N ...

Of each kind, in N processes, three runs of four steps, forked from this process to save the time of imports: untouched;
killed (SIGKILL) in the update of the third step, with a state of the second; resumed from that state. Weights and
statistics of the first and the last go to FOLDER/KIND/N.
"""

import json
import os
import signal
import socket
import sys
from pathlib import Path

import torch

from tests.trainer.state_runs import advance, make, weights
from trl.core import set_seed
from trl.trainer import PPOTrainer


def run(kind: str, part: str, rank: int, folder: Path) -> None:
    set_seed(len(part))  # what a process starts with does not matter
    trainer = make(kind)
    if part == "killed":
        advance(trainer, 2, kind)
        trainer.save_state(folder / "state")
        die_in_update(trainer)
    elif part == "resumed":
        trainer.load_state(folder / "state")
    rows = advance(trainer, 4 - trainer.current_step, kind)
    torch.save(weights(trainer), folder / f"{part}-{rank}.pt")
    (folder / f"{part}-{rank}.json").write_text(json.dumps(rows))
    trainer.accelerator.wait_for_everyone()  # who leaves early closes connections that the other still reads
    trainer.accelerator.end_training()


def die_in_update(trainer: PPOTrainer) -> None:
    """Once one optimizer step of two or more is done."""
    apply = trainer.updater.gradients.apply

    def last_deed() -> list[float]:
        apply()
        trainer.accelerator.wait_for_everyone()
        os.kill(os.getpid(), signal.SIGKILL)
        return []

    trainer.updater.gradients.apply = last_deed  # type: ignore[method-assign]


def fork(kind: str, part: str, rank: int, folder: Path, variables: dict[str, str]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.environ |= variables
        run(kind, part, rank, folder)
        status = 0
    finally:
        sys.stderr.flush()
        os._exit(status)


def group_variables(processes: int) -> list[dict[str, str]]:
    """What a launcher tells each process."""
    if processes == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        common = {"WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    return [{"RANK": str(rank), "LOCAL_RANK": str(rank), **common} for rank in range(processes)]


for name in sys.argv[2:]:
    kind, processes = name.split("/")
    folder = Path(sys.argv[1], name)
    folder.mkdir(parents=True)
    for part in ("whole", "killed", "resumed"):
        given = enumerate(group_variables(int(processes)))
        children = [fork(kind, part, rank, folder, variables) for rank, variables in given]
        ends = {os.waitpid(child, 0)[1] for child in children}
        expected = signal.SIGKILL if part == "killed" else 0
        if ends != {expected}:
            sys.exit(f"{name}: the {part} run ended with {ends}, expected {expected}")
