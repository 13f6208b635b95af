"""Make a language model continue film reviews positively, with rewards on the words that earned them.

    accelerate launch examples/sentiment/ppo_sentiment.py --preset builtin --use_intrinsic_reward

The environment scores each response once (raw logit of "positive" from a sentiment classifier). Where that
score is at or below a threshold, a critic quotes the good and bad spans; their tokens get rewards of their own.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import tyro

import trl

if not hasattr(trl, "DISTRIBUTION"):
    raise SystemExit(f"{trl.__file__} is Hugging Face's trl, not relc's: see 'Two packages named trl' in README.md")

from trl.run import OutputDir, RunArgs, parse_args, prepare_output_dir, run_script, start_logging
from trl.trainer.config import PPOConfig

CONFIG = PPOConfig(
    model_name="lvwerra/gpt2-imdb",
    query_dataset="imdb",
    reward_model="sentiment-analysis:lvwerra/distilbert-imdb",
    exp_name="ppo_sentiment",
    learning_rate=1.41e-5,
    batch_size=128,
    mini_batch_size=128,
    target_kl=6.0,
    kl_penalty="kl",
)


@dataclass
class Args(RunArgs):
    """PPO with critic rewards on film reviews."""

    ppo_config: tyro.conf.OmitArgPrefixes[PPOConfig] = field(default_factory=lambda: replace(CONFIG))
    prompt_file: str = "prompts/prompt_sentiment_3shot_v2.txt"
    """Few-shot prompt of the critic (openai, local)."""
    intrinsic_reward_threshold: float = 10.0
    """The critic is asked where the environment's raw score is at or below this."""
    output_dir: OutputDir = "outputs/sentiment"
    min_new_tokens: int = 10
    """Shortest response, unless the model ends earlier."""
    max_new_tokens: int = 20
    """Longest response."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.min_new_tokens <= self.max_new_tokens:
            raise ValueError(f"expected 1 <= min <= max new tokens, got {self.min_new_tokens}, {self.max_new_tokens}")

    @classmethod
    def builtin(cls) -> "Args":
        config = replace(
            CONFIG,
            model_name="builtin:smollm2",
            query_dataset="builtin:imdb",
            reward_model="builtin:sentiment",
            learning_rate=1e-4,
            init_kl_coef=0.1,
            batch_size=16,
            mini_batch_size=16,
        )
        return cls(ppo_config=config, preset="builtin", num_shared_layers=20, min_new_tokens=15)


def main() -> None:
    args = parse_args(Args)
    config = args.ppo_config

    from datasets import Dataset

    from trl import AutoModelForCausalLMWithValueHead, LengthSampler, PPOTrainer, create_reference_model, set_seed
    from trl.builtin import locate_model
    from trl.data.fitting import fit_prompts
    from trl.data.sentiment import load_sentiment_prompts
    from trl.evaluation import HeldOut
    from trl.loop import RunRecord, dry_run, judge, make_intrinsic
    from trl.model_files import load_tokenizer
    from trl.rewards import SentimentReward
    from trl.trainer.generation import context_length

    start_logging()
    set_seed(config.seed)
    if args.bf16:
        config.accelerator_kwargs["mixed_precision"] = "bf16"

    # 1. data: the first few tokens of each review
    policy_path = locate_model(config.model_name)
    tokenizer = load_tokenizer(policy_path)
    load = partial(load_sentiment_prompts, config.query_dataset, tokenizer, seed=config.seed)
    queries = load()
    held_out_queries = load(split="test", limit=args.eval_prompts) if args.eval_every else []

    # 2. models: policy with value head, frozen reference, environment reward
    model = AutoModelForCausalLMWithValueHead.from_pretrained(policy_path, expects_value_head=False)
    fit = partial(fit_prompts, positions=context_length(model.base_lm), new_tokens=args.max_new_tokens)
    queries, held_out_queries = fit(queries), fit(held_out_queries)
    reference = create_reference_model(model, args.num_shared_layers)
    trainer = PPOTrainer(config, model, reference, tokenizer, dataset=Dataset.from_list(queries))
    environment = SentimentReward(config.reward_model.removeprefix("sentiment-analysis:"))

    # 3. critic: spans become token rewards
    intrinsic = make_intrinsic(args, "sentiment", trainer, reference.pretrained_model, environment)
    steps = min(args.epochs * len(trainer.dataloader), args.steps or math.inf)
    if args.dry_run:
        return dry_run(args, model, len(queries), steps, environment, intrinsic)

    # 4. the loop: generate -> score -> critique -> merge -> step -> log
    lengths = LengthSampler(args.min_new_tokens, args.max_new_tokens)
    folder = prepare_output_dir(args, trainer.accelerator.is_main_process)

    def score(batch: dict[str, list[Any]], texts: list[str]) -> list[float]:
        return judge(environment, prompts=batch["query"], completions=texts)

    held_out = HeldOut(trainer, held_out_queries, lengths, score, args.eval_every) if args.eval_every else None
    with RunRecord(args, trainer, folder, steps, held_out) as record:
        for batch in record.batches():
            responses = trainer.generate(batch["input_ids"], lengths, return_prompt=False)
            texts = record.decode(batch["input_ids"], responses)
            scores = score(batch, texts)
            # spans are quoted while the trainer's own passes run, and merged when these are done
            pending = intrinsic.submit(batch["input_ids"], responses, scores) if intrinsic else None
            rewards = record.merged(scores, pending)
            stats = trainer.step(batch["input_ids"], responses, rewards, scores_are_scaled=True)
            record.step(stats, batch, responses, texts, scores, pending)
    trainer.save_pretrained(folder)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    run_script(main)
