"""Summarization in one command, from a pretrained model to one that people's summaries, or a reward model, approve of.

    python examples/demo_summarization.py [--reward preference]   (or: make demo-summarization, make demo-rlhf)

rouge: supervised start, then PPO on ROUGE without and with critic rewards. preference: supervised start, a reward model
trained on pairs, then PPO with four models (policy, reference, reward model, value network). Every model is evaluated
on held-out articles; results are in OUTPUT_DIR: the models, evaluation.json, curves.png and report.html.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

import trl

if not hasattr(trl, "DISTRIBUTION"):
    raise SystemExit(f"{trl.__file__} is Hugging Face's trl, not relc's: see 'Two packages named trl' in README.md")

from trl.launching import launch, run

EXAMPLES = "examples/summarization"


@dataclass
class Args:
    """Train, evaluate and report on the built-in summarization task."""

    reward: Literal["rouge", "preference"] = "rouge"
    """rouge: overlap with the human summary; preference: a reward model, the classic RLHF pipeline."""
    output_dir: Path | None = None
    """Where all results go; default: outputs/demo_summarization, for preference outputs/demo_rlhf."""
    steps: int = 40
    """PPO steps per arm."""
    seed: int = 0
    """Seed of every training and of the evaluation."""
    eval_articles: int = 160
    """Held-out articles."""
    bf16: bool = True
    """Train with bf16 mixed precision."""

    def __post_init__(self) -> None:
        for name, least in {"steps": 2, "eval_articles": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"--{name} must be at least {least}, got {getattr(self, name)}")


def evaluate(args: Args, model: Path, folder: Path, reward_model: Path | None) -> dict[str, Any]:
    """One row of the table: held-out articles summed up by sampling, as PPO trains, and by the likeliest tokens."""
    columns: dict[str, Any] = {}
    for how, flag in (("sampled", "--do_sample"), ("greedy", "--no-do_sample")):
        command = ["eval_scripts/summ_eval.py", f"--model_name={model}", "--dataset=builtin:tldr", flag]
        command += [f"--save_path={folder / f'{model.name}_{how}.csv'}", "--output_max_length=40"]
        command += [f"--num_samples_to_eval={args.eval_articles}", f"--seed={args.seed}"]
        if reward_model is not None:
            command += [f"--reward_model_ckpt_path={reward_model}"]
        judged = json.loads(run(*command).splitlines()[-1])
        for measure in ("pref_score", "rouge1", "rouge2", "rougeL", "rougeLsum"):
            if judged.get(measure) is not None:
                columns[f"{measure}, {how}"] = round(judged[measure]["mean"], 2)
                if measure in ("pref_score", "rouge1"):
                    columns[f"{measure}, {how}, 95 %"] = "{low:.2f} to {high:.2f}".format(**judged[measure])
    return columns


def main(args: Args) -> None:
    is_rlhf = args.reward == "preference"
    out = (args.output_dir or Path("outputs/demo_rlhf" if is_rlhf else "outputs/demo_summarization")).resolve()
    shutil.rmtree(out / "eval", ignore_errors=True)
    (out / "eval").mkdir(parents=True)
    seeded = f"--seed={args.seed}"
    print(f"1/4  Supervised start; results in {out}", flush=True)
    took = {"sft": launch(args.bf16, out / "sft", f"{EXAMPLES}/sft_summ.py", seeded)}
    reward_model = out / "reward_model" if is_rlhf else None
    ppo = [f"--model_name={out / 'sft'}", f"--steps={args.steps}", seeded]
    if reward_model is not None:
        print("2/4  Reward model on preference pairs", flush=True)
        command = [f"{EXAMPLES}/reward_model_summ.py", f"--model_name={out / 'sft'}", seeded]
        took["reward_model"] = launch(args.bf16, reward_model, *command)
        arms: dict[str, list[str]] = {"ppo": []}
        script = [f"{EXAMPLES}/ppo_summ_rlhf.py", *ppo, f"--reward_model_ckpt_path={reward_model}"]
        script += [f"--value_model_path={reward_model}"]
    else:
        # the preset's critic: the reward's own leave-one-out effects, asked about every summary
        arms = {"ppo": [], "ppo_critic": ["--use_intrinsic_reward"]}
        script = [f"{EXAMPLES}/ppo_summ_rouge.py", *ppo]
    for number, (arm, flags) in enumerate(arms.items(), start=1):
        print(f"2/4  PPO {number} of {len(arms)}: {arm}", flush=True)
        took[arm] = launch(args.bf16, out / arm, *script, *flags)

    print("3/4  Evaluating on held-out articles", flush=True)
    rows = []
    for name in ("sft", *arms):
        judged = evaluate(args, out / name, out / "eval", reward_model)
        rows.append({"model": name, **judged, **took[name]})
    (out / "evaluation.json").write_text(json.dumps(rows, indent=1) + "\n")

    print("4/4  Report", flush=True)
    report = [
        "-m",
        "trl.report",
        *(str(out / arm) for arm in arms),
        f"--output={out / 'report.html'}",
        f"--figures={out}",
    ]
    print(run(*report, f"--table={out / 'evaluation.json'}"), end="")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
