"""Teach a language model to summarise as people do: the supervised start of the summarization PPO scripts.

    accelerate launch examples/summarization/sft_summ.py --preset builtin --output_dir outputs/summ_sft

It learns the human summaries' tokens, given posts that end in "TL;DR:". The output folder is an ordinary transformers
model, for --model_name of ppo_summ_rouge.py, ppo_summ_rlhf.py and reward_model_summ.py. The last line printed holds
loss, perplexity and ROUGE-1 on held-out posts, as JSON.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

import trl

if not hasattr(trl, "DISTRIBUTION"):
    raise SystemExit(f"{trl.__file__} is Hugging Face's trl, not relc's: see 'Two packages named trl' in README.md")

from trl.run import OutputDir, parse_args, prepare_output_dir, run_script, start_logging
from trl.trainer.sft_config import SFTConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from trl.trainer.sft import SFTTrainer

SAMPLED_TOGETHER = 16


@dataclass
class Args(SFTConfig):
    """Supervised fine-tuning on summaries."""

    preset: Literal["builtin"] | None = None
    """builtin: offline model, data and sizes for everything not given; a builtin: model implies it."""
    model_name: str = "gpt2-medium"
    """Causal language model to start from."""
    dataset: Annotated[str, tyro.conf.arg(aliases=("--query_dataset",))] = "CarperAI/openai_summarize_tldr"
    """Posts with prompt and label: a data set, a JSONL file, a folder of them, or a builtin: name."""
    limit: int | None = 20_000
    """Take the first this many rows of the train split; None takes all."""
    eval_split: str = "valid"
    """Split of the held-out posts; of a single file, the last --eval_rows rows are held out."""
    eval_rows: int = 128
    """Held-out posts for loss and perplexity."""
    eval_summaries: int = 64
    """The first so many of them are summarised at the end, for ROUGE-1; 0: none."""
    max_new_tokens: int = 50
    """Longest summary then, in tokens."""
    output_dir: OutputDir = "outputs/summ_sft"
    overwrite: bool = False
    """Replace an earlier run in output_dir."""
    dry_run: bool = False
    """Check model, data and settings, print the plan, train nothing."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, least in {"eval_rows": 1, "eval_summaries": 0, "max_new_tokens": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"--{name} must be at least {least}, got {getattr(self, name)}")
        if self.eval_summaries > self.eval_rows:
            raise ValueError(f"--eval_summaries {self.eval_summaries} are more than --eval_rows {self.eval_rows}")

    @classmethod
    def builtin(cls) -> "Args":
        return cls(
            preset="builtin",
            model_name="builtin:smollm2",
            dataset="builtin:tldr",
            steps=64,
            learning_rate=1e-4,
            num_frozen_layers=20,
        )


def load_posts(args: Args, tokenizer: "PreTrainedTokenizerBase") -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out posts; of a single file, those at its end are held out."""
    from trl.data.summarization import load_summary_prompts

    posts = load_summary_prompts(args.dataset, tokenizer, limit=args.limit)
    if not Path(args.dataset).is_file():
        return posts, load_summary_prompts(args.dataset, tokenizer, split=args.eval_split, limit=args.eval_rows)
    held_out = posts[-args.eval_rows :]
    queries = {post["query"] for post in held_out}
    kept = [post for post in posts[: -args.eval_rows] if post["query"] not in queries]
    if not kept:
        raise SystemExit(
            f"error: {args.dataset} has {len(posts)} posts, of which --eval_rows {args.eval_rows} and those with the "
            "same prompts are held out; nothing is left to train on"
        )
    return kept, held_out


def rouge_of_summaries(
    args: Args, trainer: "SFTTrainer", lm: "PreTrainedModel", rows: list[dict[str, Any]]
) -> dict[str, float]:
    """Mean ROUGE-1 F1 x 100 of the model's most likely and of sampled summaries, which go to summaries.jsonl."""
    from trl.generation import Sampling, batch_seed, sample_continuations
    from trl.jsonl import dump_line
    from trl.rewards import RougeReward

    references = [row["label"] for row in rows]
    summaries: dict[str, list[str]] = {}
    lm.eval()
    for name, do_sample in (("greedy", False), ("sampled", True)):
        sampling = Sampling(max_new_tokens=args.max_new_tokens, do_sample=do_sample)
        summaries[name] = []
        for start in range(0, len(rows), SAMPLED_TOGETHER):
            prompts = [row["query"] for row in rows[start : start + SAMPLED_TOGETHER]]
            seed = batch_seed(args.seed, start)
            with trainer.accelerator.autocast():
                texts = sample_continuations(lm, trainer.tokenizer, prompts, sampling, seed=seed)
            summaries[name] += [text for [text] in texts]
    columns = {"query": [row["query"] for row in rows], "label": references, **summaries}
    lines = [
        dump_line(dict(zip(columns, values, strict=True))) + "\n" for values in zip(*columns.values(), strict=True)
    ]
    (trainer.folder / "summaries.jsonl").write_text("".join(lines), encoding="utf-8")
    scores = {
        name: RougeReward("rouge1")(completions=texts, references=references) for name, texts in summaries.items()
    }
    verdicts = {name: [score for score in each if score is not None] for name, each in scores.items()}
    return {f"rouge1_{name}": sum(each) / max(len(each), 1) for name, each in verdicts.items()}


def main() -> None:
    args = parse_args(Args)

    from trl.builtin import locate_model
    from trl.core import set_seed
    from trl.data.summarization import answer
    from trl.jsonl import dump_line
    from trl.model_files import load_language_model, load_tokenizer
    from trl.trainer.sft import SFTTrainer
    from trl.trainer.zero import num_weights

    start_logging()
    set_seed(args.seed)

    # 1. data: posts that end in "TL;DR:", and their human summaries
    path = locate_model(args.model_name)
    tokenizer = load_tokenizer(path)
    posts, held_out = load_posts(args, tokenizer)
    rows, eval_rows = (
        [{"prompt": post["query"], "answer": answer(post["label"])} for post in part] for part in (posts, held_out)
    )

    # 2. model and trainer
    model = load_language_model(path, dtype="float32")  # bf16 weights would round updates away
    trainer = SFTTrainer(args, model, tokenizer, rows, eval_rows)
    is_main = trainer.accelerator.is_main_process
    if args.dry_run:
        if is_main:
            trained = num_weights(p for p in model.parameters() if p.requires_grad)
            total = num_weights(model.parameters())
            print(f"model       {args.model_name}: {trained:,} of {total:,} parameters are trained")
            print(f"posts       {len(trainer.rows):,} from {args.dataset}, {len(trainer.eval_examples):,} held out")
            print(f"steps       {len(trainer.batches):,} of up to {args.batch_size} posts per process")
            print(f"run folder  {args.output_dir}")
        return
    prepare_output_dir(args, is_main)

    # 3. the loop, checkpoints and the final model
    metrics = trainer.train()
    if args.eval_summaries:
        with trainer.whole_models.of(trainer.unwrapped) as whole:  # all processes take part
            if is_main:
                metrics |= rouge_of_summaries(args, trainer, whole.lm, held_out[: args.eval_summaries])
    if is_main:
        names = ("eval/loss", "eval/perplexity", "eval/token_accuracy", "rouge1_greedy", "rouge1_sampled")
        final = {name: metrics[name] for name in names if name in metrics}
        print(dump_line({"steps": trainer.done, **final, "output_dir": str(trainer.folder)}))


if __name__ == "__main__":
    run_script(main)
