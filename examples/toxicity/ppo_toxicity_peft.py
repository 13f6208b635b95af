"""Detoxify a chat model with LoRA and self-critique: its own weights, adapters off, quote the toxic words.

    accelerate launch examples/toxicity/ppo_toxicity_peft.py --preset builtin --use_intrinsic_reward

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

from trl.run import (
    CriticKind,
    OutputDir,
    ToxicityArgs,
    parse_args,
    prepare_output_dir,
    run_script,
    start_logging,
)
from trl.trainer.config import PPOConfig

CONFIG = PPOConfig(
    model_name="meta-llama/Llama-2-7b-chat-hf",
    query_dataset="allenai/real-toxicity-prompts",
    reward_model="facebook/roberta-hate-speech-dynabench-r4-target",
    exp_name="ppo_toxicity_peft",
    learning_rate=1.41e-5,
    batch_size=16,
    mini_batch_size=4,
    ppo_epochs=4,
)


@dataclass
class Args(ToxicityArgs):
    """PPO with LoRA and self-critique on toxic prompts."""

    ppo_config: tyro.conf.OmitArgPrefixes[PPOConfig] = field(default_factory=lambda: replace(CONFIG))
    output_dir: OutputDir = "outputs/toxicity_peft"
    lora_r: int = 16
    """Rank of the adapters."""
    lora_alpha: int = 32
    """Scale of the adapters, divided by the rank."""
    lora_dropout: float = 0.0
    """Dropout of the adapters, in the update pass only."""
    lora_target_modules: tuple[str, ...] = ("q_proj", "v_proj")
    """Layers that get an adapter."""
    load_in_8bit: bool = False
    """Load the base model in 8 bits (needs bitsandbytes)."""
    load_in_4bit: bool = False
    """Load the base model in 4 bits (needs bitsandbytes)."""
    merge: bool = False
    """Also save the model with the adapters merged in, to OUTPUT_DIR/merged."""

    @classmethod
    def builtin(cls) -> "Args":
        config = replace(
            CONFIG,
            model_name="builtin:smollm2",
            query_dataset="builtin:toxicity-prompts",
            reward_model="builtin:toxicity",
            learning_rate=5e-5,
            batch_size=16,
            mini_batch_size=16,
        )
        return cls(ppo_config=config, preset="builtin")

    @property
    def default_critic_kind(self) -> CriticKind:
        """Self-critique: the policy's own base weights write the critique, or rate word windows if built in."""
        return "score" if (self.ppo_config.model_name or "").startswith("builtin:") else "local"


def main() -> None:
    args = parse_args(Args)
    config = args.ppo_config
    if args.num_shared_layers is not None:
        raise SystemExit("error: --num_shared_layers is not for LoRA: base and reference share every weight already")

    from datasets import Dataset
    from peft import LoraConfig

    from trl import AutoModelForCausalLMWithValueHead, LengthSampler, PPOTrainer, set_seed
    from trl.builtin import locate_model
    from trl.data.fitting import fit_prompts
    from trl.data.toxicity import load_toxicity_prompts
    from trl.evaluation import HeldOut
    from trl.loop import RunRecord, dry_run, judge, make_intrinsic, quantization, toxicity_environment
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

    # 2. models: LoRA policy with value head (adapters off, it is its own reference), environment reward
    lora = LoraConfig(
        r=args.lora_r,
        lora_alpha=args.lora_alpha,
        lora_dropout=args.lora_dropout,
        target_modules=list(args.lora_target_modules),
        task_type="CAUSAL_LM",
    )
    quantized = quantization(args.load_in_8bit, args.load_in_4bit)
    try:
        model = AutoModelForCausalLMWithValueHead.from_pretrained(
            policy_path, expects_value_head=False, peft_config=lora, **quantized
        )
    except ValueError as error:  # such as target modules that this model does not have
        raise SystemExit(f"error: {error}") from None
    fit = partial(fit_prompts, positions=context_length(model.base_lm), new_tokens=args.output_max_length)
    queries, held_out_queries = fit(queries), fit(held_out_queries)
    trainer = PPOTrainer(config, model, tokenizer=tokenizer, dataset=Dataset.from_list(queries))
    environment = toxicity_environment(args)

    # 3. critic: spans become token rewards
    intrinsic = make_intrinsic(args, "toxicity", trainer, model.base_lm, environment)
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
            pending = intrinsic.submit(batch["input_ids"], responses, scores) if intrinsic else None
            if pending and args.asks_own_weights:
                pending.result()  # critic and policy are one model: the trainer's passes must wait
            rewards = record.merged(scores, pending)
            stats = trainer.step(batch["input_ids"], responses, rewards, scores_are_scaled=True)
            record.step(stats, batch, responses, texts, scores, pending)
    trainer.save_pretrained(folder)
    if args.merge:
        with trainer.whole_models.of(model) as whole:  # all processes take part
            if trainer.accelerator.is_main_process:
                whole.pretrained_model.merge_and_unload().save_pretrained(folder / "merged")
                tokenizer.save_pretrained(folder / "merged")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    run_script(main)
