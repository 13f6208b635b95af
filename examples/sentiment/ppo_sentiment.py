"""Make a language model continue film reviews positively, with rewards on the words that earned them.

    accelerate launch examples/sentiment/ppo_sentiment.py --preset builtin --use_intrinsic_reward

The environment scores each response once (raw logit of "positive" from a sentiment classifier). Where that
score is at or below a threshold, a critic quotes the good and bad spans; their tokens get rewards of their own.
"""

import itertools
import math
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import tyro

import trl

if not hasattr(trl, "DISTRIBUTION"):
    raise SystemExit(f"{trl.__file__} is Hugging Face's trl, not relc's: see 'Two packages named trl' in README.md")

from trl.run import (
    OutputDir,
    RunArgs,
    RunRecord,
    critic_of,
    dry_run,
    parse_args,
    prepare_output_dir,
    sample_rows,
    save_and_stop,
    start_logging,
    with_token_rewards,
)
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

SAMPLES_KEPT = 16
"""Responses per step that samples.jsonl shows token by token."""


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

    @classmethod
    def builtin(cls) -> "Args":
        config = replace(
            CONFIG,
            model_name="builtin:smollm2",
            query_dataset="builtin:imdb",
            reward_model="builtin:sentiment",
            learning_rate=5e-5,
            batch_size=16,
            mini_batch_size=16,
        )
        return cls(ppo_config=config, preset="builtin", num_shared_layers=20, min_new_tokens=15)


def main() -> None:
    args = parse_args(Args)
    config = args.ppo_config

    from datasets import Dataset
    from transformers import AutoTokenizer

    from trl import AutoModelForCausalLMWithValueHead, LengthSampler, PPOTrainer, create_reference_model, set_seed
    from trl.builtin import resolve_model
    from trl.critic import CriticGoneError, IntrinsicReward, span_rewards
    from trl.data.sentiment import load_sentiment_prompts
    from trl.generation import added_text
    from trl.rewards import SentimentReward

    start_logging()
    set_seed(config.seed)
    if args.bf16:
        config.accelerator_kwargs["mixed_precision"] = "bf16"

    # 1. data: the first few tokens of each review
    policy_path = resolve_model(config.model_name)
    tokenizer = AutoTokenizer.from_pretrained(policy_path)
    queries = load_sentiment_prompts(config.query_dataset, tokenizer, seed=config.seed)

    # 2. models: policy with value head, frozen reference, environment reward
    model = AutoModelForCausalLMWithValueHead.from_pretrained(policy_path)
    reference = create_reference_model(model, args.num_shared_layers)
    trainer = PPOTrainer(config, model, reference, tokenizer, dataset=Dataset.from_list(queries))
    environment = SentimentReward(config.reward_model.removeprefix("sentiment-analysis:"))

    # 3. critic: spans become token rewards
    critic = intrinsic = None
    if args.use_intrinsic_reward:
        half_precision = trainer.accelerator.mixed_precision == "bf16"
        critic = critic_of(args, "sentiment", reference.pretrained_model, tokenizer, half_precision)
        intrinsic = IntrinsicReward(
            critic,
            tokenizer,
            "sentiment",
            threshold=args.intrinsic_reward_threshold,
            positive_value=args.positive_reward_value,
            negative_value=args.negative_reward_value,
            mode=args.reward_mode,
            log_path=Path(args.output_dir) / "critiques.jsonl",
        )
    steps = min(args.epochs * len(trainer.dataloader), args.steps or math.inf)
    if args.dry_run:
        sizes = [[p.numel() for p in model.parameters() if p.requires_grad or every] for every in (False, True)]
        return dry_run(args, len(queries), steps, (sum(sizes[0]), sum(sizes[1])), critic)

    # 4. the loop: generate -> score -> critique -> merge -> step -> log
    lengths = LengthSampler(args.min_new_tokens, args.max_new_tokens)
    is_main = trainer.accelerator.is_main_process
    folder = prepare_output_dir(args, is_main)
    batches = itertools.chain.from_iterable(itertools.repeat(trainer.dataloader, args.epochs))
    with RunRecord(folder, steps, is_main) as record:
        for step, batch in enumerate(itertools.islice(batches, steps), start=1):
            started = time.perf_counter()
            responses = trainer.generate(batch["input_ids"], lengths, return_prompt=False)
            generated = time.perf_counter()
            pairs = list(zip(batch["input_ids"], responses, strict=True))
            texts = [added_text(tokenizer, query.tolist(), response.tolist()) for query, response in pairs]
            verdicts = environment(prompts=batch["query"], completions=texts)
            scores = [math.nan if verdict is None else verdict for verdict in verdicts]
            env = trainer.score_scaler.numbers(scores)
            # spans are quoted while the trainer's own passes run, and merged when these are done
            pending = intrinsic.submit(batch["input_ids"], responses, scores) if intrinsic else None
            merged = with_token_rewards(env, pending, trainer.global_mean)
            try:
                stats = trainer.step(batch["input_ids"], responses, merged, scores_are_scaled=True)
            except CriticGoneError as error:
                save_and_stop(trainer, folder / f"step-{step - 1}", error)

            token_rewards = pending.result() if pending else []
            stats |= {
                "objective/score": trainer.global_mean(scores),
                "objective/intrinsic": trainer.global_mean([float(r.sum()) for r in token_rewards] or [0.0]),
                "time/generate": generated - started,
                "time/iteration": time.perf_counter() - started,
            }
            stats |= pending.stats if pending else {}
            trainer.log_stats(stats, batch, scores)
            tokens = [
                span_rewards([], query, response, tokenizer, positive_value=0, negative_value=0).token_texts
                for query, response in pairs[:SAMPLES_KEPT]
            ]
            critiques = pending.critiques if pending else []
            rows = sample_rows(batch["query"], texts, scores, tokens, trainer.last_rollout, token_rewards, critiques)
            record.step(step, stats, rows)
            if args.save_freq and step % args.save_freq == 0 and step < steps:
                trainer.save_pretrained(folder / f"step-{step}")
    trainer.save_pretrained(folder)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
