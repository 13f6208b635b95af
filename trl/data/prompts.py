"""Prompts that lead a base model to neutral, negative or positive text: ``python -m trl.data.prompts``.

    python -m trl.data.prompts outputs/prompts --source builtin:imdb --split test --candidates 300

Half sentences are continued 25 times by the base model, and a classifier counts the positive continuations: a prompt is
neutral if that are 12 or 13, negative if none is, positive if all are. So did DExperts (Liu et al. 2021,
arXiv:2105.03023, on sentiment): of 100,000 prompts from OpenWebText, continued by GPT-2 large, it kept 5,000 neutral,
2,500 negative and 2,500 positive ones. With a hub and a GPU that is

    python -m trl.data.prompts outputs/prompts --source Skylion007/openwebtext --split train --candidates 100000 \\
        --model gpt2-large --classifier distilbert-base-uncased-finetuned-sst-2-english

Steering a model against a negative prompt is the adversarial setting. Small models stay on a prompt's sentiment less,
so that few of their prompts are at the extremes: wider bounds give more prompts from fewer candidates.
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
from trl.jsonl import DataFileError, Row, dump_line, replace_file, run_resumable

PROMPTS_PER_BATCH = 4
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+")
_PARAGRAPH_END = re.compile(r"\n\s*\n")


@dataclass
class Args:
    """Make neutral, negative and positive prompt files from the sentences of a text data set."""

    output_dir: Annotated[Positional[Path], arg(metavar="FOLDER")]
    """Gets candidates.jsonl (every prompt, its continuations and scores; resumed) and one file per set."""
    source: str = "builtin:imdb"
    """Texts: a data set with a text column (hub id, local file or folder, builtin: name), or a .txt file or a folder of
    them, whose paragraphs are the texts. A text gives at most one prompt."""
    split: str = "test"
    """Split of the data set; prompts for evaluation should not come from what is trained on."""
    max_texts: int = 200_000
    """Read the first so many texts; a data set on the hub is fetched no further."""
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
    positive: tuple[int, int] = (25, 25)
    """The same of a positive prompt."""
    neutral_size: int = 5000
    """Most neutral prompts to keep, those nearest to the middle of their bounds first."""
    negative_size: int = 2500
    """Most negative prompts, those with the fewest positive continuations first."""
    positive_size: int = 2500
    """Most positive prompts, those with the most positive continuations first."""
    seed: int = 0
    """Seeds the choice of sentences and the sampling."""

    def __post_init__(self) -> None:
        for name in ("neutral", "negative", "positive"):
            low, high = getattr(self, name)
            if not 0 <= low <= high <= self.num_return:
                raise ValueError(f"--{name} is {low} {high}; expected 0 <= fewest <= most <= {self.num_return}")
        if not 1 <= self.min_words <= self.max_words:
            raise ValueError(f"expected 1 <= min <= max words, got {self.min_words} and {self.max_words}")


def read_texts(source: str, split: str, limit: int) -> list[str]:
    """The first ``limit`` texts of a source, see `Args.source`. Raises DataFileError, BuiltinError, OSError."""
    path = Path(source)
    files = [path] if path.suffix == ".txt" else sorted(path.glob("*.txt"))
    if not files:
        return load_texts(source, split, limit=limit, streaming=True)
    texts: list[str] = []
    for file in files:
        try:
            paragraphs = _PARAGRAPH_END.split(file.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise DataFileError(f"{file}: expected text in UTF-8 ({error})") from error
        texts += [paragraph for paragraph in paragraphs if paragraph.strip()]
        if len(texts) >= limit:
            break
    return texts[:limit]


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


def choose(rows: list[Row], bounds: tuple[int, int], target: float, size: int) -> list[Row]:
    """Rows whose ``num_positive`` is within ``bounds``; the ``size`` nearest to ``target``, in file order."""
    fitting = [row for row in rows if bounds[0] <= row["num_positive"] <= bounds[1]]
    nearest = sorted(range(len(fitting)), key=lambda index: abs(fitting[index]["num_positive"] - target))[:size]
    chosen = [fitting[index] for index in sorted(nearest)]
    return [{"prompt": row["prompt"], "num_positive": row["num_positive"]} for row in chosen]


def main(args: Args) -> None:
    """Sample, judge, and write the sets."""
    from trl.fingerprint import model_version
    from trl.generation import Sampling, batch_seed, count_cut, load_causal_lm, sample_continuations
    from trl.rewards.classifiers import load_classifier

    texts = read_texts(args.source, args.split, args.max_texts)
    prompts = half_sentences(texts, args.candidates, args.min_words, args.max_words, args.seed)
    if not prompts:
        raise DataFileError(f"{args.source} has no half sentence of {args.min_words} to {args.max_words} words")
    if len(prompts) < args.candidates:
        print(f"{args.source} has only {len(prompts)} fitting half sentences", file=sys.stderr)
    try:
        sampling = Sampling(max_new_tokens=args.max_new_tokens, top_p=args.top_p, num_return=args.num_return)
        classify = load_classifier(args.classifier)
        model, tokenizer = load_causal_lm(args.model)
        count_cut(model, tokenizer, prompts, sampling)
    except ValueError as error:  # settings that contradict each other or the model, or no label that means positive
        sys.exit(f"error: {error}")

    def process(index: int, chunk: list[Row]) -> list[Row]:
        texts = [row["prompt"]["text"] for row in chunk]
        groups = sample_continuations(model, tokenizer, texts, sampling, seed=batch_seed(args.seed, index))
        return [_judged(row, group, classify) for row, group in zip(chunk, groups, strict=True)]

    settings: Row = {"command": "trl.data.prompts", "model": args.model, "classifier": args.classifier}
    settings["versions"] = [model_version(name) for name in (args.model, args.classifier)]
    rows: list[Row] = [{"prompt": {"text": prompt}} for prompt in prompts]
    judged = run_resumable(
        rows,
        args.output_dir / "candidates.jsonl",
        process,
        settings={**settings, **asdict(sampling), "seed": args.seed},
        chunk_size=PROMPTS_PER_BATCH,
    )
    counts: Row = {"candidates": len(judged)}
    sets = {
        "neutral": (args.neutral, sum(args.neutral) / 2, args.neutral_size),
        "negative": (args.negative, 0.0, args.negative_size),
        "positive": (args.positive, float(args.num_return), args.positive_size),
    }
    for name, (bounds, target, size) in sets.items():
        chosen = choose(judged, bounds, target, size)
        replace_file(args.output_dir / f"{name}.jsonl", "".join(dump_line(row) + "\n" for row in chosen))
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
        main(tyro.cli(Args, use_underscores=True, description=__doc__))
    except (BuiltinError, DataFileError, OSError) as error:
        sys.exit(f"error: {error}")
