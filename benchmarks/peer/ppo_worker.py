"""One side of `benchmarks.ppo_step`: the PPOTrainer of whichever ``trl`` this Python has, on one shape.

    PYTHON benchmarks/peer/ppo_worker.py '{"model": FOLDER, "batch": 16, ...}' RESULT.json

Both sides run this file, so that they differ in the trainer alone: same weights, inputs, settings and threads, Adam
over the trainable parameters. Only calls that both trainers answer are made. Writes seconds per call, and the peak of
the resident memory during steps beside what weights, reference, gradients and optimizer moments take by count.
"""

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import AutoTokenizer

from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model

PHASES = ("passes", "update")


def resident_megabytes(field: str) -> float:
    """VmRSS, now, or VmHWM, the highest since `forget_peak`."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field)]
    return int(line.split()[1]) / 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def inputs(shape: dict[str, Any]) -> dict[str, Any]:
    """Queries, responses, scores and generation lengths: the same on both sides."""
    draw = random.Random(0)

    def ids(low: int, high: int) -> torch.Tensor:
        return torch.tensor([draw.randrange(10, shape["vocabulary"]) for _ in range(draw.randint(low, high))])

    batch = range(shape["batch"])
    return {
        "queries": [ids(*shape["query"]) for _ in batch],
        "responses": [ids(*shape["response"]) for _ in batch],
        "scores": [torch.tensor(draw.uniform(-1, 1)) for _ in batch],
        "lengths": [draw.randint(*shape["response"]) for _ in batch],
    }


def make_trainer(shape: dict[str, Any]) -> tuple[Any, int]:
    """The trainer, and the bytes of weights, reference, gradients and Adam's moments."""
    model = AutoModelForCausalLMWithValueHead.from_pretrained(shape["model"])
    reference = create_reference_model(model, num_shared_layers=shape["shared"] or None)
    trained = [p for p in model.parameters() if p.requires_grad]
    storage = {p.data_ptr(): p.numel() * p.element_size() for m in (model, reference) for p in m.parameters()}
    static = sum(storage.values()) + sum(3 * p.numel() * p.element_size() for p in trained)
    # ours makes its own: Adam over the trainable parameters, too
    optimizer = torch.optim.Adam(trained, lr=1e-6) if shape["side"] == "peer" else None
    config = PPOConfig(
        batch_size=shape["batch"],
        mini_batch_size=shape["batch"],
        gradient_accumulation_steps=1,
        ppo_epochs=shape["epochs"],
        learning_rate=1e-6,
    )
    tokenizer = AutoTokenizer.from_pretrained(shape["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return PPOTrainer(config, model, reference, tokenizer, optimizer=optimizer), static


def main() -> None:
    shape = json.loads(sys.argv[1])
    torch.set_num_threads(shape["threads"])
    torch.manual_seed(0)
    imported = resident_megabytes("VmRSS")
    trainer, static = make_trainer(shape)
    data = inputs(shape)
    sampling = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": shape["response"][1]}
    seconds: dict[str, list[float]] = {name: [] for name in ("generate", "step", "one_by_one", *PHASES)}

    def generate(queries: list[torch.Tensor], size: int) -> int:
        sampled = trainer.generate(queries, batch_size=size, return_prompt=False, **sampling)
        return sum(min(len(ids), n) for ids, n in zip(sampled, data["lengths"], strict=False))

    def timed(name: str, work: Any) -> Any:
        begin = time.perf_counter()
        result = work()
        seconds[name].append(time.perf_counter() - begin)
        return result

    useful, peaks = [], []
    for repeat in range(shape["repeats"] + 1):
        if "generate" in shape["phases"]:
            useful.append(timed("generate", lambda: generate(data["queries"], shape["batch"])))
        if "one_by_one" in shape["phases"]:
            timed("one_by_one", lambda: [generate([query], 1) for query in data["queries"]])
        if "step" in shape["phases"]:
            forget_peak()
            stats = timed("step", lambda: trainer.step(data["queries"], data["responses"], data["scores"]))
            for phase in PHASES:
                if f"time/{phase}" in stats:  # ours alone tells them apart
                    seconds[phase].append(stats[f"time/{phase}"])
            peaks.append(resident_megabytes("VmHWM") - imported)
        if repeat == 0:  # first allocations, and kernels chosen
            seconds, useful = {name: [] for name in seconds}, []
    result = {"seconds": seconds, "tokens": useful, "total_mb": max(peaks, default=0.0), "static_mb": static / 2**20}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
