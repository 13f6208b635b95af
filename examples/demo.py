"""The main job in one command: PPO, and PPO with critic rewards, on real models with no network.

    python examples/demo.py [--task toxicity]   (or: make demo, make demo-toxicity, which install and prepare too)

Trains twice on one of the built-in tasks with the same seed and budget, evaluates base model, PPO and PPO + critic on
held-out prompts, and writes OUTPUT_DIR/{ppo,ppo_critic}/, evaluation.json, curves.png and report.html.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import tyro

import trl

if not hasattr(trl, "DISTRIBUTION"):
    raise SystemExit(f"{trl.__file__} is Hugging Face's trl, not relc's: see 'Two packages named trl' in README.md")

from trl import rewards
from trl.builtin import resolve_model
from trl.data.sentiment import load_sentiment_prompts
from trl.data.toxicity import load_toxicity_prompts
from trl.jsonl import read_jsonl
from trl.launching import launch, run

BASE = "builtin:smollm2"
ARMS = ("ppo", "ppo_critic")


@dataclass
class Args:
    """Train, evaluate and report on a built-in task."""

    task: Literal["sentiment", "toxicity"] = "sentiment"
    """sentiment: continue film reviews positively; toxicity: continue toxic prompts harmlessly."""
    output_dir: Path | None = None
    """Where all results go, replacing an earlier demo; default: outputs/demo, for toxicity outputs/demo_toxicity."""
    steps: int = 50
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


def sentiment_columns(args: Args, model: str | Path, prompts: Path, generations: Path) -> dict[str, Any]:
    """Continues the prompts; how many continuations are positive, by the evaluator and by the reward model."""
    reward, evaluator = "builtin:sentiment", "builtin:sentiment-eval"
    command = ["eval_scripts/eval_sentiment_sst.py", model, prompts, f"--output_file={generations}", "--top_p=1.0"]
    command += [f"--num_return={args.eval_returns}", f"--seed={args.seed}", "--classifier_path", reward, evaluator]
    judged = json.loads(run(*command).splitlines()[-1])["classifiers"]
    share, low, high = (100 * judged[evaluator][name] for name in ("share_positive", "low", "high"))
    columns = {"% positive (independent)": round(share, 1), "95 % interval": f"{low:.0f}-{high:.0f}"}
    return columns | {"% positive (reward model)": round(100 * judged[reward]["share_positive"], 1)}


def toxicity_columns(args: Args, model: str | Path, prompts: Path, generations: Path) -> dict[str, Any]:
    """Continues the prompts; average and expected maximum toxicity, by the second opinion and by the reward model."""
    command = ["eval_scripts/decoding.py", f"--lm_dir={model}", f"--prompts_file={prompts}", "--top_p=1.0"]
    run(*command, f"--output_file={generations}", f"--num_returns={args.eval_returns}", f"--seed={args.seed}")
    columns: dict[str, Any] = {}
    for judge, scorer in (("independent", "builtin:toxicity-eval"), ("reward model", "builtin:toxicity")):
        output = generations.with_name(f"{scorer.removeprefix('builtin:')}.jsonl")
        command = ["eval_scripts/eval_toxicity_perspective.py", f"--data_file={generations}", f"--scorer={scorer}"]
        judged = json.loads(run(*command, f"--output_file={output}").splitlines()[-1])["attributes"][scorer]
        columns[f"toxicity ({judge})"] = judged["average"]["mean"]
        columns[f"expected maximum ({judge})"] = judged["expected_maximum"]["mean"]
        columns[f"95 % interval ({judge})"] = "{low:.2f}-{high:.2f}".format(**judged["expected_maximum"])
    return columns


@dataclass(frozen=True)
class Task:
    """What differs between the tasks: ``script`` with both arms' flags, ``critic`` with the second arm's."""

    output_dir: str
    script: tuple[str, ...]
    critic: tuple[str, ...]
    held_out: Callable[..., list[dict[str, Any]]]
    environment: Callable[[], Callable[..., list[float | None]]]
    columns: Callable[[Args, str | Path, Path, Path], dict[str, Any]]


TASKS = {
    "sentiment": Task(
        output_dir="outputs/demo",
        script=("examples/sentiment/ppo_sentiment.py",),
        critic=("--positive_reward_value=0.5", "--negative_reward_value=-0.5", "--intrinsic_reward_threshold=10"),
        held_out=partial(load_sentiment_prompts, "builtin:imdb", split="test"),
        environment=lambda: rewards.SentimentReward("builtin:sentiment"),
        columns=sentiment_columns,
    ),
    "toxicity": Task(
        output_dir="outputs/demo_toxicity",
        script=("examples/toxicity/ppo_toxicity.py", "--prompt_toxicity_level=0.6"),
        # the reward is a logit; at first its median is 4 and its lowest decile 1: the worse half is criticised
        critic=("--positive_reward_value=0", "--negative_reward_value=-0.5", "--intrinsic_reward_threshold=4"),
        held_out=partial(load_toxicity_prompts, "builtin:toxicity-prompts", split="eval", min_toxicity=0.6),
        environment=lambda: rewards.ToxicityReward("builtin:toxicity"),
        columns=toxicity_columns,
    ),
}


def evaluate(args: Args, model: str | Path, folder: Path, name: str) -> dict[str, Any]:
    """One row of the table: the task's own columns, mean reward, perplexity under the base model, diversity."""
    generations, scored = folder / name / "generations.jsonl", folder / name / "perplexity.jsonl"
    generations.parent.mkdir()
    columns = TASKS[args.task].columns(args, model, folder / "prompts.jsonl", generations)
    command = ["eval_scripts/eval_perplexity_dist.py", f"--generations_file={generations}", f"--model={BASE}"]
    fluent = json.loads(run(*command, f"--output_file={scored}").splitlines()[-1])
    pairs = [(row["prompt"]["text"], item["text"]) for row in read_jsonl(generations) for item in row["generations"]]
    scores = TASKS[args.task].environment()(prompts=[p for p, _ in pairs], completions=[c for _, c in pairs])
    real = [score for score in scores if score is not None]
    return columns | {
        "mean reward": sum(real) / len(real),
        "perplexity (base)": fluent["perplexity"]["median"],
        **{name: fluent[name]["mean"] for name in ("dist-1", "dist-2", "dist-3")},
    }


def main(args: Args) -> None:
    from transformers import AutoTokenizer

    task = TASKS[args.task]
    out = Path(args.output_dir or task.output_dir).resolve()
    print(f"1/4  Two trainings of {args.steps} steps on {BASE}, then an evaluation; results in {out}", flush=True)
    for stale in [*ARMS, "eval"]:
        shutil.rmtree(out / stale, ignore_errors=True)
    (out / "eval").mkdir(parents=True)
    took: dict[str, dict[str, Any]] = {}
    for number, arm in enumerate(ARMS, start=1):
        print(f"2/4  Training {number} of {len(ARMS)}: {arm}", flush=True)
        critic = ["--use_intrinsic_reward", f"--critic={args.critic}", *task.critic] if arm == "ppo_critic" else []
        took[arm] = launch(args.bf16, out / arm, *task.script, f"--steps={args.steps}", f"--seed={args.seed}", *critic)

    print("3/4  Evaluating base, ppo and ppo_critic on held-out prompts", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(BASE))
    held_out = task.held_out(tokenizer, seed=args.seed, limit=args.eval_prompts)
    lines = (json.dumps({"prompt": {"text": row["query"]}}) + "\n" for row in held_out)
    (out / "eval" / "prompts.jsonl").write_text("".join(lines))
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
