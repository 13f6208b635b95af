"""The number of processes against the one asked for; the shipped launch files, as accelerate reads them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser

from trl.trainer.world import LaunchError, check_processes

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "configs" / "accelerate").glob("*.yaml"))
LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no"}


@pytest.mark.parametrize(
    ("found", "kind", "environment"),
    [
        (1, "NO", {}),
        (1, "NO", LAUNCHED),
        (1, "NO", {"MASTER_PORT": "29500"}),  # a cluster's own, not accelerate's
        (1, "NO", {**LAUNCHED, "WORLD_SIZE": "1", "MASTER_PORT": "29500"}),
        (2, "MULTI_CPU", {**LAUNCHED, "WORLD_SIZE": "2", "MASTER_PORT": "29500"}),
        (4, "MULTI_GPU", {"WORLD_SIZE": "4"}),
        (3, "MULTI_CPU", {"OMPI_COMM_WORLD_SIZE": "3"}),
        (2, "DEEPSPEED", {"WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"}),
        (2, "FSDP", {"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}),
    ],
)
def test_a_run_as_it_was_asked_for(found, kind, environment):
    check_processes(found, kind, environment)


@pytest.mark.parametrize(
    ("found", "kind", "environment", "message"),
    [
        (1, "NO", {**LAUNCHED, "MASTER_PORT": "29500"}, "asked for several processes but started one"),
        (1, "NO", {"WORLD_SIZE": "2"}, "2 processes were started, but this one is in a group of 1"),
        (2, "MULTI_CPU", {"WORLD_SIZE": "3"}, "3 processes were started, but this one is in a group of 2"),
        (2, "MULTI_CPU", {"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true"}, "FSDP was asked for"),
        (2, "MULTI_CPU", {"WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"}, "DEEPSPEED was asked for"),
    ],
)
def test_another_number_or_kind_of_processes_is_an_error(found, kind, environment, message):
    with pytest.raises(LaunchError, match=message):
        check_processes(found, kind, environment)


@pytest.mark.parametrize("asked", [["--cpu", "--num_processes", "2"], ["--config_file", "obvious.yaml"]])
def test_a_launch_that_would_quietly_run_one_process_ends_in_one_line(tmp_path, asked):
    """What accelerate's own documentation offers for CPUs; both really start one process."""
    (tmp_path / "obvious.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 2\n"
    )
    (tmp_path / "script.py").write_text(
        "from trl.run import run_script\n"
        "from trl.trainer.accelerator import make_accelerator\n"
        "run_script(lambda: make_accelerator() and open('reached', 'w'))\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", *asked, "script.py"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert "error: accelerate launch was asked for several processes but started one" in done.stderr
    assert not (tmp_path / "reached").exists()


# --- the files ---------------------------------------------------------------------------------------------


def test_every_file_of_the_list_is_there():
    kinds = {"cpu", "multi_cpu", "single_gpu", "multi_gpu", "fsdp2"} | {f"deepspeed_zero{n}" for n in (1, 2, 3)}
    assert {file.stem for file in FILES} == kinds


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_accelerate_reads_the_file(file):
    """Its own reader, which refuses unknown keys; the nested ones must be options of its launcher."""
    config = load_config_from_file(str(file))
    options = {action.dest for action in launch_command_parser()._actions}
    assert set(config.deepspeed_config) | set(config.fsdp_config) <= options
    assert config.num_processes == (1 if file.stem in ("cpu", "single_gpu") else 2)
    assert config.num_machines == 1
    is_cpu = file.stem.endswith("cpu")
    assert config.mixed_precision == ("no" if is_cpu else "bf16")
    if file.stem.startswith("deepspeed"):
        assert config.distributed_type.value == "DEEPSPEED"
        assert config.deepspeed_config["zero_stage"] == int(file.stem[-1])
    # the commented options too, once the comment signs are taken away
    text = file.read_text()
    lines = [line.split("# ")[-1] for line in text.splitlines() if line.strip().startswith("# ") and "offload_" in line]
    assert all(line.partition(":")[0].strip() in options for line in lines)
    assert len(lines) == {"deepspeed_zero1": 1, "deepspeed_zero2": 1, "deepspeed_zero3": 2, "fsdp2": 1}.get(
        file.stem, 0
    )
