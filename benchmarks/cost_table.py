"""What runs would cost on one GPU, one machine of eight, and two of them: the table of configs/, from `trl.plan` alone.

    python -m benchmarks.cost_table                      prints it
    python -m benchmarks.cost_table configs/README.md    writes it between that file's two marks

Nothing here was run: the rates and prices are assumptions, said above the table; `tests/plan` checks that the files
hold what this prints.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from trl.plan import (
    Machine,
    ModelShape,
    Setting,
    Workload,
    critic_costs,
    find_shape,
    flops_plan,
    process_memory,
    step_seconds,
)

BEGIN, END = "<!-- cost table: python -m benchmarks.cost_table FILE -->", "<!-- end of the cost table -->"
GPU = Machine(flops=1e14, memory_bandwidth=1.5e12, link_bandwidth=2e11, dollars_per_hour=2.0)
NETWORK = 2.5e10
MACHINES = {"1 GPU": (1, GPU), "8 GPUs": (8, GPU), "2 x 8 GPUs": (16, replace(GPU, link_bandwidth=NETWORK))}
API_CRITIC = {"latency": 1.0, "concurrency": 16, "prices": (0.5, 1.5)}
OWN_CRITIC = {"latency": 0.5, "concurrency": 128, "prices": (0.0, 0.0)}
ASSUMED = """\
Assumed: a GPU that sustains 1e14 FLOP/s in bf16 and reads 1.5e12 B/s, at $2 an hour; 2e11 B/s between the GPUs of a
machine, 2.5e10 B/s between machines; an API critic of 1 s, 16 requests at a time, $0.50 and $1.50 per million tokens,
asked about every sample; an own critic on one more GPU (counted in the dollars), 0.5 s, 128 at a time. Times of phases
are seconds per step; "sent" is the gradients' (under ZeRO-3 also the weights') way between GPUs."""
COLUMNS = (
    *("job", "on", "GB a process", "generate", "passes", "update", "sent", "critic waited for"),
    *("s/step", "h/epoch", "GPU $/epoch", "calls/epoch", "critic $/epoch"),
)


@dataclass(frozen=True)
class Job:
    """A training run, whatever it runs on."""

    name: str
    model: str
    work: Workload
    """``samples`` is per process here."""
    epoch: int
    critic_tokens: tuple[int, int]
    sharded: int = 0
    """ZeRO stage on several GPUs."""


JOBS = (
    Job("sentiment, 20 of 36 blocks shared", "gpt2-large", Workload(16, 8, 18, shared_layers=20), 25_000, (375, 40)),
    Job("detoxification, LoRA", "meta-llama/Llama-2-7b-chat-hf", Workload(16, 20, 50, lora_rank=16), 50_000, (350, 40)),
    Job(
        "summaries, all weights",
        "meta-llama/Llama-2-7b-hf",
        Workload(8, 400, 50, checkpointing=True),
        100_000,
        (1050, 60),
        sharded=3,
    ),
)


def table() -> str:
    """The table as Markdown."""
    lines = [ASSUMED, "", f"| {' | '.join(COLUMNS)} |", "|" + "---|" * len(COLUMNS)]
    shapes = {job.model: find_shape(job.model) for job in JOBS}
    for job in JOBS:
        for place in MACHINES:
            lines += [_row(job, place, shapes[job.model], own=own) for own in (False, True)]
    return "\n".join(lines)


def _row(job: Job, place: str, shape: ModelShape, *, own: bool) -> str:
    processes, machine = MACHINES[place]
    zero = job.sharded if processes > 1 else 0
    setting = Setting(job.work.samples, job.work.samples, processes, zero, bf16=True)
    work = replace(job.work, samples=job.work.samples * processes, whole_batch=not zero)
    critic = critic_costs(
        work.samples,
        share=1.0,
        tokens_in=job.critic_tokens[0],
        tokens_out=job.critic_tokens[1],
        **(OWN_CRITIC if own else API_CRITIC),
    )
    spent = step_seconds(shape, work, setting, flops_plan(shape, work), machine, critic)
    memory = process_memory(shape, work, setting).total / 1e9
    steps = -(-job.epoch // work.samples)
    hours = spent.total * steps / 3600
    gpus = processes + own
    cells = [
        f"{shape.name}: {job.name}" + (", ZeRO-3" if setting.zero == 3 else ""),
        place + (" + own critic" if own else ", API critic"),
        f"{memory:.1f}",
        *(f"{seconds:.3g}" for seconds in (spent.generate, spent.passes, spent.update, spent.communication)),
        f"{spent.critic_wait:.3g}",
        f"{spent.total:.3g}",
        f"{hours:.2g}",
        f"{hours * gpus * machine.dollars_per_hour:.3g}",
        f"{job.epoch:,}",
        f"{(critic.dollars or 0) / work.samples * job.epoch:.3g}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    if len(sys.argv) == 1:
        print(table())
        return
    path = Path(sys.argv[1])
    before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"error: {path} has no lines {BEGIN} and {END} to write the table between")
    path.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
