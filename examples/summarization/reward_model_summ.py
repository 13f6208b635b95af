"""Train a reward model on pairs of summaries, of which people prefer one.

    accelerate launch examples/summarization/reward_model_summ.py --preset builtin --output_dir outputs/summ_reward

The output folder holds the model for --reward_model_ckpt_path of ppo_summ_rlhf.py. The last line printed is JSON: its
pairwise accuracy on held-out pairs with a 95 % interval, mean margin and calibration error.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

import trl

if not hasattr(trl, "DISTRIBUTION"):
    raise SystemExit(f"{trl.__file__} is Hugging Face's trl, not relc's: see 'Two packages named trl' in README.md")

from trl.run import OutputDir, parse_args, prepare_output_dir, run_script, start_logging
from trl.trainer.reward_config import RewardConfig


@dataclass
class Args(RewardConfig):
    """A reward model from pairs of summaries."""

    preset: Literal["builtin"] | None = None
    """builtin: offline model, data and sizes for everything not given; a builtin: model implies it."""
    model_name: str = "gpt2-medium"
    """Causal language model to start from, best a supervised checkpoint (sft_summ.py)."""
    dataset: Annotated[str, tyro.conf.arg(aliases=("--query_dataset",))] = "CarperAI/openai_summarize_comparisons"
    """Pairs with prompt, chosen and rejected: a data set, a JSONL file, a folder of them, or a builtin: name."""
    limit: int | None = None
    """Take the first this many pairs of the train split; default all."""
    eval_split: str = "valid1"
    """Split of the held-out pairs; of a single file, the last --eval_pairs rows are held out."""
    eval_pairs: int = 512
    """Held-out pairs."""
    output_dir: OutputDir = "outputs/summ_reward"
    overwrite: bool = False
    """Replace an earlier run in output_dir."""
    dry_run: bool = False
    """Check model, data and settings, print the plan, train nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_pairs < 1:
            raise ValueError(f"--eval_pairs must be at least 1, got {self.eval_pairs}")

    @classmethod
    def builtin(cls) -> "Args":
        return cls(
            preset="builtin",
            model_name="builtin:smollm2",
            dataset="builtin:tldr-pairs",
            eval_split="valid",
            limit=1400,
            eval_pairs=256,
            learning_rate=1e-4,
            bf16=True,
            num_frozen_layers=20,
        )


def load_pairs(args: Args) -> tuple[list[dict[str, str]], list[dict[str, str]]]:
    """Training and held-out pairs; of a single file, whole prompts at its end are held out."""
    from pathlib import Path

    from trl.data.summarization import load_preference_pairs

    pairs = load_preference_pairs(args.dataset, limit=args.limit)
    if not Path(args.dataset).is_file():
        return pairs, load_preference_pairs(args.dataset, split=args.eval_split, limit=args.eval_pairs)
    held_out = pairs[-args.eval_pairs :]
    prompts = {pair["prompt"] for pair in held_out}
    kept = [pair for pair in pairs[: -args.eval_pairs] if pair["prompt"] not in prompts]
    if not kept:
        raise SystemExit(
            f"error: {args.dataset} has {len(pairs)} pairs, of which --eval_pairs {args.eval_pairs} and those with the "
            "same prompts are held out; nothing is left to train on"
        )
    return kept, held_out


def main() -> None:
    args = parse_args(Args)

    from trl.builtin import locate_model
    from trl.core import set_seed
    from trl.jsonl import dump_line
    from trl.model_files import load_tokenizer
    from trl.models import RewardModel
    from trl.trainer.reward import RewardTrainer
    from trl.trainer.zero import num_weights

    start_logging()
    set_seed(args.seed)

    # 1. data: two summaries of each post, and which one is better
    path = locate_model(args.model_name)
    tokenizer = load_tokenizer(path)
    pairs, held_out = load_pairs(args)

    # 2. model with a new scalar head, and trainer
    model = RewardModel.from_pretrained(path)
    try:
        trainer = RewardTrainer(args, model, tokenizer, pairs, held_out)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    is_main = trainer.accelerator.is_main_process
    if args.dry_run:
        if is_main:
            trained = num_weights(p for p in model.parameters() if p.requires_grad)
            total = num_weights(model.parameters())
            print(f"model       {args.model_name}: {trained:,} of {total:,} parameters are trained")
            print(f"pairs       {len(trainer.rows):,} from {args.dataset}, {len(trainer.eval_rows):,} held out")
            print(f"steps       {len(trainer.batches):,} of up to {args.batch_size} pairs per process")
            print(f"run folder  {args.output_dir}")
        return
    prepare_output_dir(args, is_main)

    # 3. the loop, checkpoints and the final model
    metrics = trainer.train()
    if is_main:
        low, high = metrics["eval/accuracy_low"], metrics["eval/accuracy_high"]
        print(f"held-out pairwise accuracy {metrics['eval/accuracy']:.3f} (95 % interval {low:.3f} to {high:.3f})")
        final = {name: value for name, value in metrics.items() if name.startswith("eval/")}
        print(dump_line({"steps": trainer.done, **final, "output_dir": str(trainer.folder)}))


if __name__ == "__main__":
    run_script(main)
