"""The reproduction study: PPO against PPO with each critic, on the built-in tasks, over fresh seeds.

    python -m benchmarks.reproduce tune     # a grid of settings on development seeds and prompts
    python -m benchmarks.reproduce report   # every arm on the seeds that nothing was chosen by

Arms: ppo; and with critic rewards score, lexicon, attribution, and random (the score critic's spans in random places).
Each arm has a grid, PPO the largest; what the rule of `reproduce_tables.best` picks is written down in CHOSEN, and the
control takes the settings of `score`. A run is trained by the task's own script, and evaluated on held-out prompts
half-way and at the end.

What is finished is a row of OUTPUT_DIR/results.jsonl and never done again: after a kill give the same command. Runs are
claimed one by one, so the same command in a second terminal takes half of the work. Weights are deleted once they are
evaluated. The rows behind the published tables are in benchmarks/reproduce.jsonl.
"""

import hashlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from filelock import FileLock, Timeout

from benchmarks.reproduce_tables import ARMS, CURVE, RESULTS, read_results, tables
from trl.builtin import resolve, resolve_model
from trl.jsonl import append_rows, cut_torn_line, dump_line, read_jsonl, replace_file
from trl.launching import ROOT, train
from trl.report.runlog import load_run
from trl.studies import BASE, TASKS, held_out_prompts, measure, write_prompts

DEVELOPMENT_SEEDS = (101,)
REPORT_SEEDS = (1, 2, 3, 4, 5)
PROMPT_SEED = 2024
"""Draws the held-out prompts; the first half of them is for development, the second for the report."""

Settings = dict[str, str]
"""Name → flags; the scripts' defaults for all others."""


def sentiment(rate: str, kl: str = "0.2", value: str | None = None, lam: str = "0.95") -> Settings:
    """One setting under the name that says it; ``value`` is the critic's reward per token, None without a critic."""
    name, flags = f"lr {rate}, KL {kl}", f"--learning_rate={rate} --init_kl_coef={kl}"
    if value is not None:
        name, flags = f"{name}, {value}", f"{flags} --positive_reward_value={value} --negative_reward_value=-{value}"
    return {name: flags} if lam == "0.95" else {f"{name}, lam {lam}": f"{flags} --lam={lam}"}


def toxicity(
    rate: str, kl: str, value: str = "", *, lam: str = "0.95", signs: str = "-", centred: bool = False
) -> Settings:
    """``signs``: "-" penalises where the raw reward is at most 4, its median at first; "±" rewards too, and everywhere.

    ``centred``: the reward's running mean is subtracted. It is about 3.5, which makes ending early worth while where
    lambda is low: the last tokens get most of it.
    """
    name, flags = f"lr {rate}, KL {kl}", f"--learning_rate={rate} --init_kl_coef={kl}"
    if value or lam != "0.95":
        name += (f", {signs}{value}" if value else "") + f", lam {lam}"
        flags += f" --lam={lam}"
    if value:
        bounds = {"-": ("0", "4"), "±": (value, "100")}[signs]
        flags += f" --negative_reward_value=-{value} --positive_reward_value={bounds[0]}"
        flags += f" --intrinsic_reward_threshold={bounds[1]}"
    if centred:
        return {f"{name}, centred": f"{flags} --use_score_scaling --use_score_norm"}
    return {name: f"{flags} --no-use_score_scaling --no-use_score_norm"}


PLAIN = [("5e-5", "0.2"), ("1e-4", "0.2"), ("2e-4", "0.2"), ("1e-4", "0.1"), ("1e-4", "0.05"), ("2e-4", "0.1")]
GRID: dict[str, dict[str, list[Settings]]] = {
    "sentiment": {
        "ppo": [*(sentiment(*row) for row in PLAIN), sentiment("2e-4", "0.1", lam="0.7")],
        "score": [
            sentiment("5e-5", "0.2", "0.5"),
            sentiment("1e-4", "0.2", "0.5"),
            sentiment("1e-4", "0.2", "0.25"),
            sentiment("2e-4", "0.2", "0.25"),
            sentiment("2e-4", "0.2", "0.5"),
            sentiment("1e-4", "0.1", "0.5", lam="0.7"),
        ],
        "lexicon": [
            sentiment("2e-4", "0.1", "0.5", lam="0.7"),
            sentiment("1e-4", "0.1", "0.25", lam="0.7"),
        ],
        "attribution": [
            sentiment("1e-4", "0.1", "0.5"),
            sentiment("2e-4", "0.1", "0.5"),
            sentiment("2e-4", "0.1", "0.5", lam="0.7"),
        ],
    },
    "toxicity": {
        "ppo": [
            toxicity("1e-4", "0.2"),
            toxicity("1e-4", "0.1"),
            toxicity("2e-4", "0.1"),
            toxicity("1e-4", "0.05", centred=True),
            toxicity("2e-4", "0.05", centred=True),
            toxicity("2e-4", "0.1", centred=True),
            toxicity("2e-4", "0.1", lam="0.7", centred=True),
        ],
        "score": [toxicity("1e-4", "0.1", "0.5", lam="0.7"), toxicity("2e-4", "0.1", "0.5", centred=True)],
        "lexicon": [toxicity("1e-4", "0.1", "0.5", lam="0.7"), toxicity("2e-4", "0.1", "0.5", centred=True)],
        "attribution": [
            toxicity("1e-4", "0.1", "0.5", lam="0.7"),
            toxicity("1e-4", "0.1", "0.5"),
            toxicity("1e-4", "0.1", "0.5", signs="±"),
            toxicity("1e-4", "0.05", "0.5", lam="0.7", centred=True),
            toxicity("1e-4", "0.05", "0.5", lam="0.7", signs="±", centred=True),
            toxicity("2e-4", "0.05", "0.5", lam="0.7", signs="±", centred=True),
            toxicity("2e-4", "0.05", "1.0", lam="0.7", signs="±", centred=True),
        ],
    },
}
"""Task → arm → settings. No critic gets more of them than PPO."""

CHOSEN = {
    "sentiment": {
        "ppo": "lr 1e-4, KL 0.1",
        "score": "lr 1e-4, KL 0.1, 0.5, lam 0.7",
        "lexicon": "lr 1e-4, KL 0.1, 0.25, lam 0.7",
        "attribution": "lr 2e-4, KL 0.1, 0.5, lam 0.7",
    },
    "toxicity": {
        "ppo": "lr 2e-4, KL 0.1, centred",
        "score": "lr 2e-4, KL 0.1, -0.5, lam 0.95, centred",
        "lexicon": "lr 2e-4, KL 0.1, -0.5, lam 0.95, centred",
        "attribution": "lr 2e-4, KL 0.05, ±0.5, lam 0.7, centred",
    },
}
"""What the rule picked of the development runs; detoxification's score and lexicon were not tuned and have PPO's
settings. The control has those of the critic that it imitates."""


@dataclass
class Args:
    """Train and evaluate what is missing, then print the tables and write them to OUTPUT_DIR."""

    phase: Annotated[Literal["tune", "report"], tyro.conf.Positional]
    """tune: the grid on the development seeds; report: the chosen settings on fresh seeds."""
    tasks: tuple[Literal["sentiment", "toxicity"], ...] = ("sentiment", "toxicity")
    """One after the other."""
    arms: tuple[Literal["ppo", "score", "lexicon", "attribution", "random"], ...] = ARMS
    """Which arms; in development those that have a grid."""
    seeds: tuple[int, ...] | None = None
    """Default: those of the phase. All arms of a seed come before the next seed."""
    steps: int = 32
    """PPO steps of a run, an even number."""
    prompts: int = 48
    """Held-out prompts for development, and as many others for the report."""
    returns: int = 4
    """Continuations of each."""
    model: str = BASE
    """Policy to start from."""
    threads: int = 1
    """Of a run; a machine's cores are used best by as many commands of one thread each."""
    output_dir: Path = Path("outputs/reproduce")
    """Run folders are PHASE/TASK/ARM/seed-N in here."""

    def __post_init__(self) -> None:
        if self.steps < 2 or self.steps % 2:
            raise ValueError(f"--steps must be an even number from 2 on, got {self.steps}")
        for name in ("prompts", "returns", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True)
class Work:
    """One run: the base model's has no flags and no training."""

    task: str
    arm: str
    seed: int
    flags: tuple[str, ...] | None


def plan(args: Args) -> Iterator[Work]:
    """All runs of the phase, seed by seed, so that a study that was broken off is balanced."""
    for task in args.tasks:
        for seed in args.seeds or (DEVELOPMENT_SEEDS if args.phase == "tune" else REPORT_SEEDS):
            yield Work(task, "base", seed, None)
            if args.phase == "tune":
                for arm in (arm for arm in args.arms if arm in GRID[task]):
                    for name, flags in grid_of(task, arm).items():
                        yield Work(task, f"{arm} {name}", seed, arm_flags(arm, flags))
            else:
                for arm in args.arms:
                    like = "score" if arm == "random" else arm
                    yield Work(task, arm, seed, arm_flags(arm, grid_of(task, like)[CHOSEN[task][like]]))


def grid_of(task: str, arm: str) -> Settings:
    return {name: flags for setting in GRID[task][arm] for name, flags in setting.items()}


def arm_flags(arm: str, flags: str) -> tuple[str, ...]:
    critic = () if arm == "ppo" else ("--use_intrinsic_reward", f"--critic={arm}")
    return (*critic, *flags.split())


def do(args: Args, work: Work, folder: Path, prompts: Path) -> None:
    """Train, evaluate half-way and at the end, add the result to the file of all, delete the weights."""
    results = args.output_dir / RESULTS
    asked = {
        "flags": work.flags,
        "steps": None if work.flags is None else args.steps,
        "returns": args.returns,
        "model": args.model,
        "prompts": hashlib.sha256(prompts.read_bytes()).hexdigest(),
    }
    before = read_results(results, args.phase, work.task).get(work.arm, {}).get(work.seed)
    if before is not None:
        if before["asked"] != json.loads(dump_line(asked)):
            raise SystemExit(f"error: {folder} was run with other settings ({before['asked']}); use another folder")
        return delete_weights(folder)  # it may have been killed before that
    task, started = TASKS[work.task], time.perf_counter()
    measured: dict[str, Any] = {}
    models: dict[str, str | Path] = {"end": args.model}
    if work.flags is not None:
        # a run that is stopped saves a checkpoint: that of the half-way must not be dropped for it
        saving = (f"--save_freq={args.steps // 2}", "--keep_checkpoints=100", "--resume")
        sizes = (f"--steps={args.steps}", f"--seed={work.seed}", *saving)
        policy = (f"--model_name={args.model}",)
        train(True, folder, *task.script, *policy, *sizes, *work.flags, threads=args.threads)
        models = {"half": folder / f"checkpoint-{args.steps // 2}", "end": folder}
    minutes = (time.perf_counter() - started) / 60
    for when, model in models.items():
        out = folder / "eval" / when
        measured[when] = measure(task, model, prompts, out, returns=args.returns, seed=work.seed)
    curve = [{key: row[key] for key in CURVE} for row in load_run(folder).metrics] if work.flags is not None else []
    name = {"phase": args.phase, "task": work.task, "arm": work.arm, "seed": work.seed}
    result = {**name, "asked": asked, **measured, "curve": curve, "training_minutes": minutes, "commit": commit()}
    with FileLock(results.with_suffix(".lock")):
        cut_torn_line(results)
        with FileIO(results, "a") as file:
            append_rows(file, [result])
    delete_weights(folder)


def delete_weights(folder: Path) -> None:
    for weights in (*folder.glob("checkpoint-*"), *folder.glob("*.safetensors"), *folder.glob("*.pt")):
        shutil.rmtree(weights) if weights.is_dir() else weights.unlink()


def evaluator_accuracy(tokens: int = 20, limit: int = 1000) -> str:
    """How often the sentiment judges are right about texts as short as the continuations: labelled film reviews cut."""
    from transformers import AutoTokenizer

    from trl.rewards.classifiers import load_classifier

    rows = read_jsonl(Path(resolve("builtin:imdb", "data set")) / "test.jsonl")[:limit]
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(BASE))
    ids = tokenizer([row["text"] for row in rows])["input_ids"]
    texts = tokenizer.batch_decode([review[:tokens] for review in ids])
    right = {}
    for name in ("builtin:sentiment-eval", "builtin:sentiment"):
        verdicts = [p > 0.5 for p in load_classifier(name)(texts)]
        right[name] = sum(said == bool(row["label"]) for said, row in zip(verdicts, rows, strict=True)) / len(rows)
    shares = ", ".join(f"{name} {share:.3f}" for name, share in right.items())
    return f"Accuracy on the first {tokens} tokens of {len(rows)} held-out reviews: {shares}."


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    return done.stdout.strip()


def main(args: Args) -> None:
    os.environ["OMP_NUM_THREADS"] = str(args.threads)  # of the evaluation scripts too
    out = (args.output_dir / args.phase).resolve()
    for task in args.tasks:
        (out / task).mkdir(parents=True, exist_ok=True)
        drawn = held_out_prompts(TASKS[task], seed=PROMPT_SEED, limit=2 * args.prompts)
        half = drawn[: args.prompts] if args.phase == "tune" else drawn[args.prompts :]
        write_prompts(out / task / "prompts.jsonl", half)
    for work in plan(args):
        folder = out / work.task / work.arm.replace(" ", "_") / f"seed-{work.seed}"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(folder / ".lock", blocking=False):
                do(args, work, folder, out / work.task / "prompts.jsonl")
        except Timeout:
            continue  # another process is at it
    found = [tables(args.output_dir / RESULTS, args.phase, task) for task in args.tasks]
    if "sentiment" in args.tasks and args.phase == "report":
        found.append(evaluator_accuracy())
    page = "\n\n".join(found) + "\n"
    replace_file(out / "tables.md", page)
    print(page)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
