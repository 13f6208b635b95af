"""``python -m trl.plan`` as it is used, and the cost table of configs/."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cost_table import BEGIN, END, table
from trl.plan.__main__ import main

ROOT = Path(__file__).resolve().parents[2]


def plan(capsys, *flags):
    main(list(map(str, flags)))
    return capsys.readouterr().out


def test_the_command_of_the_documentation():
    command = [sys.executable, "-m", "trl.plan", "--model", "gpt2-large", "--batch", "16"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True, timeout=300)
    for said in ("774,030,080 parameters", "generate", "log-prob passes", "update", "memory of a process", "optimizer"):
        assert said in done.stdout


def test_critic_calls_tokens_dollars_and_time(capsys, tmp_path):
    (tmp_path / "prompt.txt").write_text("x" * 400)  # 100 tokens
    flags = ["--use_intrinsic_reward", "--prompt_file", tmp_path / "prompt.txt", "--critic_prices", 1, 2]
    flags += ["--prompt_tokens", 30, "--response_tokens", 20, "--samples", 1000, "--critic_share", 0.5]
    said = plan(capsys, "--model", "gpt2", *flags, "--flops", "1e12", "--device_price", 2)
    assert "at most 8 calls a step, 500 an epoch" in said
    assert "75,000 tokens in and 20,000 out an epoch: $0.12" in said
    assert "20,000 sampled an epoch, each trained 4 times" in said
    assert "waiting for critic" in said
    assert "devices: $" in said


def test_sizes_by_flags_are_the_same_as_by_name(capsys):
    by_name = plan(capsys, "--model", "gpt2-large")
    sizes = ["--layers", 36, "--width", 1280, "--heads", 20, "--vocab", 50257]
    by_flags = plan(capsys, *sizes)
    assert by_flags.partition("\n")[2] == by_name.partition("\n")[2]
    llama = ["--family", "llama", "--mlp_width", 11008]
    seven = plan(capsys, "--layers", 32, "--width", 4096, "--heads", 32, "--vocab", 32000, *llama)
    assert "6,738,415,616 parameters" in seven


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "give --model, or its sizes"),
        (["--layers", "3"], "either --model or all of the sizes: --width, --heads, --vocab"),
        (["--model", "gpt2", "--layers", "3"], "give either --model or"),
        (["--model", "nobody/nothing"], "no sizes of nobody/nothing"),
        (["--model", "gpt2", "--num_shared_layers", "12"], "12 shared layers of gpt2: expected 0 to 11"),
        (["--model", "gpt2", "--mini_batch", "32"], "mini-batch within the batch"),
        (["--model", "gpt2", "--use_intrinsic_reward", "--prompt_file", "none.txt"], "none.txt"),
    ],
)
def test_what_cannot_be_planned_is_one_line(flags, said):
    with pytest.raises(SystemExit) as stopped:
        main(flags)
    assert str(stopped.value).startswith("error: ")
    assert said in str(stopped.value)


def test_the_documented_cost_table_is_what_the_plan_says():
    files = [path for path in (ROOT / "configs").glob("*.md") if BEGIN in path.read_text(encoding="utf-8")]
    assert files
    for path in files:
        written = path.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
        assert written.strip() == table(), f"python -m benchmarks.cost_table {path.relative_to(ROOT)}"
