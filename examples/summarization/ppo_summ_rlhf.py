"""Classic RLHF on summaries with four models: policy, frozen reference, reward model, value network; critic optional.

    accelerate launch examples/summarization/ppo_summ_rlhf.py --preset builtin --model_name outputs/sft \
      --reward_model_ckpt_path outputs/reward_model --value_model_path outputs/reward_model

The environment is a reward model trained on human preferences (reward_model_summ.py). With --use_intrinsic_reward, a
critic quotes flaws of the summaries whose score is at or below a threshold; their tokens are penalised.
"""

import logging
import math
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import tyro

import trl

if not hasattr(trl, "DISTRIBUTION"):
    raise SystemExit(f"{trl.__file__} is Hugging Face's trl, not relc's: see 'Two packages named trl' in README.md")

from trl.run import OutputDir, parse_args, prepare_output_dir, run_script, start_logging
from trl.summary import RLHFArgs, check_policy, of_documents
from trl.trainer.config import PPOConfig

CONFIG = PPOConfig(
    query_dataset="CarperAI/openai_summarize_tldr",
    exp_name="ppo_summ_rlhf",
    learning_rate=1.41e-5,
    batch_size=8,
    mini_batch_size=8,
    ppo_epochs=4,
    use_score_scaling=True,
    use_score_norm=True,
)


@dataclass
class Args(RLHFArgs):
    """Four-model PPO with a preference reward, and critic rewards if wanted, on summaries."""

    ppo_config: tyro.conf.OmitArgPrefixes[PPOConfig] = field(default_factory=lambda: replace(CONFIG))
    output_dir: OutputDir = "outputs/summ_rlhf"

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
        )
        return cls(ppo_config=config, preset="builtin", num_shared_layers=20, output_max_length=40)


def main() -> None:
    args = parse_args(Args)
    config = args.ppo_config
    if args.reward_model_ckpt_path is None:
        raise SystemExit("error: --reward_model_ckpt_path is needed; reward_model_summ.py trains one")
    if config.score_clip is None:
        config.score_clip = args.reward_clip

    from datasets import Dataset

    from trl import AutoModelForCausalLMWithValueHead, LengthSampler, PPOTrainer, create_reference_model, set_seed
    from trl.builtin import locate_model
    from trl.data.fitting import fit_prompts
    from trl.data.summarization import load_summary_prompts
    from trl.evaluation import HeldOut
    from trl.loop import RunRecord, dry_run, judge, make_intrinsic
    from trl.model_files import load_tokenizer
    from trl.plan import memory_table
    from trl.rlhf import adapter, preference_environment, pretraining_mix, value_network
    from trl.trainer.generation import context_length

    start_logging()
    set_seed(config.seed)
    check_policy(config.model_name)
    if args.bf16:
        config.accelerator_kwargs["mixed_precision"] = "bf16"
    config.remove_unused_columns = False  # environment and critic are shown the document

    # 1. data: posts that end in "TL;DR:"
    policy_path = locate_model(config.model_name)
    tokenizer = load_tokenizer(policy_path)
    load = partial(load_summary_prompts, config.query_dataset, tokenizer)
    rows = load()
    held_out_rows = load(split="valid", limit=args.eval_prompts) if args.eval_every else []

    # 2. models: policy, frozen reference, reward model, value network
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        policy_path, expects_value_head=False, peft_config=adapter(args)
    )
    fit = partial(fit_prompts, positions=context_length(model.base_lm), new_tokens=args.output_max_length)
    rows, held_out_rows = fit(rows), fit(held_out_rows)
    reference = None if model.is_peft else create_reference_model(model, args.num_shared_layers)
    value_model, value_optimizer = value_network(args)
    trainer = PPOTrainer(
        config,
        model,
        reference,
        tokenizer,
        dataset=Dataset.from_list(rows),
        value_model=value_model,
        value_optimizer=value_optimizer,
        pretraining=pretraining_mix(args, tokenizer),
    )
    preference, reward_model = preference_environment(args, trainer.accelerator)
    environment = of_documents(preference, rows + held_out_rows)

    # 3. critic: spans become token rewards
    lm, bounds = model.base_lm if reference is None else reference.pretrained_model, args.critic_score_bounds
    intrinsic = make_intrinsic(args, "summary", trainer, lm, environment, bounds)
    steps = min(args.epochs * len(trainer.dataloader), args.steps or math.inf)
    named = {"policy": model, "reference": reference, "reward model": reward_model, "value model": value_model}
    logging.getLogger(__name__).info("memory plan\n%s", memory_table({k: m for k, m in named.items() if m is not None}))
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
            parts = {name: trainer.global_mean(values) for name, values in preference.parts.items()}
            # spans are quoted while the trainer's own passes run, and merged when these are done
            pending = intrinsic.submit(batch["input_ids"], responses, scores, batch["document"]) if intrinsic else None
            if pending and args.asks_own_weights and model.is_peft:
                pending.result()  # critic and policy are one model: the trainer's passes must wait
            rewards = record.merged(scores, pending)
            stats = trainer.step(batch["input_ids"], responses, rewards, scores_are_scaled=True)
            record.step(stats | parts, batch, responses, texts, scores, pending)
    trainer.save_pretrained(folder)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    run_script(main)
