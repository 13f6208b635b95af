"""Hundreds of PPO steps with a critic that misbehaves in every way: memory, file handles and threads must stay flat.

    python -m benchmarks.soak [--steps 300] [--output soak.jsonl]

The loop is that of the scripts (generate, score, critique, merge, step, log, checkpoints) on a tiny random Llama; the
endpoint is `benchmarks.bad_critic` in a process of its own, which is killed and started again every ``OUTAGE`` steps.
Prints a table; writes one row per step: resident memory (MB), open files, connections, threads, and what the critic's
calls came to. Not covered: GPUs, several processes, long sequences.
"""

import argparse
import gc
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import psutil
from datasets import Dataset

from benchmarks.bad_critic import PROMPT, SLOW
from tests.tiny import tiny_llama, tiny_tokenizer
from trl import AutoModelForCausalLMWithValueHead, LengthSampler, PPOConfig, PPOTrainer, create_reference_model
from trl.critic import IntrinsicReward, OpenAICritic, PromptTemplate
from trl.jsonl import dump_line
from trl.loop import RunRecord
from trl.run import RunArgs

ROOT = Path(__file__).resolve().parents[1]
BATCH, OUTAGE, SAVED = 8, 15, 10
STATUSES = ("ok", "none", "unparsable", "failed", "skipped")


@contextmanager
def endpoint(port: int) -> Iterator[None]:
    """The misbehaving server, from the moment that it listens until it is killed."""
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.bad_critic", str(port)], cwd=ROOT)
    try:
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def usage() -> dict[str, float]:
    """Of this process, after a collection of garbage."""
    gc.collect()
    process = psutil.Process()
    connections = len(process.net_connections(kind="all"))
    return {
        "rss": process.memory_info().rss / 2**20,
        "files": process.num_fds() - connections,
        "connections": connections,
        "threads": process.num_threads(),
    }


def soak(folder: Path, steps: int) -> Iterator[dict[str, float]]:
    """One row per step of a run in ``folder``."""
    tokenizer, port = tiny_tokenizer(), free_port()
    (folder / "prompt.txt").write_text(PROMPT)
    template = PromptTemplate.from_file(folder / "prompt.txt", style="sentiment")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_llama(layers=2))
    texts = [f"Film number {number} was the" for number in range(64)]
    rows = [{"query": text, "input_ids": tokenizer(text)["input_ids"]} for text in texts]
    config = PPOConfig(batch_size=BATCH, mini_batch_size=BATCH // 2, ppo_epochs=2, learning_rate=1e-5)
    trainer = PPOTrainer(config, model, create_reference_model(model, 1), tokenizer, dataset=Dataset.from_list(rows))
    critic = OpenAICritic(
        template,
        "m",
        base_url=f"http://127.0.0.1:{port}/v1",
        max_concurrency=BATCH,
        timeout=SLOW / 2,
        deadline=5.0,
        max_retries=1,
        backoff=0.01,
        cache=folder / "cache",
    )
    intrinsic = IntrinsicReward(
        critic,
        tokenizer,
        "sentiment",
        threshold=1.0,
        positive_value=0.5,
        negative_value=-0.5,
        log_path=folder / "run" / "critiques.jsonl",
    )
    args = RunArgs(ppo_config=config, output_dir=str(folder / "run"), save_freq=SAVED)
    with RunRecord(args, trainer, folder / "run", steps) as record:
        batches = record.batches()
        while record.done < steps:
            with endpoint(port):
                for batch in batches:
                    yield one_step(record, intrinsic, batch)
                    if record.done % OUTAGE == 0:
                        break
            if record.done < steps:  # nobody listens now
                yield one_step(record, intrinsic, next(batches))
    critic.close()


def one_step(record: RunRecord, intrinsic: IntrinsicReward, batch: dict[str, list[Any]]) -> dict[str, float]:
    """As the scripts do it; every seventh reward is missing."""
    trainer = record.trainer
    responses = trainer.generate(batch["input_ids"], LengthSampler(4, 12), return_prompt=False)
    texts = record.decode(batch["input_ids"], responses)
    lengths = [float(len(text)) for text in texts]
    scores = [float("nan") if length % 7 == 0 else -length / 10 for length in lengths]
    pending = intrinsic.submit(batch["input_ids"], responses, scores)
    stats = trainer.step(batch["input_ids"], responses, record.merged(scores, pending), scores_are_scaled=True)
    record.step(stats, batch, responses, texts, scores, pending)
    counts = {status: pending.stats[f"critic/{status}"] for status in STATUSES}
    return {"step": record.done, **usage(), **counts, "seconds": stats["time/step"]}


def report(rows: list[dict[str, float]]) -> str:
    """Every tenth part of a run, and what the critic's calls came to."""
    lines = [f"{'step':>6}{'MB':>9}{'files':>7}{'connections':>13}{'threads':>9}"]
    for row in rows[:: max(1, len(rows) // 10)] + rows[-1:]:
        figures = f"{row['files']:>7}{row['connections']:>13}{row['threads']:>9}"
        lines.append(f"{row['step']:>6}{row['rss']:>9.1f}{figures}")
    totals: Counter[str] = Counter()
    for row in rows:
        totals.update({status: int(row[status]) for status in STATUSES})
    return "\n".join([*lines, "critiques: " + ", ".join(f"{count} {status}" for status, count in totals.items())])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path, help="one JSON row per step")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in soak(Path(folder), args.steps):
            rows.append(row)
            if args.output:
                args.output.write_text("".join(dump_line(each) + "\n" for each in rows))
    print(report(rows))


if __name__ == "__main__":
    main()
