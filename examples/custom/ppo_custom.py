"""Train a language model on your own prompts with your own reward, and if you like with a critic's token rewards.

    accelerate launch examples/custom/ppo_custom.py --data train.jsonl --reward reward.json --model_name MODEL
    accelerate launch examples/custom/ppo_custom.py --preset builtin --bf16

The environment scores each response once: a reward configuration (string match, judge, code, service), or a function
of a Python file. Where that score is at or below a threshold, a critic with your own prompt file quotes spans.
"""

import math
from dataclasses import dataclass, field, replace

import tyro

import trl

if not hasattr(trl, "DISTRIBUTION"):
    raise SystemExit(f"{trl.__file__} is Hugging Face's trl, not relc's: see 'Two packages named trl' in README.md")

from trl.custom import PROMPTS, QUESTIONS, CustomArgs, CustomConfig
from trl.run import OutputDir, parse_args, prepare_output_dir, run_script, start_logging

CONFIG = CustomConfig(
    exp_name="ppo_custom",
    learning_rate=1.41e-5,
    batch_size=16,
    mini_batch_size=16,
    ppo_epochs=4,
)


@dataclass
class Args(CustomArgs):
    """PPO on your own prompts with your own reward."""

    ppo_config: tyro.conf.OmitArgPrefixes[CustomConfig] = field(default_factory=lambda: replace(CONFIG))
    output_dir: OutputDir = "outputs/custom"

    @classmethod
    def builtin(cls) -> "Args":
        config = replace(
            CONFIG,
            model_name="builtin:smollm2",
            learning_rate=1e-4,
            batch_size=32,
            ppo_epochs=2,
            init_kl_coef=0.05,
        )
        return cls(
            ppo_config=config, preset="builtin", num_shared_layers=20, epochs=2, eval_prompts=96, max_new_tokens=8
        )


def main() -> None:
    args = parse_args(Args)
    config = args.ppo_config
    if args.preset == "builtin" and config.query_dataset is None and config.reward_model is None:
        config.query_dataset, config.reward_model = QUESTIONS
    for flag, value in (("data", config.query_dataset), ("reward", config.reward_model)):
        if value is None:
            raise SystemExit(f"error: --{flag} is needed (see --help); without both, --preset builtin has its own")
    if config.model_name is None:
        raise SystemExit("error: --model_name is needed: a hub id, a local folder, or builtin:smollm2")
    args.check_files()

    from trl import AutoModelForCausalLMWithValueHead, LengthSampler, PPOTrainer, create_reference_model, set_seed
    from trl.builtin import locate_model
    from trl.custom import TaskReward, batches_of, load_task_reward
    from trl.data.task_prompts import encode_rows, train_and_eval_rows, uses_chat_template
    from trl.evaluation import HeldOut
    from trl.loop import RunRecord, dry_run, make_intrinsic
    from trl.model_files import load_tokenizer
    from trl.trainer.generation import context_length

    start_logging()
    set_seed(config.seed)
    if args.bf16:
        config.accelerator_kwargs["mixed_precision"] = "bf16"

    # 1. data: the user's prompts, and a reward that finds in them what it needs
    held_out_count = args.eval_prompts if args.eval_every else 0
    rows, held_out_rows = train_and_eval_rows(config.query_dataset, args.eval_data, args.eval_fraction, held_out_count)
    reward = load_task_reward(args, [*rows, *held_out_rows])

    # 2. models: policy with value head, frozen reference, environment reward
    policy_path = locate_model(config.model_name)
    tokenizer = load_tokenizer(policy_path)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(policy_path, expects_value_head=False)
    reference = create_reference_model(model, args.num_shared_layers)
    trainer = PPOTrainer(config, model, reference, tokenizer)
    chat = uses_chat_template(args.chat_template, tokenizer)
    longest = args.longest_prompt(context_length(model.base_lm))
    queries = encode_rows(rows, tokenizer, chat=chat, longest=longest)
    held_out_queries = encode_rows(held_out_rows, tokenizer, chat=chat, longest=longest)
    trainer.dataloader = batches_of(queries, trainer, args.samples_per_prompt)
    environment = TaskReward(reward, [*queries, *held_out_queries], tokenizer, chat)

    # 3. critic: spans become token rewards
    args.prompt_file = args.prompt_file or PROMPTS[args.critic_style]
    bounds = args.critic_score_bounds if args.critic_style == "summary" else None
    intrinsic = make_intrinsic(args, args.critic_style, trainer, reference.pretrained_model, environment, bounds)
    steps = min(args.epochs * len(trainer.dataloader), args.steps or math.inf)
    if args.dry_run:
        return dry_run(args, model, len(queries), steps, environment, intrinsic, (queries[0]["query"], "Yes."))

    # 4. the loop: generate -> score -> critique -> merge -> step -> log
    lengths = LengthSampler(*args.lengths)
    folder = prepare_output_dir(args, trainer.accelerator.is_main_process)
    held_out = (
        HeldOut(trainer, held_out_queries, lengths, environment.score, args.eval_every) if args.eval_every else None
    )
    with RunRecord(args, trainer, folder, steps, held_out) as record:
        for batch in record.batches():
            responses = trainer.generate(batch["input_ids"], lengths, return_prompt=False)
            texts = record.decode(batch["input_ids"], responses)
            # scored, and then critiqued, while the trainer's own passes run; merged when these are done
            scores = environment.submit(batch, texts, responses, trainer.current_step + 1)
            pending = None
            if intrinsic:
                pending = intrinsic.submit(batch["critic_ids"], responses, scores.result, batch["query"])
            rewards = record.merged(scores.result, pending)
            stats = trainer.step(batch["input_ids"], responses, rewards, scores_are_scaled=True)
            parts = {name: trainer.global_mean(values) for name, values in scores.columns.items()}
            record.step(stats | parts, batch, responses, texts, scores.result(), pending)
    reward.close()
    trainer.save_pretrained(folder)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    run_script(main)
