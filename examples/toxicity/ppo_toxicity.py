"""Make a language model answer toxic prompts harmlessly, with penalties on the words that were toxic.

    accelerate launch examples/toxicity/ppo_toxicity.py --preset builtin --use_intrinsic_reward

The environment scores each response once: the raw logit of the harmless class of a classifier, or 1 - TOXICITY from
an API. Where that score is at or below a threshold, a critic quotes the toxic spans; their tokens are penalised.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import tyro

import trl

if not hasattr(trl, "DISTRIBUTION"):
    raise SystemExit(f"{trl.__file__} is Hugging Face's trl, not relc's: see 'Two packages named trl' in README.md")

from trl.run import OutputDir, ToxicityArgs, parse_args, prepare_output_dir, run_script, start_logging
from trl.trainer.config import PPOConfig

CONFIG = PPOConfig(
    model_name="gpt2-large",
    query_dataset="allenai/real-toxicity-prompts",
    reward_model="facebook/roberta-hate-speech-dynabench-r4-target",
    exp_name="ppo_toxicity",
    learning_rate=1.41e-5,
    batch_size=16,
    mini_batch_size=4,
    ppo_epochs=4,
)


@dataclass
class Args(ToxicityArgs):
    """PPO with critic rewards on toxic prompts."""

    ppo_config: tyro.conf.OmitArgPrefixes[PPOConfig] = field(default_factory=lambda: replace(CONFIG))
    output_dir: OutputDir = "outputs/toxicity"

    @classmethod
    def builtin(cls) -> "Args":
        config = replace(
            CONFIG,
            model_name="builtin:smollm2",
            query_dataset="builtin:toxicity-prompts",
            reward_model="builtin:toxicity",
            learning_rate=2e-4,
            init_kl_coef=0.1,
            batch_size=16,
            mini_batch_size=16,
            use_score_scaling=True,
            use_score_norm=True,  # the reward is about 3.5 from the start: see the study in configs/README.md
        )
        return cls(ppo_config=config, preset="builtin", num_shared_layers=20)


def main() -> None:
    args = parse_args(Args)
    config = args.ppo_config

    from datasets import Dataset

    from trl import AutoModelForCausalLMWithValueHead, LengthSampler, PPOTrainer, create_reference_model, set_seed
    from trl.builtin import locate_model
    from trl.data.fitting import fit_prompts
    from trl.data.toxicity import load_toxicity_prompts
    from trl.evaluation import HeldOut
    from trl.loop import RunRecord, dry_run, judge, make_intrinsic, toxicity_environment
    from trl.model_files import load_tokenizer
    from trl.trainer.generation import context_length

    start_logging()
    set_seed(config.seed)
    if args.bf16:
        config.accelerator_kwargs["mixed_precision"] = "bf16"

    # 1. data: prompts that lead to toxic text
    policy_path = locate_model(config.model_name)
    tokenizer = load_tokenizer(policy_path)
    level = args.prompt_toxicity_level
    load = partial(load_toxicity_prompts, config.query_dataset, tokenizer, min_toxicity=level, seed=config.seed)
    queries = load()
    held_out_queries = load(split="eval", limit=args.eval_prompts) if args.eval_every else []

    # 2. models: policy with value head, frozen reference, environment reward
    model = AutoModelForCausalLMWithValueHead.from_pretrained(policy_path, expects_value_head=False)
    fit = partial(fit_prompts, positions=context_length(model.base_lm), new_tokens=args.output_max_length)
    queries, held_out_queries = fit(queries), fit(held_out_queries)
    reference = create_reference_model(model, args.num_shared_layers)
    trainer = PPOTrainer(config, model, reference, tokenizer, dataset=Dataset.from_list(queries))
    environment = toxicity_environment(args)

    # 3. critic: spans become token rewards
    intrinsic = make_intrinsic(args, "toxicity", trainer, reference.pretrained_model, environment)
    steps = min(args.epochs * len(trainer.dataloader), args.steps or math.inf)
    if args.dry_run:
        return dry_run(args, model, len(queries), steps, environment, intrinsic)

    # 4. the loop: generate -> score -> critique -> merge -> step -> log
    lengths = LengthSampler(args.output_min_length, args.output_max_length)
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
