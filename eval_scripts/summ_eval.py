"""How good are a language model's summaries? ROUGE against the human ones, and the score of a reward model.

    python eval_scripts/summ_eval.py --model_name outputs/summ_rouge --save_path scores.csv \
        --num_samples_to_eval 6000 --reward_model_ckpt_path outputs/reward_model --reward_model_device 0 \
        --output_max_length 50 --batch_size 20 --rw_batch_size 20

Every sample is a row of SAVE_PATH: pred, truth, post, pref_score, rouge1, rouge2, rougeL, rougeLsum (F1 x 100, stemmed;
the summary, the human one, the prompt; a score that there is not is an empty cell). A post that is too long for the
model loses its beginning, which the result counts.
Finished batches are kept in SAVE_PATH.rows.jsonl: interrupted runs continue when the same command is given again.
"""

import csv
import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

import trl

if vars(trl).get("DISTRIBUTION") != "relc":
    sys.exit(f"'trl' from {trl.__path__[0]} is not relc's: pip uninstall trl, then pip install -e . here")

from trl.builtin import BuiltinError
from trl.jsonl import DataFileError, Row, dump_line, replace_file, run_resumable

if TYPE_CHECKING:
    from trl.rewards.rouge import RougeKind

MEASURES: tuple["RougeKind", ...] = ("rouge1", "rouge2", "rougeL", "rougeLsum")
COLUMNS = ("pred", "truth", "post", "pref_score", *MEASURES)

Preference = Callable[..., Sequence[float | None]]


@dataclass
class Args:
    model_name: str
    """Causal language model: hub id, local folder (also one of a LoRA adapter), or builtin: name."""
    save_path: Path
    """The CSV file, written when all samples are scored."""
    dataset: str = "CarperAI/openai_summarize_tldr"
    """Prompts and human summaries: hub id, local file or folder, or builtin:tldr."""
    split: str = "test"
    """Split of the data set; a single local file is train."""
    num_samples_to_eval: int = 6000
    """A longer split is cut to a seeded random sample of this many rows, in its order."""
    output_max_length: int = 50
    """Most new tokens per summary."""
    output_min_length: int = 0
    """Fewest new tokens: the end-of-sequence token is forbidden before that."""
    do_sample: bool = False
    """Sample (temperature 1, nothing cut off) instead of taking the likeliest token."""
    batch_size: int = 20
    """Prompts per batch."""
    reward_model_ckpt_path: str | None = None
    """Reward model: a folder of reward_model_summ.py, or the public 6B layout (needs --reward_model_config)."""
    reward_model_config: str | None = None
    """Model that gives configuration and tokenizer to the public 6B layout (its SFT model)."""
    reward_model_device: str | None = None
    """Device of the reward model: 0 or cuda:0, cpu, ...; default: an accelerator if there is one."""
    rw_batch_size: int = 20
    """Summaries per pass of the reward model."""
    seed: int = 0
    """Seeds the choice of rows, the intervals and, together with the batch's index, its samples."""


def main(args: Args) -> None:
    for name in ("num_samples_to_eval", "output_max_length", "batch_size", "rw_batch_size"):
        if getattr(args, name) < 1:
            sys.exit(f"error: --{name} is {getattr(args, name)}; expected at least 1")
    rows_file = args.save_path.with_name(args.save_path.name + ".rows.jsonl")
    if args.save_path.exists() and not rows_file.exists():
        raise DataFileError(f"{args.save_path} exists and {rows_file.name} does not: choose another --save_path")

    # 1. model and posts
    from trl.data.summarization import answer
    from trl.fingerprint import model_version
    from trl.generation import Sampling, batch_seed, count_cut, load_causal_lm, sample_continuations
    from trl.rewards import RougeReward

    rows = posts(args)
    try:
        lengths = {"max_new_tokens": args.output_max_length, "min_new_tokens": args.output_min_length}
        sampling = Sampling(**lengths, do_sample=args.do_sample)
        model, tokenizer = load_causal_lm(args.model_name)
        cut = count_cut(model, tokenizer, [row["prompt"] for row in rows], sampling)
    except ValueError as error:
        sys.exit(f"error: {error}")

    # 2. summaries and their scores, chunk by chunk
    measures = {name: RougeReward(name) for name in MEASURES}
    preference = load_preference(args)

    def process(index: int, chunk: list[Row]) -> list[Row]:
        prompts, truths = [row["prompt"] for row in chunk], [row["label"] for row in chunk]
        groups = sample_continuations(model, tokenizer, prompts, sampling, seed=batch_seed(args.seed, index))
        preds = [text.strip() for [text] in groups]
        columns: dict[str, Sequence[Any]] = {"pred": preds, "truth": truths, "post": prompts}
        columns["pref_score"] = preference(prompts=prompts, completions=[answer(pred) for pred in preds])
        columns |= {name: rouge(completions=preds, references=truths) for name, rouge in measures.items()}
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    settings = {"script": "summ_eval", "model_name": args.model_name, **asdict(sampling)}
    settings |= {"reward_model_ckpt_path": args.reward_model_ckpt_path, "batch_size": args.batch_size}
    settings |= {"reward_model_config": args.reward_model_config, "seed": args.seed}
    settings |= {"versions": [model_version(n) for n in (args.model_name, args.reward_model_ckpt_path) if n]}
    results = run_resumable(rows, rows_file, process, settings=settings, chunk_size=args.batch_size, unit="post")

    # 3. result
    write_csv(args.save_path, results)
    summary: Row = {"model": args.model_name, "dataset": args.dataset, "split": args.split}
    summary |= {"samples": len(results), "posts_cut": cut, "empty": sum(not row["pred"] for row in results)}
    summary |= {"mean_words": sum(len(row["pred"].split()) for row in results) / len(results)}
    summary |= {name: interval(results, name, args.seed) for name in ("pref_score", *MEASURES)}
    print(dump_line({**summary, "save_path": str(args.save_path)}))


def posts(args: Args) -> list[Row]:
    """Rows with prompt and label: the same for every model, also for one that can't read all of a long post."""
    import numpy as np

    from trl.data.summarization import load_summaries

    rows = load_summaries(args.dataset, split=args.split)
    if not rows:
        raise DataFileError(f"{args.dataset} ({args.split}) has no post to sum up")
    if len(rows) > args.num_samples_to_eval:
        chosen = np.random.default_rng(args.seed).choice(len(rows), args.num_samples_to_eval, replace=False)
        return [rows[index] for index in sorted(chosen)]
    return rows


def load_preference(args: Args) -> Preference:
    """The reward model as a reward function; without one, a function that has no verdicts."""
    if args.reward_model_ckpt_path is None:
        return lambda *, prompts, completions: [None] * len(completions)
    import torch

    from trl.builtin import locate_model
    from trl.rewards import PreferenceReward
    from trl.rlhf import PUBLIC_TEXT
    from trl.summary import locate_device

    device = locate_device(args.reward_model_device)
    try:
        return PreferenceReward(
            locate_model(args.reward_model_ckpt_path),
            batch_size=args.rw_batch_size,
            device=device,
            dtype=torch.float32 if device.type == "cpu" else torch.bfloat16,
            config_name=args.reward_model_config,
            **(PUBLIC_TEXT if args.reward_model_config is not None else {}),
        )
    except ValueError as error:  # weights that don't fit
        sys.exit(f"error: {error}")


def write_csv(path: Path, rows: list[Row]) -> None:
    """All rows or nothing. No score is an empty cell."""
    table = io.StringIO(newline="")
    # with "\n" as the end of a row, a carriage return in a text would not be quoted, and end a row for readers
    writer = csv.DictWriter(table, COLUMNS, lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(rows)
    replace_file(path, table.getvalue())


def interval(rows: list[Row], name: str, seed: int) -> Row | None:
    """Mean of one score with its 95 % bootstrap interval; None where no sample has it."""
    from trl.metrics import bootstrap_interval

    values = [row[name] for row in rows if row[name] is not None]
    return {**bootstrap_interval(values, seed=seed)._asdict(), "samples": len(values)} if values else None


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, use_underscores=True, description=__doc__))
    except (BuiltinError, DataFileError, OSError) as error:
        sys.exit(f"error: {error}")
