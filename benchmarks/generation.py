"""Rollout generation in batches of 32 against one query at a time, both with PPOTrainer.generate.

    python -m benchmarks.generation            builtin:smollm2
    python -m benchmarks.generation --small    a random 11M GPT-2, nothing to prepare

The queries have 5 to 40 tokens and every response a length of its own, 10 to 20; both ways get the same queries and
lengths, in turns. Prints response tokens per second (median of the repeats), their ratio, and whether the target is
met. Not covered: the models' passes and the update, a GPU, other batch sizes.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import Tensor
from transformers import AutoTokenizer

from benchmarks.critic_overlap import make_trainer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, set_seed
from trl.builtin import resolve_model

BATCH = 32
QUERY_TOKENS = (5, 40)
RESPONSE_TOKENS = (10, 20)
TARGET = 5.0


def builtin_trainer(bf16: bool) -> PPOTrainer:
    path = resolve_model("builtin:smollm2")
    config = PPOConfig(batch_size=BATCH, mini_batch_size=BATCH)
    if bf16:
        config.accelerator_kwargs["mixed_precision"] = "bf16"
    model = AutoModelForCausalLMWithValueHead.from_pretrained(path)
    return PPOTrainer(config, model, tokenizer=AutoTokenizer.from_pretrained(path))


def all_together(trainer: PPOTrainer, queries: list[Tensor], lengths: list[int]) -> list[Tensor]:
    responses: list[Tensor] = trainer.generate(queries, iter(lengths).__next__, BATCH, return_prompt=False)
    return responses


def one_by_one(trainer: PPOTrainer, queries: list[Tensor], lengths: list[int]) -> list[Tensor]:
    pairs = zip(queries, lengths, strict=True)
    return [trainer.generate(query, iter([n]).__next__, return_prompt=False)[0] for query, n in pairs]


def tokens_per_second(generate: Callable[..., list[Tensor]], *work: object) -> float:
    begin = time.perf_counter()
    responses = generate(*work)
    return sum(map(len, responses)) / (time.perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a random 11M GPT-2 instead of builtin:smollm2")
    parser.add_argument("--bf16", action="store_true", help="sample from a bf16 copy, as training with --bf16 does")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    if args.small and args.bf16:
        parser.error("--bf16 goes with builtin:smollm2")
    trainer = make_trainer(BATCH) if args.small else builtin_trainer(args.bf16)
    set_seed(0)
    draw = random.Random(0)
    vocabulary = trainer.policy.base_lm.get_input_embeddings().num_embeddings
    queries = [torch.randint(10, vocabulary, (draw.randint(*QUERY_TOKENS),)) for _ in range(BATCH)]
    lengths = [draw.randint(*RESPONSE_TOKENS) for _ in range(BATCH)]
    one_by_one(trainer, queries[:2], lengths[:2])  # first allocations
    all_together(trainer, queries, lengths)

    batched, single = [], []
    for _ in range(args.repeats):
        batched.append(tokens_per_second(all_together, trainer, queries, lengths))
        single.append(tokens_per_second(one_by_one, trainer, queries, lengths))
    ratios = [fast / slow for fast, slow in zip(batched, single, strict=True)]
    ratio = statistics.median(ratios)
    print(f"{'random GPT-2, 11M' if args.small else 'builtin:smollm2'}, {torch.get_num_threads()} threads")
    print(f"batch of {BATCH}           {statistics.median(batched):8.1f} response tokens/s")
    print(f"one query at a time   {statistics.median(single):8.1f} response tokens/s")
    print(
        f"ratio                 {ratio:8.1f}   ({min(ratios):.1f} to {max(ratios):.1f} over {args.repeats} repeats)"
        f"   target >= {TARGET:g}: {'met' if ratio >= TARGET else 'MISSED'}"
    )


if __name__ == "__main__":
    main()
