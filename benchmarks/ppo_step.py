"""Our PPOTrainer against the classic one (Hugging Face trl 0.11.4): generation, step, iteration, peak memory.

    python -m venv peer && peer/bin/pip install torch==2.13.0 trl==0.11.4 transformers==5.24.0 rich
    python -m benchmarks.ppo_step --peer peer/bin/python [--shapes smollm2-shared …] [--repeats 3 --rounds 2]

Each side is a process of its own (`benchmarks/peer/ppo_worker.py`, the same file for both), on the same model files
and inputs; the sides take turns. Printed: medians with their spread, ratios peer / ours, and how close our step comes
to the arithmetic alone, that is its model FLOPs per second against one plain matmul of the same rows and width.
Dynamic memory is the peak above weights, reference, gradients and moments. Without ``--peer`` ours runs alone.
Not covered: a GPU, several processes, half precision, remote critics (`benchmarks.critic_overlap`).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config

from trl.builtin import resolve_model
from trl.plan import Workload, find_shape, flops_plan

ROOT = Path(__file__).resolve().parents[1]
WORKER = ROOT / "benchmarks" / "peer" / "ppo_worker.py"


@dataclass(frozen=True)
class Shape:
    """One row of the table. ``targets``: the least ratios peer / ours."""

    batch: int
    query: tuple[int, int]
    response: tuple[int, int]
    epochs: int
    shared: int
    targets: dict[str, float]
    gpt2: tuple[int, int, int] | None = None
    """Blocks, width and vocabulary of a random GPT-2; None: builtin:smollm2."""
    phases: tuple[str, ...] = ("generate", "step")


SHAPES = {
    "smollm2-shared": Shape(16, (8, 8), (18, 18), 4, 20, {"step": 2.0, "dynamic": 1.7}),
    "smollm2": Shape(16, (8, 8), (18, 18), 4, 0, {"step": 1.25, "dynamic": 1.3}),
    "gpt2-medium-shared": Shape(4, (200, 200), (40, 40), 2, 12, {"step": 2.0, "dynamic": 1.7}, gpt2=(24, 1024, 50257)),
    "gpt2-small": Shape(16, (8, 8), (20, 20), 4, 0, {"step": 1.2}, gpt2=(6, 384, 1000)),
    "generate": Shape(
        32, (5, 40), (10, 20), 1, 0, {"generate": 1.0, "one_by_one": 5.0}, phases=("generate", "one_by_one")
    ),
}


def model_folder(shape: Shape, parent: Path) -> str:
    """The folder that both sides load; a random GPT-2 of the shape's size is made there once."""
    source = resolve_model("builtin:smollm2")
    if shape.gpt2 is None:
        return source
    blocks, width, vocabulary = shape.gpt2
    folder = parent / f"gpt2-{blocks}x{width}-{vocabulary}"
    if not folder.exists():
        torch.manual_seed(0)
        config = GPT2Config(n_layer=blocks, n_embd=width, n_head=width // 64, vocab_size=vocabulary, eos_token_id=0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        AutoTokenizer.from_pretrained(source).save_pretrained(folder)  # gives ids of pad and end alone
    return str(folder)


def run_side(python: str, work: dict[str, Any], result: Path) -> dict[str, Any]:
    """One worker's figures. Only ours may find the repository: both packages are called trl."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if python == sys.executable:
        environment["PYTHONPATH"] = str(ROOT)
    command = [python, str(WORKER), json.dumps(work), str(result)]
    done = subprocess.run(command, env=environment, cwd=result.parent, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"error: {python} failed on this shape:\n{done.stderr[-3000:]}")
    figures: dict[str, Any] = json.loads(result.read_text())
    return figures


def phase_flops(shape: Shape, folder: str) -> dict[str, float]:
    """FLOPs of generation, passes and update: see benchmarks/README.md for the model."""
    prompt, response = sum(shape.query) / 2, sum(shape.response) / 2
    work = Workload(shape.batch, prompt, response, shape.epochs, shape.shared, whole_batch=True)
    plan = flops_plan(find_shape(folder), work)
    return {"generate": plan.generate, "passes": plan.passes, "update": plan.update}


def matmul_flops_per_second(shape: Shape, folder: str, threads: int) -> float:
    """What a plain matmul reaches: the batch's rows, and the model's width in and out."""
    torch.set_num_threads(threads)
    width = AutoConfig.from_pretrained(folder).hidden_size
    rows = shape.batch * (shape.query[1] + shape.response[1] - 1)
    left, right = torch.randn(rows, width), torch.randn(width, width)
    repeats = max(1, int(2e10 / (2 * rows * width * width)))
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(repeats):
            torch.mm(left, right)
        best = min(best, (time.perf_counter() - begin) / repeats)
    return 2 * rows * width * width / best


def measure(name: str, shape: Shape, args: argparse.Namespace, parent: Path) -> dict[str, Any]:
    """Figures of both sides on one shape; the sides take turns, ``args.rounds`` times."""
    folder = model_folder(shape, parent)
    vocabulary = AutoConfig.from_pretrained(folder).vocab_size
    work = asdict(shape) | {
        "model": folder,
        "vocabulary": vocabulary,
        "threads": args.threads,
        "repeats": args.repeats,
    }
    sides = {"ours": sys.executable} | ({"peer": args.peer} if args.peer else {})
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    matmul = []
    for _ in range(args.rounds):
        for side, python in sides.items():
            runs[side].append(run_side(python, work | {"side": side}, parent / "result.json"))
        matmul.append(matmul_flops_per_second(shape, folder, args.threads))
    figures: dict[str, Any] = {"shape": name}
    for side, results in runs.items():
        seconds = {phase: [s for r in results for s in r["seconds"][phase]] for phase in results[0]["seconds"]}
        if seconds["generate"] and seconds["step"]:
            seconds["iteration"] = [a + b for a, b in zip(seconds["generate"], seconds["step"], strict=True)]
        figures[side] = {
            "seconds": {phase: _spread(values) for phase, values in seconds.items() if values},
            "total_mb": statistics.median(r["total_mb"] for r in results),
            "dynamic_mb": statistics.median(r["total_mb"] - r["static_mb"] for r in results),
        }
    mine, matmul_rate = figures["ours"]["seconds"], statistics.median(matmul)
    flops = phase_flops(shape, folder)
    flops["step"] = flops["passes"] + flops["update"]
    figures["of_matmul"] = {
        phase: count / mine[phase][1] / matmul_rate for phase, count in flops.items() if phase in mine
    }
    return figures


def _spread(values: list[float]) -> tuple[float, float, float]:
    return min(values), statistics.median(values), max(values)


def ratios(figures: dict[str, Any]) -> dict[str, float]:
    """Peer over ours, of medians; ``one_by_one``: our single queries over our batch."""
    ours, found = figures["ours"], {}
    if "peer" in figures:
        peer = figures["peer"]
        for phase in ("generate", "step", "iteration"):
            if phase in ours["seconds"]:
                found[phase] = peer["seconds"][phase][1] / ours["seconds"][phase][1]
        if "step" in ours["seconds"]:
            found["dynamic"] = peer["dynamic_mb"] / ours["dynamic_mb"]
            found["total"] = peer["total_mb"] / ours["total_mb"]
    if "one_by_one" in ours["seconds"]:
        found["one_by_one"] = ours["seconds"]["one_by_one"][1] / ours["seconds"]["generate"][1]
    return found


def report(figures: dict[str, Any], targets: dict[str, float]) -> list[str]:
    """Lines for people; a target that is missed is said."""
    lines = [f"\n{figures['shape']}"]
    for side in ("ours", "peer"):
        if side in figures:
            times = figures[side]["seconds"].items()
            text = "  ".join(f"{phase} {mid:.3f} s ({low:.3f}–{high:.3f})" for phase, (low, mid, high) in times)
            memory = f"{figures[side]['total_mb']:.0f} MB, {figures[side]['dynamic_mb']:.0f} dynamic"
            lines.append(f"  {side}  {text}  {memory}" if figures[side]["total_mb"] else f"  {side}  {text}")
    for name, ratio in ratios(figures).items():
        target = targets.get(name)
        verdict = "" if target is None else f"  target {target:g}: {'met' if ratio >= target else 'MISSED'}"
        lines.append(f"  {name:<11} {ratio:5.2f}×{verdict}")
    shares = ", ".join(f"{phase} {share:.0%}" for phase, share in figures["of_matmul"].items())
    lines.append(f"  model FLOPs per second, of one matmul's: {shares}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", help="Python of an environment with trl 0.11.4")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=3, help="measured calls per process, after one that is not")
    parser.add_argument("--rounds", type=int, default=2, help="turns that the sides take")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--output_file", type=Path, help="all figures, as JSON lines")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name in args.shapes:
            figures = measure(name, SHAPES[name], args, Path(folder))
            print("\n".join(report(figures, SHAPES[name].targets)), flush=True)
            if args.output_file:
                with args.output_file.open("a") as file:
                    file.write(json.dumps(figures | {"ratios": ratios(figures)}) + "\n")


if __name__ == "__main__":
    main()
