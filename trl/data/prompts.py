"""Prompts that lead a base model to neutral, negative or positive text: ``python -m trl.data.prompts``.

    python -m trl.data.prompts outputs/prompts --source builtin:imdb --split test --candidates 300

The sets follow DExperts (Liu et al., 2021, appendix on sentiment prompts): half sentences are continued 25
times by the base model; a prompt is neutral if 12 or 13 of the continuations are positive, negative if none is,
positive if 24 or 25 are. Steering a model against a negative prompt is the adversarial setting. Small models stay
on a prompt's sentiment less, so that few of their prompts are at the extremes: wider bounds give more prompts from
fewer candidates.
"""

import random
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from tyro.conf import Positional, arg

import trl

if vars(trl).get("DISTRIBUTION") != "relc":
    sys.exit(f"'trl' from {trl.__path__[0]} is not relc's: pip uninstall trl, then pip install -e . here")

from trl.builtin import BuiltinError
from trl.data.sentiment import load_texts
from trl.jsonl import DataFileError, Row, dump_line, run_resumable

PROMPTS_PER_BATCH = 4
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")


@dataclass
class Args:
    """Make neutral, negative and positive prompt files from the sentences of a text data set."""

    output_dir: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """Gets candidates.jsonl (every prompt, its continuations and scores; resumed) and one file per set."""
    source: str = "builtin:imdb"
    """Data set with a text column: hub id, local file or folder, or builtin: name."""
    split: str = "test"
    """Split of the data set; prompts for evaluation should not come from what is trained on."""
    model: str = "builtin:smollm2"
    """Base model that continues the prompts."""
    classifier: str = "builtin:sentiment"
    """Classifier that judges each continuation alone."""
    candidates: int = 1000
    """Half sentences to try."""
    min_words: int = 4
    """Shortest prompt."""
    max_words: int = 10
    """Longest prompt."""
    num_return: int = 25
    """Continuations per prompt."""
    max_new_tokens: int = 20
    """Most new tokens per continuation."""
    top_p: float = 0.9
    """Nucleus: sample from the smallest set of tokens with this probability; 1 is off."""
    neutral: tuple[int, int] = (12, 13)
    """Fewest and most positive continuations of a neutral prompt."""
    negative: tuple[int, int] = (0, 0)
    """The same of a negative prompt."""
    positive: tuple[int, int] = (24, 25)
    """The same of a positive prompt."""
    per_set: int | None = None
    """Keep this many of each set, those nearest to the middle of the neutral bounds or to the extremes first."""
    seed: int = 0
    """Seeds the choice of sentences and the sampling."""


def half_sentences(texts: list[str], count: int, min_words: int, max_words: int, seed: int) -> list[str]:
    """``count`` different first halves of sentences, of ``min_words`` to ``max_words`` words, at most one a text."""
    draw = random.Random(seed)
    found: dict[str, None] = {}
    for text in draw.sample(texts, len(texts)):
        halves = [_half(sentence) for sentence in _SENTENCE_END.split(text)]
        fitting = [half for half in halves if min_words <= len(half.split()) <= max_words]
        if fitting:
            found.setdefault(draw.choice(fitting))
        if len(found) == count:
            break
    return list(found)


def _half(sentence: str) -> str:
    words = sentence.split()
    return " ".join(words[: len(words) // 2])


def choose(rows: list[Row], bounds: tuple[int, int], target: float, per_set: int | None) -> list[Row]:
    """Rows whose ``num_positive`` is within ``bounds``; the ``per_set`` nearest to ``target``, in file order."""
    fitting = [row for row in rows if bounds[0] <= row["num_positive"] <= bounds[1]]
    nearest = sorted(fitting, key=lambda row: abs(row["num_positive"] - target))[:per_set]
    return [{"prompt": row["prompt"], "num_positive": row["num_positive"]} for row in fitting if row in nearest]


def main(args: Args) -> None:
    """Sample, judge, and write the sets."""
    from trl.generation import Sampling, batch_seed, load_causal_lm, sample_continuations
    from trl.rewards.classifiers import load_classifier

    texts = load_texts(args.source, args.split)
    prompts = half_sentences(texts, args.candidates, args.min_words, args.max_words, args.seed)
    if len(prompts) < args.candidates:
        print(f"{args.source} ({args.split}) has only {len(prompts)} fitting half sentences", file=sys.stderr)
    sampling = Sampling(max_new_tokens=args.max_new_tokens, top_p=args.top_p, num_return=args.num_return)
    classify = load_classifier(args.classifier)
    model, tokenizer = load_causal_lm(args.model)

    def process(index: int, chunk: list[Row]) -> list[Row]:
        texts = [row["prompt"]["text"] for row in chunk]
        groups = sample_continuations(model, tokenizer, texts, sampling, seed=batch_seed(args.seed, index))
        return [_judged(row, group, classify) for row, group in zip(chunk, groups, strict=True)]

    settings = {"command": "trl.data.prompts", "model": args.model, "classifier": args.classifier}
    rows: list[Row] = [{"prompt": {"text": prompt}} for prompt in prompts]
    judged = run_resumable(
        rows,
        args.output_dir / "candidates.jsonl",
        process,
        settings={**settings, **asdict(sampling), "seed": args.seed},
        chunk_size=PROMPTS_PER_BATCH,
    )
    counts: Row = {"candidates": len(judged)}
    middle = sum(args.neutral) / 2
    sets = {
        "neutral": (args.neutral, middle),
        "negative": (args.negative, 0.0),
        "positive": (args.positive, float(args.num_return)),
    }
    for name, (bounds, target) in sets.items():
        chosen = choose(judged, bounds, target, args.per_set)
        content = "".join(dump_line(row) + "\n" for row in chosen)
        (args.output_dir / f"{name}.jsonl").write_text(content, encoding="utf-8")
        counts[name] = len(chosen)
    print(dump_line({**counts, "output_dir": str(args.output_dir)}))


def _judged(row: Row, continuations: list[str], classify: Callable[[list[str]], np.ndarray]) -> Row:
    """An empty continuation says nothing, so it does not count as positive."""
    positive = [bool(p > 0.5) for p in classify(continuations)]
    generations = [{"text": text, "positive": flag} for text, flag in zip(continuations, positive, strict=True)]
    return {
        **row,
        "num_positive": sum(flag and bool(text.strip()) for text, flag in zip(continuations, positive, strict=True)),
        "generations": generations,
    }


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, use_underscores=True))
    except (BuiltinError, DataFileError, OSError) as error:
        sys.exit(f"error: {error}")
