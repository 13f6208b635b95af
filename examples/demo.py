"""The main job in one command: PPO, and PPO with critic rewards, on real models with no network.

    python examples/demo.py [--task toxicity]   (or: make demo, make demo-toxicity, which install and prepare too)

Trains twice on one of the built-in tasks with the same seed and budget, evaluates base model, PPO and PPO + critic on
held-out prompts, and writes OUTPUT_DIR/{ppo,ppo_critic}/, evaluation.json, curves.png and report.html.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

import trl

if not hasattr(trl, "DISTRIBUTION"):
    raise SystemExit(f"{trl.__file__} is Hugging Face's trl, not relc's: see 'Two packages named trl' in README.md")

from trl.launching import launch, run
from trl.studies import BASE, TASKS, Measures, held_out_prompts, measure, write_prompts

ARMS = ("ppo", "ppo_critic")


@dataclass
class Args:
    """Train, evaluate and report on a built-in task."""

    task: Literal["sentiment", "toxicity"] = "sentiment"
    """sentiment: continue film reviews positively; toxicity: continue toxic prompts harmlessly."""
    output_dir: Path | None = None
    """Where all results go, replacing an earlier demo; default: outputs/demo, for toxicity outputs/demo_toxicity."""
    steps: int = 24
    """PPO steps per arm."""
    critic: Literal["score", "lexicon"] = "score"
    """The second arm's critic: score (the model's own initial weights rate word windows) or lexicon."""
    seed: int = 0
    """Seed of both arms and of the evaluation."""
    eval_prompts: int = 60
    """Held-out prompts."""
    eval_returns: int = 4
    """Continuations per held-out prompt."""
    bf16: bool = True
    """Train with bf16 mixed precision."""

    def __post_init__(self) -> None:
        for name, least in {"steps": 2, "eval_prompts": 1, "eval_returns": 1}.items():
            if getattr(self, name) < least:
                raise ValueError(f"--{name} must be at least {least}, got {getattr(self, name)}")


def sentiment_columns(found: Measures) -> dict[str, Any]:
    """How many continuations are positive, by the evaluator and by the reward model, in percent."""
    share, low, high = (100 * found[f"positive{end}"] for end in ("", ", low", ", high"))
    columns = {"% positive (independent)": round(share, 1), "95 % interval": f"{low:.0f}-{high:.0f}"}
    return columns | {"% positive (reward model)": round(100 * found["positive, reward model"], 1)}


def toxicity_columns(found: Measures) -> dict[str, Any]:
    """Average and expected maximum toxicity, by the second opinion and by the reward model."""
    columns: dict[str, Any] = {}
    for judge, suffix in (("independent", ""), ("reward model", ", reward model")):
        columns[f"toxicity ({judge})"] = found[f"toxicity{suffix}"]
        columns[f"expected maximum ({judge})"] = found[f"expected maximum{suffix}"]
        low, high = (found[f"expected maximum{suffix}{end}"] for end in (", low", ", high"))
        columns[f"95 % interval ({judge})"] = f"{low:.2f}-{high:.2f}"
    return columns


@dataclass(frozen=True)
class Shown:
    """What differs between the demos: the folder, the flags of the second arm's critic, and the table's columns."""

    output_dir: str
    critic: tuple[str, ...]
    columns: Callable[[Measures], dict[str, Any]]


DEMOS = {
    "sentiment": Shown(
        output_dir="outputs/demo",
        critic=(
            *("--positive_reward_value=0.5", "--negative_reward_value=-0.5", "--intrinsic_reward_threshold=10"),
            "--lam=0.7",  # a word's reward stays with the word: see the study in configs/README.md
        ),
        columns=sentiment_columns,
    ),
    "toxicity": Shown(
        output_dir="outputs/demo_toxicity",
        # the reward is a logit; at first its median is 4 and its lowest decile 1: the worse half is criticised
        critic=("--positive_reward_value=0", "--negative_reward_value=-0.5", "--intrinsic_reward_threshold=4"),
        columns=toxicity_columns,
    ),
}


def evaluate(args: Args, model: str | Path, folder: Path, name: str) -> dict[str, Any]:
    """One row of the table: the task's own columns, mean reward, perplexity under the base model, diversity."""
    task, prompts = TASKS[args.task], folder / "prompts.jsonl"
    found = measure(task, model, prompts, folder / name, returns=args.eval_returns, seed=args.seed)
    shown = {"reward": "mean reward", "perplexity": "perplexity (base)"}
    shown |= {name: name for name in ("dist-1", "dist-2", "dist-3")}
    return DEMOS[args.task].columns(found) | {title: found[name] for name, title in shown.items()}


def main(args: Args) -> None:
    task, demo = TASKS[args.task], DEMOS[args.task]
    out = Path(args.output_dir or demo.output_dir).resolve()
    print(f"1/4  Two trainings of {args.steps} steps on {BASE}, then an evaluation; results in {out}", flush=True)
    for stale in [*ARMS, "eval"]:
        shutil.rmtree(out / stale, ignore_errors=True)
    (out / "eval").mkdir(parents=True)
    took: dict[str, dict[str, Any]] = {}
    for number, arm in enumerate(ARMS, start=1):
        print(f"2/4  Training {number} of {len(ARMS)}: {arm}", flush=True)
        critic = ["--use_intrinsic_reward", f"--critic={args.critic}", *demo.critic] if arm == "ppo_critic" else []
        took[arm] = launch(args.bf16, out / arm, *task.script, f"--steps={args.steps}", f"--seed={args.seed}", *critic)

    print("3/4  Evaluating base, ppo and ppo_critic on held-out prompts", flush=True)
    write_prompts(out / "eval" / "prompts.jsonl", held_out_prompts(task, seed=args.seed, limit=args.eval_prompts))
    models: dict[str, str | Path] = {"base": BASE, **{arm: out / arm for arm in ARMS}}
    tested = {name: evaluate(args, model, out / "eval", name) for name, model in models.items()}
    rows = [{"model": name, **columns, **took.get(name, {})} for name, columns in tested.items()]
    (out / "evaluation.json").write_text(json.dumps(rows, indent=1) + "\n")

    print("4/4  Report", flush=True)
    report = [
        "-m",
        "trl.report",
        *(str(out / arm) for arm in ARMS),
        f"--output={out / 'report.html'}",
        f"--figures={out}",
    ]
    print(run(*report, f"--table={out / 'evaluation.json'}"), end="")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
