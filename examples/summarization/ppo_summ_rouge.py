"""Make a language model's summaries more like those of people, with rewards on the words that are worth it.

    accelerate launch examples/summarization/ppo_summ_rouge.py --preset builtin --model_name outputs/summ_sft \
        --use_intrinsic_reward

The environment scores each summary once: 100 x its ROUGE-1 F1 against the human summary. Where that score is at or
below a threshold, a critic is shown document, summary and score and quotes flaws; their tokens are penalised.
"""

import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import tyro

import trl

if not hasattr(trl, "DISTRIBUTION"):
    raise SystemExit(f"{trl.__file__} is Hugging Face's trl, not relc's: see 'Two packages named trl' in README.md")

from trl.run import OutputDir, parse_args, prepare_output_dir, run_script, start_logging
from trl.summary import SummaryArgs, check_policy, of_documents
from trl.trainer.config import PPOConfig

CONFIG = PPOConfig(
    query_dataset="CarperAI/openai_summarize_tldr",
    exp_name="ppo_summ_rouge",
    learning_rate=1.41e-5,
    batch_size=8,
    mini_batch_size=8,
    ppo_epochs=4,
)


@dataclass
class Args(SummaryArgs):
    """PPO with critic rewards on summaries, from a supervised checkpoint (sft_summ.py)."""

    ppo_config: tyro.conf.OmitArgPrefixes[PPOConfig] = field(default_factory=lambda: replace(CONFIG))
    output_dir: OutputDir = "outputs/summ_rouge"
    rouge: Literal["rouge1", "rouge2", "rougeL", "rougeLsum"] = "rouge1"
    """The environment's measure: common words, pairs of words, or subsequences of the text or of its sentences."""

    @classmethod
    def builtin(cls) -> "Args":
        config = replace(
            CONFIG,
            model_name="builtin:smollm2",
            query_dataset="builtin:tldr",
            learning_rate=1e-4,
            init_kl_coef=0.05,
            batch_size=16,
            mini_batch_size=8,
            use_score_scaling=True,
        )
        # the supervised model shares one word in six with the human summary: at 5 to 1, length alone earns nothing
        values = {"positive_reward_value": 0.5, "negative_reward_value": -0.1}
        return cls(ppo_config=config, preset="builtin", num_shared_layers=20, output_max_length=40, **values)

    @property
    def environment_name(self) -> str:
        return self.rouge


def main() -> None:
    args = parse_args(Args)
    config = args.ppo_config

    from datasets import Dataset

    from trl import AutoModelForCausalLMWithValueHead, LengthSampler, PPOTrainer, create_reference_model, set_seed
    from trl.builtin import locate_model
    from trl.data.fitting import fit_prompts
    from trl.data.summarization import load_summary_prompts
    from trl.evaluation import HeldOut
    from trl.loop import RunRecord, dry_run, judge, make_intrinsic
    from trl.model_files import load_tokenizer
    from trl.rewards import RougeReward
    from trl.trainer.generation import context_length

    start_logging()
    set_seed(config.seed)
    check_policy(config.model_name)
    if args.bf16:
        config.accelerator_kwargs["mixed_precision"] = "bf16"
    config.remove_unused_columns = False  # environment and critic are shown the document

    # 1. data: posts that end in "TL;DR:", and their human summaries
    policy_path = locate_model(config.model_name)
    tokenizer = load_tokenizer(policy_path)
    load = partial(load_summary_prompts, config.query_dataset, tokenizer)
    rows = load()
    held_out_rows = load(split="valid", limit=args.eval_prompts) if args.eval_every else []

    # 2. models: policy with value head, frozen reference, environment reward
    model = AutoModelForCausalLMWithValueHead.from_pretrained(policy_path, expects_value_head=False)
    fit = partial(fit_prompts, positions=context_length(model.base_lm), new_tokens=args.output_max_length)
    rows, held_out_rows = fit(rows), fit(held_out_rows)
    reference = create_reference_model(model, args.num_shared_layers)
    trainer = PPOTrainer(config, model, reference, tokenizer, dataset=Dataset.from_list(rows))
    environment = of_documents(RougeReward(args.rouge), rows + held_out_rows)

    # 3. critic: spans become token rewards
    lm, bounds = reference.pretrained_model, args.critic_score_bounds
    intrinsic = make_intrinsic(args, "summary", trainer, lm, environment, bounds)
    steps = min(args.epochs * len(trainer.dataloader), args.steps or math.inf)
    if args.dry_run:
        sample = (rows[0]["document"], f" {rows[0]['label']}")
        return dry_run(args, model, len(rows), steps, environment, intrinsic, sample)

    # 4. the loop: generate -> score -> critique -> merge -> step -> log
    lengths = LengthSampler(args.output_min_length, args.output_max_length)
    folder = prepare_output_dir(args, trainer.accelerator.is_main_process)

    def score(batch: dict[str, list[Any]], texts: list[str]) -> list[float]:
        return judge(environment, prompts=batch["document"], completions=texts)

    held_out = HeldOut(trainer, held_out_rows, lengths, score, args.eval_every) if args.eval_every else None
    with RunRecord(args, trainer, folder, steps, held_out) as record:
        for batch in record.batches():
            responses = trainer.generate(batch["input_ids"], lengths, return_prompt=False)
            texts = record.decode(batch["input_ids"], responses)
            scores = score(batch, texts)
            # spans are quoted while the trainer's own passes run, and merged when these are done
            pending = intrinsic.submit(batch["input_ids"], responses, scores, batch["document"]) if intrinsic else None
            rewards = record.merged(scores, pending)
            stats = trainer.step(batch["input_ids"], responses, rewards, scores_are_scaled=True)
            record.step(stats, batch, responses, texts, scores, pending)
    trainer.save_pretrained(folder)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    run_script(main)
