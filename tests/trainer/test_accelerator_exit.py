"""Processes of a gloo group leave without falling: on a busy machine their threads still held tensors at exit."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_processes_that_leave_right_after_a_collective_end_well():
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    worker = str(Path(__file__).with_name("gloo_exit_worker.py"))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=4", "--standalone", worker]
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=300)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert done.returncode == 0, done.stderr[-3000:]
