"""How these tests start runs of several processes: as the manual says, with the shipped files."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT),
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


def accelerate(config: str | Path, *more: str) -> list[str]:
    """The command that starts a script with a file of configs/accelerate (its stem), or another file (its path)."""
    file = config if isinstance(config, Path) else ROOT / "configs" / "accelerate" / f"{config}.yaml"
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(file)]
    # a free port each, so that runs side by side don't meet
    return [*launcher, *(("--main_process_port", "0") if config != "cpu" else ()), *more]


def torchrun(processes: int = 2) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def run(*command: str, check: bool = True, cwd: Path = ROOT, timeout: float = 500) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=timeout)
    if check:
        assert done.returncode == 0, done.stderr[:6000]  # the launcher's own words are at the end
    return done
