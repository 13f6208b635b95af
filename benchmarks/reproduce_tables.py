"""The reproduction study's tables, as Markdown: means over seeds with 95 % intervals, and differences within seeds.

python -m benchmarks.reproduce_tables benchmarks/reproduce.jsonl     # the published tables, from the published rows
"""

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from trl.jsonl import read_jsonl
from trl.report.arms import Arm
from trl.report.curves import REWARD
from trl.report.efficiency import efficiency, final_value
from trl.report.runlog import Run

ARMS = ("ppo", "score", "lexicon", "attribution", "random")
RESULTS = "results.jsonl"
"""One row per finished run: phase, task, arm, seed, what was asked, what was measured, and the training's `CURVE`."""
CURVE = ("step", REWARD, "objective/kl")
Results = dict[str, dict[int, dict[str, Any]]]
"""Arm → seed → row."""
FLUENCY = ("perplexity", "dist-1", "dist-2", "dist-3")
ELIGIBLE_DIVERSITY = 0.95
"""A setting may be chosen while its dist-2 is at least this share of the base model's."""
MEASURES = {
    "sentiment": ("positive", "positive, reward model", "reward", *FLUENCY),
    "toxicity": ("toxicity", "expected maximum", "toxicity, reward model", "reward", *FLUENCY),
}


def mean_interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % interval by Student's t; NaN width for fewer than two values."""
    data = np.asarray(values, dtype=np.float64)
    if len(data) < 2:
        return float(data.mean()), math.nan
    width = stats.t.ppf(0.975, len(data) - 1) * data.std(ddof=1) / math.sqrt(len(data))
    return float(data.mean()), float(width)


def shown(values: Sequence[float], sign: str = "") -> str:
    """``mean ± half-width``, with as many digits as the size of the mean asks for."""
    mean, width = mean_interval(values)
    digits = 1 if abs(mean) >= 10 else 3 if (abs(mean) < 1 and not sign) or abs(mean) < 0.1 else 2
    return f"{mean:{sign}.{digits}f}" + ("" if math.isnan(width) else f" ± {width:.{digits}f}")


def read_results(path: Path, phase: str, task: str) -> Results:
    """The finished runs of a phase and task; arms in the order of ``ARMS``, settings as they came."""
    found: Results = {}
    for row in read_jsonl(path) if path.exists() else []:
        if (row["phase"], row["task"]) == (phase, task):
            found.setdefault(row["arm"], {})[row["seed"]] = row
    order = ("base", *ARMS)
    return dict(sorted(found.items(), key=lambda item: order.index(item[0].split()[0])))


def tables(path: Path, phase: str, task: str) -> str:
    """What a phase found; empty where no run of it is finished."""
    results = read_results(path, phase, task)
    if not results:
        return ""
    return tune_table(task, results) if phase == "tune" else report_tables(task, results)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tune_table(task: str, results: Results) -> str:
    """Every setting of the grid, and which the rule takes."""
    arms = dict.fromkeys(name.split()[0] for name in results if name != "base")
    picked = [f"best {arm}: {best(results, arm) or 'none'}" for arm in arms]
    return f"## {task}, development\n\n{quality_table(task, results)}\n\n{'; '.join(picked)}"


def best(results: Results, arm: str) -> str | None:
    """The arm's setting with the highest held-out reward among the diverse and fluent ones; None where there is none.

    What is asked is whether a critic brings a policy in half of the steps to where PPO ends: PPO's setting is the one
    that ends best, a critic's the one that is best half-way, with texts as likely as the base model's or PPO's.
    """
    base, when = results["base"], "end" if arm == "ppo" else "half"
    mine = {name: seeds for name, seeds in results.items() if name.startswith(f"{arm} ")}
    worst = math.inf
    if arm != "ppo":
        plain = best(results, "ppo")
        worst = max(_mean(seeds, "end", "perplexity") for seeds in (base, results[plain] if plain else base))
    allowed = [
        name
        for name, seeds in mine.items()
        if all(when in row for row in seeds.values())
        and _mean(seeds, when, "dist-2") >= ELIGIBLE_DIVERSITY * _mean(base, "end", "dist-2")
        and _mean(seeds, when, "perplexity") <= worst
    ]
    return max(allowed, key=lambda name: _mean(mine[name], when, "reward"), default=None)


def _mean(seeds: dict[int, dict[str, Any]], when: str, measure: str) -> float:
    return float(np.mean([row[when][measure] for row in seeds.values()]))


def report_tables(task: str, results: Results) -> str:
    """Speed by the training reward; quality on held-out prompts; differences to PPO at its end, seed by seed."""
    parts = [f"## {task}", speed_table(results), quality_table(task, results)]
    if "ppo" in results:
        parts.append(difference_table(task, results))
    return "\n\n".join(parts)


def speed_table(results: Results) -> str:
    """How soon PPO's mean final reward was reached; nothing of that where PPO, the first arm, is missing."""
    arms = [
        Arm(name, tuple(Run(f"seed {seed}", seeds[seed]["curve"], []) for seed in sorted(seeds)), {})
        for name, seeds in results.items()
        if name != "base"
    ]
    header = ["arm", "seeds", "training reward, last tenth", "steps to PPO's", "in seeds", "KL, last tenth", "minutes"]
    found = efficiency(arms) if "ppo" in results else None
    reached = {arm.name: reaches for arm, reaches in found.arms} if found else {}
    rows = []
    for arm in arms:
        steps = [reach.at["step"] for reach in reached.get(arm.name, ()) if reach.at]
        finals, kls = ([value for run in arm.runs if (value := final_value(run, key)) is not None]
                       for key in (REWARD, "objective/kl"))  # fmt: skip
        minutes = [row["training_minutes"] for row in results[arm.name].values()]
        rows.append(
            [arm.name, str(len(arm.runs)), shown(finals), shown(steps) if steps else "–",
             f"{len(steps)} of {len(arm.runs)}" if found else "–", shown(kls), f"{np.mean(minutes):.1f}"]
        )  # fmt: skip
    return markdown(header, rows)


def quality_table(task: str, results: Results) -> str:
    """Means over seeds, half-way and at the end."""
    rows = []
    for name, seeds in results.items():
        for when in ("half", "end"):
            if all(when in row for row in seeds.values()):
                cells = [shown([row[when][measure] for row in seeds.values()]) for measure in MEASURES[task]]
                rows.append([name if name == "base" else f"{name}, {when}", *cells])
    return markdown(["model", *MEASURES[task]], rows)


def difference_table(task: str, results: Results) -> str:
    """Each arm, half-way and at its end, minus PPO at its end on the same seed."""
    rows = []
    for name, seeds in results.items():
        both = sorted(seeds.keys() & results["ppo"].keys())
        for when in ("half", "end"):
            if name == "base" or not both or (name, when) == ("ppo", "end"):
                continue
            pairs = [(seeds[seed][when], results["ppo"][seed]["end"]) for seed in both]
            cells = [shown([mine[measure] - ppo[measure] for mine, ppo in pairs], "+") for measure in MEASURES[task]]
            rows.append([f"{name}, {when}", *cells])
    return markdown(["minus PPO at its end", *MEASURES[task]], rows)


if __name__ == "__main__":
    found = [tables(Path(sys.argv[1]), phase, task) for task in MEASURES for phase in ("tune", "report")]
    print("\n\n".join(filter(None, found)))
