"""Sample continuations of a prompt file from a causal language model, as a generation file.

    python eval_scripts/decoding.py --lm_dir gpt2-large --prompts_file prompts.jsonl --output_file out.jsonl \
        --num_returns 25 --do_sample --top_p 0.9 --max_length 20 --batch_size 8

Interrupted runs continue where they stopped when the same command is given again.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import tyro

import trl

if vars(trl).get("DISTRIBUTION") != "relc":
    sys.exit(f"'trl' from {trl.__path__[0]} is not relc's: pip uninstall trl, then pip install -e . here")

from trl.builtin import BuiltinError
from trl.jsonl import DataFileError, Row, dump_line, read_prompts, run_resumable


@dataclass
class Args:
    lm_dir: str
    """Causal language model: hub id, local folder (also one of a LoRA adapter), or builtin: name."""
    prompts_file: Path
    """JSON lines with prompt.text."""
    output_file: Path
    """The prompts' rows with `generations` added; appended to and resumed."""
    num_returns: int = 25
    """Continuations per prompt."""
    do_sample: bool = True
    """Sample; --no-do_sample decodes greedily (with --num_returns 1)."""
    top_p: float = 0.9
    """Nucleus: sample from the smallest set of tokens with this probability; 1 is off."""
    top_k: int = 0
    """Sample from the k likeliest tokens; 0 is off."""
    max_length: int = 20
    """Most new tokens per continuation."""
    min_length: int = 10
    """Fewest new tokens: the end-of-sequence token is forbidden before that."""
    batch_size: int = 8
    """Prompts per batch (times num_returns sequences)."""
    sample_size: int = 2000
    """A longer prompt file is cut to a seeded random sample of this many rows, in file order."""
    seed: int = 0
    """Seeds the choice of prompts and, together with the batch's index, its samples."""


def main(args: Args) -> None:
    for name in ("batch_size", "sample_size"):
        if getattr(args, name) < 1:
            sys.exit(f"error: --{name} is {getattr(args, name)}; expected at least 1")

    # 1. prompts
    import numpy as np

    from trl.fingerprint import model_version
    from trl.generation import Sampling, batch_seed, count_cut, load_causal_lm, sample_continuations

    rows = read_prompts(args.prompts_file)
    if len(rows) > args.sample_size:
        chosen = np.random.default_rng(args.seed).choice(len(rows), args.sample_size, replace=False)
        rows = [rows[index] for index in sorted(chosen)]

    # 2. model
    try:
        sampling = Sampling(
            max_new_tokens=args.max_length,
            min_new_tokens=args.min_length,
            do_sample=args.do_sample,
            top_p=args.top_p,
            top_k=args.top_k,
            num_return=args.num_returns,
        )
        model, tokenizer = load_causal_lm(args.lm_dir)
        cut = count_cut(model, tokenizer, [row["prompt"]["text"] for row in rows], sampling)
    except ValueError as error:  # settings that contradict each other or the model
        sys.exit(f"error: {error}")

    # 3. generate, chunk by chunk
    def process(index: int, chunk: list[Row]) -> list[Row]:
        prompts = [row["prompt"]["text"] for row in chunk]
        texts = sample_continuations(model, tokenizer, prompts, sampling, seed=batch_seed(args.seed, index))
        return [
            {**row, "generations": [{"text": text} for text in group]} for row, group in zip(chunk, texts, strict=True)
        ]

    settings = {"script": "decoding", "lm_dir": args.lm_dir, "version": model_version(args.lm_dir), **asdict(sampling)}
    settings |= {"batch_size": args.batch_size, "seed": args.seed}
    results = run_resumable(rows, args.output_file, process, settings=settings, chunk_size=args.batch_size)

    # 4. result
    lengths = [len(item["text"].split()) for row in results for item in row["generations"]]
    summary = {"model": args.lm_dir, "prompts": len(results), "prompts_cut": cut, "generations": len(lengths)}
    summary |= {"empty": lengths.count(0), "mean_words": float(np.mean(lengths))}
    print(dump_line({**summary, "output_file": str(args.output_file)}))


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, use_underscores=True, description=__doc__))
    except (BuiltinError, DataFileError, OSError) as error:
        sys.exit(f"error: {error}")
