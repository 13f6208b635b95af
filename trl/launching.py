"""How demos and studies run the repository's scripts: as a user would, in processes of their own."""

import io
import os
import runpy
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from trl.jsonl import read_jsonl

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str | Path) -> str:
    """Run one of the repository's scripts; its progress goes to the terminal, its result is returned."""
    environment = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=os.environ | environment, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    if done.returncode:
        raise SystemExit(f"error: {command[0]} failed (exit {done.returncode}); its messages are above")
    return done.stdout


def run_here(*command: str | Path) -> str:
    """`run` inside this process, which has loaded the libraries already: half of a short evaluation's time is that."""
    before, printed = sys.argv, io.StringIO()
    sys.argv = [str(ROOT / command[0]), *map(str, command[1:])]
    try:
        with redirect_stdout(printed):
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as stopped:
        if stopped.code:
            raise SystemExit(f"error: {command[0]} failed: {stopped.code}") from stopped
    finally:
        sys.argv = before
    return printed.getvalue()


def launch(bf16: bool, folder: Path, *command: str | Path) -> dict[str, Any]:
    """Train anew with one of the scripts as a user would; what it took: KL at the end, the critic's calls, minutes."""
    started = time.perf_counter()
    train(bf16, folder, *command, "--overwrite")
    minutes = round((time.perf_counter() - started) / 60, 1)
    steps = [row for row in read_jsonl(folder / "metrics.jsonl") if "objective/kl" in row]
    if not steps:  # supervised
        return {"minutes": minutes}
    return {
        "KL (last 5 steps)": sum(row["objective/kl"] for row in steps[-5:]) / len(steps[-5:]),
        "critic calls": int(sum(row.get("critic/requests", 0) for row in steps)),
        "critic cost": "$0 (local)",
        "minutes": minutes,
    }


def train(bf16: bool, folder: Path, *command: str | Path, threads: int | None = None) -> None:
    """One of the training scripts on its built-in preset, in one process of so many threads (default: all cores)."""
    launcher = ["-m", "accelerate.commands.launch", "--num_processes=1", "--num_machines=1", "--dynamo_backend=no"]
    launcher += [f"--num_cpu_threads_per_process={threads or os.cpu_count()}"]  # accelerate's default is 1
    launcher += ["--mixed_precision=bf16" if bf16 else "--mixed_precision=no"]
    run(*launcher, *command, "--preset=builtin", f"--output_dir={folder}")
