"""Several rewards of one batch side by side, and the total of each sample."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import ThreadPool
from typing import Literal

from trl.rewards.config_file import sum_is_zero
from trl.rewards.patterns import PatternError, Patterns
from trl.rewards.schema import RewardConfig
from trl.rewards.scoring import Sample, Scorer, Verdict, clipped, failure

NanPolicy = Literal["strict", "renormalise"]


@dataclass(frozen=True)
class ComponentResult:
    """One reward of one sample."""

    name: str
    weight: float
    reward: float
    """In [-1, 1]; NaN where there is none."""
    unclipped: float
    error: str | None
    """Why there is no reward."""
    response: str
    """What of the response was scored."""
    stages: Mapping[str, str]
    """What happened on the way, in order."""
    seconds: float
    """What this reward took for the whole batch."""


@dataclass(frozen=True)
class SampleResult:
    """The total reward of one sample, NaN where there is none, and how it came about."""

    reward: float
    error: str | None
    components: tuple[ComponentResult, ...]


class Component:
    """One configured reward: what of a response it scores, by which scorer, with which weight."""

    def __init__(self, config: RewardConfig, weight: float, scorer: Scorer, patterns: Patterns) -> None:
        self.name, self.weight, self.scorer = config.reward_name, weight, scorer
        self._parse, self._patterns = config.parse_response_config.regex, patterns

    def evaluate(self, samples: Sequence[Sample]) -> list[ComponentResult]:
        """One result per sample, in order."""
        begin = time.perf_counter()
        parsed = [self._parsed(sample) for sample in samples]
        usable = [sample for sample in parsed if isinstance(sample, Sample)]
        verdicts = iter(self.scorer.score(usable))
        judged = [next(verdicts) if isinstance(sample, Sample) else sample for sample in parsed]
        seconds = time.perf_counter() - begin
        return [
            ComponentResult(
                name=self.name,
                weight=self.weight,
                reward=clipped(verdict.value),
                unclipped=verdict.value,
                error=verdict.error,
                response=sample.response if isinstance(sample, Sample) else "",
                stages=verdict.stages,
                seconds=seconds,
            )
            for sample, verdict in zip(parsed, judged, strict=True)
        ]

    def _parsed(self, sample: Sample) -> Sample | Verdict:
        """The sample with the part of its response that counts; a failure where finding it took too long."""
        if self._parse is None:
            return sample
        try:
            found = self._patterns.last_match(self._parse, sample.response)
        except PatternError as error:
            return failure(str(error))
        return replace(sample, response=found or "", extracted=found is not None)


def evaluate(
    components: Sequence[Component], samples: Sequence[Sample], policy: NanPolicy, pool: ThreadPool
) -> list[SampleResult]:
    """All components at once, so that the batch takes as long as the slowest of them; results in order."""
    columns = pool.map(lambda component: component.evaluate(samples), components, chunksize=1)
    return [_total(results, policy) for results in zip(*columns, strict=True)]


def _total(results: tuple[ComponentResult, ...], policy: NanPolicy) -> SampleResult:
    rewards, weights = [each.reward for each in results], [each.weight for each in results]
    total = weighted_mean(rewards, weights, policy)
    if not math.isnan(total):
        return SampleResult(total, None, results)
    reasons = [f"{each.name}: {each.error}" if len(results) > 1 else str(each.error) for each in results if each.error]
    return SampleResult(total, "; ".join(reasons) or "the remaining weights sum to 0", results)


def weighted_mean(rewards: Sequence[float], weights: Sequence[float], policy: NanPolicy) -> float:
    """Σ wᵢrᵢ / Σ wᵢ. A NaN makes it NaN ("strict"), or is left out of both sums ("renormalise").

    NaN also where nothing is left, or the weights of what is left sum to 0.
    """
    kept = [(r, w) for r, w in zip(rewards, weights, strict=True) if not (policy == "renormalise" and math.isnan(r))]
    if sum_is_zero([w for _, w in kept]):
        return math.nan
    _, exponent = math.frexp(max(abs(w) for _, w in kept))
    scaled = [(r, math.ldexp(w, -exponent)) for r, w in kept]  # exact, and neither too small nor too large to sum
    return math.fsum(r * w for r, w in scaled) / math.fsum(w for _, w in scaled)
