"""What sixteen critiques over HTTP cost a PPO step: the client itself, and waiting for a slow endpoint.

    python -m benchmarks.critic_overlap

A local server in a process of its own answers at once, or after 0.5 s. Compared in the same run: a plain loop that
makes a new client for every call, one call after the other. The step is PPOTrainer's on a random 11M GPT-2 whose
log-prob passes take longer than the endpoint. Prints seconds (the least of several repeats, which other work on the
machine disturbs least), ratios, and whether the targets are met.
Not covered: TLS, a network, an endpoint that slows down under load.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import openai
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tests.fake_openai import FakeOpenAI, completion
from tests.tiny import EOS_ID, VOCAB_SIZE, tiny_tokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from trl.core import merge_rewards
from trl.critic import IntrinsicReward, OpenAICritic, PromptTemplate
from trl.critic.types import CritiqueRequest

CRITIQUES = 16
SLOW = 0.5
REPLY = "None identified\n\nIdentified Negative Text Span:\nNone identified"


def serve(delay: float, parent: Connection) -> None:
    with FakeOpenAI(lambda body: completion(REPLY, delay=delay)) as server:
        parent.send(server.url)
        parent.recv()


@contextmanager
def server(delay: float) -> Iterator[str]:
    """The URL of an endpoint in another process."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(delay, theirs), daemon=True)
    process.start()
    yield ours.recv()
    ours.send("stop")
    process.join()


def least_seconds(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Of the clock, and of this process's CPU."""
    times, cpu_times = [], []
    for _ in range(repeats):
        begin, cpu_begin = time.perf_counter(), time.process_time()
        work()
        times.append(time.perf_counter() - begin)
        cpu_times.append(time.process_time() - cpu_begin)
    return min(times), min(cpu_times)


def plain_loop(url: str, requests: list[CritiqueRequest], template: PromptTemplate) -> None:
    for request in requests:
        client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
        message = {"role": "user", "content": template.fill(request)}
        client.chat.completions.create(model="m", messages=[message], temperature=0, max_tokens=256)  # type: ignore[list-item]
        client.close()


def make_trainer(batch: int) -> PPOTrainer:
    sizes = {"n_positions": 512, "n_embd": 384, "n_layer": 6, "n_head": 6}
    config = GPT2Config(vocab_size=VOCAB_SIZE, eos_token_id=EOS_ID, bos_token_id=EOS_ID, **sizes)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(GPT2LMHeadModel(config))
    settings = PPOConfig(batch_size=batch, mini_batch_size=batch, ppo_epochs=1, learning_rate=1e-6)
    return PPOTrainer(settings, model, tokenizer=tiny_tokenizer())


def steps(url: str, template: PromptTemplate, length: int, repeats: int) -> dict[str, dict[str, float]]:
    """Least seconds of a step without a critic, with one that is waited for, and with one that works meanwhile."""
    trainer = make_trainer(CRITIQUES)
    intrinsic = IntrinsicReward(
        OpenAICritic(template, "m", base_url=url),
        trainer.tokenizer,
        "sentiment",
        threshold=9,
        positive_value=0.5,
        negative_value=-0.5,
    )
    generator = torch.Generator().manual_seed(0)
    scores = [0.0] * CRITIQUES

    def step(kind: str) -> dict[str, float]:
        ids = torch.randint(1, VOCAB_SIZE, (CRITIQUES, length + 32), generator=generator)
        queries, responses = list(ids[:, :length]), list(ids[:, length:])
        begin = time.perf_counter()
        waited = 0.0
        if kind == "none":
            stats = trainer.step(queries, responses, scores)
        else:
            pending = intrinsic.submit(queries, responses, scores)
            if kind == "waited for":
                pending.result()
                waited = time.perf_counter() - begin
            stats = trainer.step(queries, responses, lambda: merge_rewards(scores, pending.result()))
        total, waited = time.perf_counter() - begin, waited + stats["time/scores_wait"]
        return {"total": total, "passes": stats["time/passes"], "wait": waited}

    kinds = ("none", "waited for", "meanwhile")
    step("meanwhile")  # connections, preflight, first allocations
    measured = [{kind: step(kind) for kind in kinds} for _ in range(repeats)]
    return {kind: {name: min(row[kind][name] for row in measured) for name in measured[0][kind]} for kind in kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--query_length", type=int, default=96, help="tokens; longer queries make longer passes")
    args = parser.parse_args()
    os.environ.setdefault("OPENAI_API_KEY", "none")
    if os.getloadavg()[0] > 0.5 * (os.cpu_count() or 1):
        print(f"this machine is busy (load {os.getloadavg()[0]:.1f}): times of the clock mean little")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "prompt.txt").write_text("Which words?\n{}\nIdentified Positive Text Span:\n")
        template = PromptTemplate.from_file(Path(folder) / "prompt.txt", style="sentiment")
    requests = [CritiqueRequest(f"The film was number {i}.") for i in range(CRITIQUES)]
    results: list[tuple[str, float, float | None]] = []
    with server(0.0) as url:
        critic = OpenAICritic(template, "m", base_url=url)
        critic.critique(requests)
        ours, ours_cpu = least_seconds(lambda: critic.critique(requests), args.repeats)
        plain, plain_cpu = least_seconds(lambda: plain_loop(url, requests, template), args.repeats)
        results += [
            ("instant endpoint: ours", ours, 0.1),
            ("  of it, CPU", ours_cpu, None),
            ("instant endpoint: new client per call", plain, None),
            ("  of it, CPU", plain_cpu, None),
        ]
        print(f"instant endpoint: {plain / ours:.0f} times faster than the plain loop, CPU {plain_cpu / ours_cpu:.0f}")
    with server(SLOW) as url:
        critic = OpenAICritic(template, "m", base_url=url)
        critic.critique(requests)
        ours, _ = least_seconds(lambda: critic.critique(requests), args.repeats)
        plain, _ = least_seconds(lambda: plain_loop(url, requests, template), 1)
        results += [("0.5 s endpoint: ours", ours, 0.7), ("0.5 s endpoint: new client per call", plain, None)]
        print(f"{SLOW} s endpoint: {plain / ours:.0f} times faster than the plain loop")
        by_kind = steps(url, template, args.query_length, args.repeats)
        none, waited, meanwhile = by_kind["none"], by_kind["waited for"], by_kind["meanwhile"]
        if none["passes"] < SLOW:
            print(f"the passes take only {none['passes']:.2f} s here: give a longer --query_length")
        results += [
            ("PPO step without a critic", none["total"], None),
            ("  of it, its own passes", none["passes"], None),
            ("waiting for a critic before the step", waited["wait"], 0.7),
            ("  added to the step", waited["total"] - none["total"], None),
            ("waiting for a critic that works meanwhile", meanwhile["wait"], 0.2),
            ("  added to the step", meanwhile["total"] - none["total"], 0.2),
        ]
    for name, seconds, target in results:
        verdict = "" if target is None else f"   target < {target} s: {'met' if seconds < target else 'MISSED'}"
        print(f"{name:42s} {seconds:7.3f} s{verdict}")


if __name__ == "__main__":
    main()
