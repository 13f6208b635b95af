"""The main job in one command: PPO, and PPO with critic rewards, on real models with no network.

    python examples/demo.py            (or: make demo, which also installs and prepares)

Trains twice on the built-in sentiment task with the same seed and budget, evaluates base model, PPO and
PPO + critic on held-out prompts, and writes OUTPUT_DIR/{ppo,ppo_critic}/, evaluation.json, curves.png and
report.html.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

import trl

if not hasattr(trl, "DISTRIBUTION"):
    raise SystemExit(f"{trl.__file__} is Hugging Face's trl, not relc's: see 'Two packages named trl' in README.md")

ROOT = Path(__file__).resolve().parent.parent
BASE, REWARD, EVALUATOR = "builtin:smollm2", "builtin:sentiment", "builtin:sentiment-eval"
ARMS: dict[str, list[str]] = {
    "ppo": [],
    "ppo_critic": [
        "--use_intrinsic_reward",
        "--positive_reward_value=0.5",
        "--negative_reward_value=-0.5",
        "--intrinsic_reward_threshold=10",
    ],
}


@dataclass
class Args:
    """Train, evaluate and report on the built-in sentiment task."""

    output_dir: Path = Path("outputs/demo")
    """Where both models, metrics, samples, table, curves and report go; an earlier demo there is replaced."""
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


def run(*command: str | Path) -> str:
    """Run one of the repository's scripts; its progress goes to the terminal, its result is returned."""
    environment = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [sys.executable, *map(str, command)], env=os.environ | environment, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    if done.returncode:
        raise SystemExit(f"error: {command[0]} failed (exit {done.returncode}); its messages are above")
    return done.stdout


def train(args: Args, arm: str, folder: Path) -> float:
    """Train one arm as a user would; returns its minutes."""
    started = time.perf_counter()
    command = ["-m", "accelerate.commands.launch", "--num_processes=1", "--num_machines=1", "--dynamo_backend=no"]
    command += ["--mixed_precision=bf16" if args.bf16 else "--mixed_precision=no"]
    command += ["examples/sentiment/ppo_sentiment.py", "--preset=builtin", f"--steps={args.steps}"]
    command += [f"--seed={args.seed}", f"--output_dir={folder}", "--overwrite"]
    if "--use_intrinsic_reward" in ARMS[arm]:
        command += [f"--critic={args.critic}"]
    run(*command, *ARMS[arm])
    return (time.perf_counter() - started) / 60


def write_prompts(args: Args, path: Path) -> None:
    """Openings of reviews that training never sees."""
    from transformers import AutoTokenizer

    from trl.builtin import resolve_model
    from trl.data.sentiment import load_sentiment_prompts

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(BASE))
    held_out = load_sentiment_prompts("builtin:imdb", tokenizer, split="test", seed=args.seed, limit=args.eval_prompts)
    path.write_text("".join(json.dumps({"prompt": {"text": row["query"]}}) + "\n" for row in held_out))


def evaluate(args: Args, model: str | Path, prompts: Path, folder: Path) -> dict[str, Any]:
    """One row of the table: positivity by both classifiers, reward, perplexity under the base model, diversity."""
    from trl.jsonl import read_jsonl
    from trl.rewards import SentimentReward

    generations, scored = folder / "generations.jsonl", folder / "perplexity.jsonl"
    sampling = [f"--num_return={args.eval_returns}", "--top_p=1.0", f"--seed={args.seed}"]
    judged = run(
        "eval_scripts/eval_sentiment_sst.py",
        *(model, prompts, f"--output_file={generations}", *sampling, "--classifier_path", REWARD, EVALUATOR),
    )
    fluency = run(
        "eval_scripts/eval_perplexity_dist.py",
        *(f"--generations_file={generations}", f"--output_file={scored}", f"--model={BASE}"),
    )
    classifiers = json.loads(judged.splitlines()[-1])["classifiers"]
    fluent = json.loads(fluency.splitlines()[-1])
    pairs = [(row["prompt"]["text"], item["text"]) for row in read_jsonl(generations) for item in row["generations"]]
    rewards = SentimentReward(REWARD)(prompts=[p for p, _ in pairs], completions=[c for _, c in pairs])
    real = [reward for reward in rewards if reward is not None]
    independent = classifiers[EVALUATOR]
    return {
        "% positive (independent)": round(100 * independent["share_positive"], 1),
        "95 % interval": f"{100 * independent['low']:.0f}-{100 * independent['high']:.0f}",
        "% positive (reward model)": round(100 * classifiers[REWARD]["share_positive"], 1),
        "mean reward": sum(real) / len(real),
        "perplexity (base)": fluent["perplexity"]["median"],
        **{name: fluent[name]["mean"] for name in ("dist-1", "dist-2", "dist-3")},
    }


def training_columns(folder: Path, minutes: float) -> dict[str, Any]:
    """What training cost, from its metrics: KL at the end, the critic's calls, minutes."""
    from trl.jsonl import read_jsonl

    metrics = read_jsonl(folder / "metrics.jsonl")
    last = metrics[-5:]
    return {
        "KL (last 5 steps)": sum(row["objective/kl"] for row in last) / len(last),
        "critic calls": int(sum(row.get("critic/requests", 0) for row in metrics)),
        "critic cost": "$0 (local)",
        "minutes": round(minutes, 1),
    }


def main(args: Args) -> None:
    out = args.output_dir.resolve()
    print(f"1/4  Two trainings of {args.steps} steps on {BASE}, then an evaluation; results in {out}", flush=True)
    for stale in [*ARMS, "eval"]:
        shutil.rmtree(out / stale, ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    minutes = {}
    for number, arm in enumerate(ARMS, start=1):
        print(f"2/4  Training {number} of {len(ARMS)}: {arm}", flush=True)
        minutes[arm] = train(args, arm, out / arm)

    print("3/4  Evaluating base, ppo and ppo_critic on held-out prompts", flush=True)
    prompts = out / "eval" / "prompts.jsonl"
    rows = []
    for name, model in {"base": BASE, **{arm: out / arm for arm in ARMS}}.items():
        folder = out / "eval" / name
        folder.mkdir(parents=True)
        if not prompts.exists():
            write_prompts(args, prompts)
        row = {"model": name} | evaluate(args, model, prompts, folder)
        rows.append(row if name == "base" else row | training_columns(out / name, minutes[name]))
    (out / "evaluation.json").write_text(json.dumps(rows, indent=1) + "\n")

    print("4/4  Report", flush=True)
    report = ["-m", "trl.report", *(out / arm for arm in ARMS), f"--output={out / 'report.html'}"]
    print(run(*report, f"--table={out / 'evaluation.json'}", "--figures"), end="")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
