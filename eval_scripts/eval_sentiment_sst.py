"""How positive are a language model's continuations? The mean over prompts of the share called positive.

    python eval_scripts/eval_sentiment_sst.py gpt2-large prompts/neutral.jsonl --output_file out.jsonl \
        --num_return 25 --classifier_path distilbert-base-uncased-finetuned-sst-2-english

Each prompt gets `num_return` sampled continuations; the continuation alone (no prompt) is classified.
Interrupted runs continue where they stopped when the same command is given again.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

import trl

if vars(trl).get("DISTRIBUTION") != "relc":
    sys.exit(f"'trl' from {trl.__path__[0]} is not relc's: pip uninstall trl, then pip install -e . here")

from trl.builtin import BuiltinError
from trl.jsonl import DataFileError, Row, dump_line, read_prompts, run_resumable


@dataclass
class Args:
    model: Annotated[Positional[str], arg(metavar="MODEL")]
    """Causal language model: hub id, local folder, or builtin: name."""
    prompts: Annotated[Positional[Path], arg(metavar="PROMPTS")]
    """JSON lines with prompt.text."""
    output_file: Path
    """The prompts' rows with `generations` and one P(positive) per classifier; appended to and resumed."""
    num_return: int = 25
    """Continuations per prompt."""
    classifier_path: tuple[str, ...] = ("distilbert-base-uncased-finetuned-sst-2-english",)
    """One or more sentiment classifiers: hub ids, local folders, builtin: names."""
    max_new_tokens: int = 20
    """Most new tokens per continuation."""
    top_p: float = 0.9
    """Nucleus: sample from the smallest set of tokens with this probability; 1 is off."""
    batch_size: int = 4
    """Prompts per batch (times num_return sequences)."""
    seed: int = 0
    """Together with the batch's index, seeds its samples."""


def main(args: Args) -> None:
    # 1. prompts, model, classifiers
    from trl.fingerprint import model_version
    from trl.generation import Sampling, batch_seed, count_cut, load_causal_lm, sample_continuations
    from trl.rewards.classifiers import load_classifier

    if not args.classifier_path:
        sys.exit("error: --classifier_path needs at least one name")
    if args.batch_size < 1:
        sys.exit(f"error: --batch_size is {args.batch_size}; expected at least 1")
    rows = read_prompts(args.prompts)
    try:
        sampling = Sampling(max_new_tokens=args.max_new_tokens, top_p=args.top_p, num_return=args.num_return)
        model, tokenizer = load_causal_lm(args.model)
        cut = count_cut(model, tokenizer, [row["prompt"]["text"] for row in rows], sampling)
        classifiers = {name: load_classifier(name) for name in args.classifier_path}
    except ValueError as error:  # settings that contradict each other or the model, or no label that means positive
        sys.exit(f"error: {error}")

    # 2. continue and classify, chunk by chunk
    def process(index: int, chunk: list[Row]) -> list[Row]:
        prompts = [row["prompt"]["text"] for row in chunk]
        groups = sample_continuations(model, tokenizer, prompts, sampling, seed=batch_seed(args.seed, index))
        items: list[Row] = [{"text": text} for group in groups for text in group]
        written = [item for item in items if item["text"].strip()]  # nothing to classify in the others
        for name, classify in classifiers.items():
            for item in items:
                item[name] = None
            if written:
                for item, p in zip(written, classify([item["text"] for item in written]), strict=True):
                    item[name] = float(p)
        n = args.num_return
        return [{**row, "generations": items[i * n : (i + 1) * n]} for i, row in enumerate(chunk)]

    settings = {"script": "eval_sentiment_sst", "model": args.model, **asdict(sampling)}
    settings |= {"classifier_path": args.classifier_path, "batch_size": args.batch_size, "seed": args.seed}
    settings |= {"versions": [model_version(name) for name in (args.model, *args.classifier_path)]}
    results = run_resumable(rows, args.output_file, process, settings=settings, chunk_size=args.batch_size)

    # 3. result
    texts = [item["text"] for row in results for item in row["generations"]]
    summary = {
        "model": args.model,
        "prompts": len(results),
        "prompts_cut": cut,
        "generations": len(texts),
        "empty": sum(not text.strip() for text in texts),
        "classifiers": {name: positive_interval(results, name, args.seed) for name in args.classifier_path},
        "output_file": str(args.output_file),
    }
    print(dump_line(summary))


def positive_interval(results: list[dict], name: str, seed: int) -> dict[str, float | int | None]:
    """Mean over prompts of the share positive with its 95 % bootstrap interval; empty texts have no say.

    None where every continuation is empty.
    """
    import numpy as np

    from trl.metrics import bootstrap_interval, share_positive

    shares = share_positive([[item[name] for item in row["generations"] if item[name] is not None] for row in results])
    judged = shares[~np.isnan(shares)]
    if not judged.size:
        return {"share_positive": None, "low": None, "high": None, "prompts": 0}
    mean, low, high = bootstrap_interval(judged, seed=seed)
    return {"share_positive": mean, "low": low, "high": high, "prompts": len(judged)}


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, use_underscores=True, description=__doc__))
    except (BuiltinError, DataFileError, OSError) as error:
        sys.exit(f"error: {error}")
