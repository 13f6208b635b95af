"""Trying a reward configuration before a run is spent on it: what each reward gives, and what is wrong with it."""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trl.data.tuning_rows import TuningRow, prompt_text
from trl.jsonl import DataFileError, is_text, read_jsonl
from trl.rewards.composite import ComponentResult, SampleResult
from trl.rewards.scoring import HIGHEST, LOWEST, clipped

Verdict = Literal["OK", "partial", "error"]
Warning = Literal["too_hard", "too_easy", "constant", "clipped"]

SAME = 0.01
"""Rewards that differ by less are the same."""
ALMOST_ALL = 0.95
FEWEST = 5
"""Rewards that it takes to say that they are always the same."""
_BATCH = 8


@dataclass(frozen=True)
class RewardReport:
    """What one reward did on all samples."""

    verdict: Verdict
    """OK: a reward for every sample; partial: for some; error: for none."""
    rewards: list[float]
    """Of the samples that got one."""
    n: int
    """Samples."""
    errors: dict[str, int]
    """How many samples got none, by reason."""
    seconds: float
    warnings: list[Warning]
    unclipped: tuple[float, float] | None
    """Lowest and highest before clipping."""

    def as_json(self) -> dict[str, Any]:
        """Plain JSON types; mean, min and max are None without any reward."""
        given = self.rewards
        return {
            "verdict": self.verdict,
            "mean": statistics.fmean(given) if given else None,
            "min": min(given, default=None),
            "max": max(given, default=None),
            "n": self.n,
            "errors": self.errors,
            "seconds": round(self.seconds, 3),
            "warnings": self.warnings,
        }


@dataclass(frozen=True)
class Report:
    """What a configuration did on all samples."""

    verdict: Verdict
    """OK: nothing failed; error: nothing worked; partial: anything else."""
    totals: list[float]
    """Of the samples that got one."""
    rewards: dict[str, RewardReport]

    def as_json(self) -> dict[str, Any]:
        """``overall`` is the mean total, None without any."""
        return {
            "verdict": self.verdict,
            "overall": statistics.fmean(self.totals) if self.totals else None,
            "rewards": {name: report.as_json() for name, report in self.rewards.items()},
        }


def report_of(results: Sequence[SampleResult], scales: Mapping[str, tuple[float, float]] | None = None) -> Report:
    """Judge the results of at least one sample.

    ``scales``: wrong and correct answer's reward of the rewards that have only these two.
    """
    columns = zip(*(result.components for result in results), strict=True)
    rewards = {column[0].name: _report(column, (scales or {}).get(column[0].name)) for column in columns}
    verdicts = {report.verdict for report in rewards.values()}
    totals = [result.reward for result in results if not math.isnan(result.reward)]
    verdict: Verdict = "partial" if len(verdicts) > 1 else next(iter(verdicts))
    return Report(verdict, totals, rewards)


def _report(column: Sequence[ComponentResult], scale: tuple[float, float] | None) -> RewardReport:
    given = [each for each in column if each.error is None]
    rewards = [each.reward for each in given]
    raw = [each.unclipped for each in given]
    warnings: list[Warning] = []
    if (level := _level(rewards, scale)) is not None:
        warnings.append(level)
    if any(not LOWEST <= value <= HIGHEST for value in raw):
        warnings.append("clipped")
    return RewardReport(
        verdict="OK" if len(given) == len(column) else "partial" if given else "error",
        rewards=rewards,
        n=len(column),
        errors=dict(Counter(str(each.error) for each in column if each.error is not None).most_common()),
        seconds=max(each.seconds for each in column),
        warnings=warnings,
        unclipped=(min(raw), max(raw)) if raw else None,
    )


def _level(rewards: Sequence[float], scale: tuple[float, float] | None) -> Warning | None:
    """Whether the rewards are (almost) always the same, and whether that is the wrong or the right answer's.

    Where the scale is not known, 0 and less is the wrong answer's and 1 the right one's.
    """
    if len(rewards) < FEWEST:
        return None
    usual = statistics.median_low(rewards)
    if sum(abs(reward - usual) <= SAME for reward in rewards) < ALMOST_ALL * len(rewards):
        return None
    wrong, correct = (clipped(end) for end in scale or (0.0, HIGHEST))
    if wrong == correct:
        return "constant"
    if abs(usual - wrong) <= SAME or (scale is None and usual < 0):
        return "too_hard"
    return "too_easy" if abs(usual - correct) <= SAME else "constant"


def read_responses(path: str | Path, count: int) -> list[str]:
    """The first ``count`` texts of a file with rows ``{"response": "…"}``. Raises DataFileError."""
    rows = read_jsonl(path)
    for number, row in enumerate(rows, start=1):
        if not is_text(row.get("response")):
            raise DataFileError(f'{path}, row {number}: expected {{"response": "…"}}, got {ascii(row)[:80]}')
    if len(rows) < count:
        raise DataFileError(
            f"{path}: has {len(rows)} responses; expected one for each of the first {count} data rows, in their order"
        )
    return [row["response"] for row in rows[:count]]


def sample_responses(name: str, rows: Sequence[TuningRow], *, max_new_tokens: int, seed: int) -> list[str]:
    """One sampled response per row, from a causal LM (hub id, folder or ``builtin:``), through its chat template."""
    from trl.generation import Sampling, batch_seed, load_causal_lm, sample_continuations

    model, tokenizer = load_causal_lm(name)
    prompts = [prompt_text(row, tokenizer) for row in rows]
    sampling = Sampling(max_new_tokens=max_new_tokens)
    responses: list[str] = []
    for start in range(0, len(prompts), _BATCH):
        chunk = prompts[start : start + _BATCH]
        texts = sample_continuations(model, tokenizer, chunk, sampling, seed=batch_seed(seed, start // _BATCH))
        responses += [text for (text,) in texts]
    return responses
