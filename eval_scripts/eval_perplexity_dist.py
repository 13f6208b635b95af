"""Fluency and diversity of a generation file: conditional perplexity and dist-1/2/3.

    python eval_scripts/eval_perplexity_dist.py --generations_file out.jsonl --output_file ppl.jsonl

Perplexity is that of the continuation given its prompt. dist-n is unique n-grams / all n-grams over each
prompt's continuations (whitespace words). Interrupted runs continue where they stopped when the same command
is given again.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

import tyro

import trl

if vars(trl).get("DISTRIBUTION") != "relc":
    sys.exit(f"'trl' from {trl.__path__[0]} is not relc's: pip uninstall trl, then pip install -e . here")

from trl.builtin import BuiltinError
from trl.jsonl import DataFileError, Row, dump_line, read_prompts, run_resumable

PROMPTS_PER_CHUNK = 8


@dataclass
class Args:
    generations_file: Path
    """JSON lines with prompt.text and generations[].text, as decoding.py writes them."""
    output_file: Path
    """The same rows with nll, tokens and perplexity per continuation; appended to and resumed."""
    model: str = "gpt2-xl"
    """Causal language model that judges: hub id, local folder, or builtin: name."""


def main(args: Args) -> None:
    # 1. texts, model
    import numpy as np

    from trl.fingerprint import model_version
    from trl.generation import load_causal_lm
    from trl.metrics import (
        ContinuationNLL,
        bootstrap_interval,
        continuation_nll,
        distinct_n,
        perplexity_intervals,
        perplexity_summary,
    )

    rows = read_prompts(args.generations_file, with_generations=True)
    model, tokenizer = load_causal_lm(args.model)

    # 2. score, chunk by chunk
    def process(index: int, chunk: list[Row]) -> list[Row]:
        items = [dict(item) for row in chunk for item in row["generations"]]
        prompts = [row["prompt"]["text"] for row in chunk for _ in row["generations"]]
        scores = continuation_nll(model, tokenizer, prompts, [item["text"] for item in items])
        values = zip(items, scores.nll, scores.tokens, scores.perplexity, strict=True)
        for item, nll, tokens, perplexity in values:
            item |= {"nll": nll, "tokens": tokens, "perplexity": perplexity}
        each = iter(items)
        return [{**row, "generations": [next(each) for _ in row["generations"]]} for row in chunk]

    settings = {"script": "eval_perplexity_dist", "model": args.model, "version": model_version(args.model)}
    results = run_resumable(rows, args.output_file, process, settings=settings, chunk_size=PROMPTS_PER_CHUNK)

    # 3. result
    items = [item for row in results for item in row["generations"]]
    scores = ContinuationNLL(
        np.array([item["nll"] for item in items], dtype=np.float64),
        np.array([item["tokens"] for item in items]),
    )
    texts = [[item["text"] for item in row["generations"]] for row in results]
    distinct = {}
    for n in (1, 2, 3):
        values = distinct_n(texts, n)
        defined = values[~np.isnan(values)]
        entry: dict[str, float | int | None] = {"mean": None, "prompts": len(defined)}
        if defined.size:
            entry |= bootstrap_interval(defined)._asdict()
        distinct[f"dist-{n}"] = entry
    prompt_of = np.repeat(np.arange(len(results)), [len(row["generations"]) for row in results])
    perplexity = {**perplexity_summary(scores), "intervals": perplexity_intervals(scores, prompt_of)}
    summary = {"generations_file": str(args.generations_file), "model": args.model, "prompts": len(results)}
    print(dump_line({**summary, "perplexity": perplexity, **distinct, "output_file": str(args.output_file)}))


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, use_underscores=True, description=__doc__))
    except (BuiltinError, DataFileError, OSError) as error:
        sys.exit(f"error: {error}")
