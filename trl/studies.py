"""The built-in tasks as demos and studies run them: prompts held out, environment, and evaluation by the scripts."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trl import rewards
from trl.builtin import resolve_model
from trl.data.sentiment import load_sentiment_prompts
from trl.data.toxicity import load_toxicity_prompts
from trl.jsonl import dump_line, read_jsonl
from trl.launching import run_here

BASE = "builtin:smollm2"
PROMPTS_PER_BATCH = 24
"""Of an evaluation: decoding reads all weights for each token, so that a larger batch costs little more."""
Measures = dict[str, float]


@dataclass(frozen=True)
class StudyTask:
    """A built-in task.

    ``script`` is its training script with the flags that every arm has; ``held_out`` its prompts that no policy is
    trained on; ``measure`` continues a prompt file with a model and judges: (model, prompts, generations to write,
    per prompt, seed) → numbers, those of the independent evaluator and those of the reward model.
    """

    script: tuple[str, ...]
    held_out: Callable[..., list[dict[str, Any]]]
    environment: Callable[[], Callable[..., Sequence[float | None]]]
    measure: Callable[[str | Path, Path, Path, int, int], Measures]


def measure_sentiment(model: str | Path, prompts: Path, generations: Path, returns: int, seed: int) -> Measures:
    """Shares of positive continuations in [0, 1], the evaluator's with the ends of its 95 % interval."""
    reward, evaluator = "builtin:sentiment", "builtin:sentiment-eval"
    command = [
        "eval_scripts/eval_sentiment_sst.py",
        str(model),
        str(prompts),
        f"--output_file={generations}",
        "--top_p=1.0",
    ]
    command += [f"--num_return={returns}", f"--batch_size={PROMPTS_PER_BATCH}", f"--seed={seed}"]
    command += ["--classifier_path", reward, evaluator]
    judged = last_json(run_here(*command))["classifiers"]
    independent = judged[evaluator]
    return {
        "positive": independent["share_positive"],
        "positive, low": independent["low"],
        "positive, high": independent["high"],
        "positive, reward model": judged[reward]["share_positive"],
    }


def measure_toxicity(model: str | Path, prompts: Path, generations: Path, returns: int, seed: int) -> Measures:
    """Average and expected maximum toxicity in [0, 1], by the second opinion and by the reward model."""
    command = ["eval_scripts/decoding.py", f"--lm_dir={model}", f"--prompts_file={prompts}", "--top_p=1.0"]
    command += [f"--output_file={generations}", f"--batch_size={PROMPTS_PER_BATCH}"]
    run_here(*command, f"--num_returns={returns}", f"--seed={seed}")
    measures: Measures = {}
    for suffix, scorer in (("", "builtin:toxicity-eval"), (", reward model", "builtin:toxicity")):
        output = generations.with_name(f"{scorer.removeprefix('builtin:')}.jsonl")
        command = ["eval_scripts/eval_toxicity_perspective.py", f"--data_file={generations}", f"--scorer={scorer}"]
        judged = last_json(run_here(*command, f"--output_file={output}"))["attributes"][scorer]
        measures[f"toxicity{suffix}"] = judged["average"]["mean"]
        for name, key in (("mean", ""), ("low", ", low"), ("high", ", high")):
            measures[f"expected maximum{suffix}{key}"] = judged["expected_maximum"][name]
    return measures


TASKS = {
    "sentiment": StudyTask(
        script=("examples/sentiment/ppo_sentiment.py",),
        held_out=partial(load_sentiment_prompts, "builtin:imdb", split="test"),
        environment=lambda: rewards.SentimentReward("builtin:sentiment"),
        measure=measure_sentiment,
    ),
    "toxicity": StudyTask(
        script=("examples/toxicity/ppo_toxicity.py", "--prompt_toxicity_level=0.6"),
        held_out=partial(load_toxicity_prompts, "builtin:toxicity-prompts", split="eval", min_toxicity=0.6),
        environment=lambda: rewards.ToxicityReward("builtin:toxicity"),
        measure=measure_toxicity,
    ),
}


def held_out_prompts(task: StudyTask, *, seed: int, limit: int) -> list[str]:
    """A random sample of the task's held-out prompts."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model(BASE))
    return [row["query"] for row in task.held_out(tokenizer, seed=seed, limit=limit)]


def write_prompts(path: Path, prompts: Sequence[str]) -> None:
    """A prompt file as the evaluation scripts read it."""
    path.write_text("".join(dump_line({"prompt": {"text": text}}) + "\n" for text in prompts), encoding="utf-8")


def measure(task: StudyTask, model: str | Path, prompts: Path, folder: Path, *, returns: int, seed: int) -> Measures:
    """The task's own measures, the mean environment reward, the median perplexity under the base model, and dist-n.

    Generations and their scores are kept in ``folder``; what is there already is not computed again.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generations, scored = folder / "generations.jsonl", folder / "perplexity.jsonl"
    measures = task.measure(model, prompts, generations, returns, seed)
    command = ["eval_scripts/eval_perplexity_dist.py", f"--generations_file={generations}", f"--model={BASE}"]
    fluent = last_json(run_here(*command, f"--output_file={scored}"))
    pairs = [(row["prompt"]["text"], item["text"]) for row in read_jsonl(generations) for item in row["generations"]]
    scores = task.environment()(prompts=[p for p, _ in pairs], completions=[c for _, c in pairs])
    real = [score for score in scores if score is not None]
    return measures | {
        "reward": sum(real) / len(real),
        "perplexity": fluent["perplexity"]["median"],
        **{name: fluent[name]["mean"] for name in ("dist-1", "dist-2", "dist-3")},
    }


def last_json(printed: str) -> dict[str, Any]:
    """The result that an evaluation script prints last."""
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result
