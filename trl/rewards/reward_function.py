"""The reward function that a configuration describes."""

import functools
import logging
import math
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from multiprocessing.pool import AsyncResult, ThreadPool
from types import TracebackType
from typing import Any, Self

from trl.rewards.composite import Component, NanPolicy, SampleResult, evaluate
from trl.rewards.config_file import LocatedReward, RewardConfigError
from trl.rewards.fuse import RewardFuse
from trl.rewards.patterns import Patterns
from trl.rewards.placeholders import reference_keys
from trl.rewards.samples import make_samples
from trl.rewards.scoring import Scorer

logger = logging.getLogger(__name__)


class PendingReward:
    """Rewards on their way. Each access waits for the work; its exceptions are raised there."""

    def __init__(self, outcome: "AsyncResult[list[SampleResult]]") -> None:
        self._outcome = outcome

    def result(self) -> list[float]:
        """The reward of each sample, NaN where there is none. Pass this method itself to ``PPOTrainer.step``."""
        return [each.reward for each in self.details]

    @property
    def details(self) -> list[SampleResult]:
        """How each reward came about."""
        return self._outcome.get()

    @property
    def columns(self) -> dict[str, list[float]]:
        """Of each reward and sample ``reward/NAME``, NaN where there is none, and ``reward_failed/NAME``, 1 or 0.

        For means over all processes; ``stats`` has this process's.
        """
        columns: dict[str, list[float]] = {}
        for column in zip(*(result.components for result in self.details), strict=True):
            columns[f"reward/{column[0].name}"] = [each.reward for each in column]
            columns[f"reward_failed/{column[0].name}"] = [float(math.isnan(each.reward)) for each in column]
        return columns

    @property
    def stats(self) -> dict[str, float]:
        """``reward/NAME`` (mean of what there is) and ``reward_failed/NAME`` (share of samples) of each reward."""
        given = {name: [v for v in values if not math.isnan(v)] for name, values in self.columns.items()}
        return {name: math.fsum(values) / len(values) if values else math.nan for name, values in given.items()}


class ConfiguredReward:
    """The rewards of one configuration as one reward function; made by :func:`load_reward`.

    ``errors`` counts the reasons of missing rewards. :meth:`details` and :meth:`submit` take the same columns as a
    call:

    - completions: the responses, plain strings or conversations.
    - references: one dict per response, for ``{{references.key}}``, snippets and services.
    - prompts, system_instruction: what was asked, as strings (prompts also as conversations).
    - examples: whole data rows, where there are such; snippets and services get them as they are, in camelCase.
    - step: the training step, which services are told; without it calls are counted.

    All other keywords are ignored.
    """

    def __init__(
        self,
        rewards: Sequence[LocatedReward],
        scorers: Sequence[Scorer],
        patterns: Patterns,
        nan_policy: NanPolicy,
        source: str,
    ) -> None:
        self._rewards, self._patterns, self._policy, self._source = rewards, patterns, nan_policy, source
        self._components = [
            Component(each.config, each.weight, scorer, patterns) for each, scorer in zip(rewards, scorers, strict=True)
        ]
        self.names = tuple(component.name for component in self._components)
        self.errors: Counter[str] = Counter()
        self.__name__ = self.names[0] if len(self.names) == 1 else "composite_reward"  # trainers report by this
        self._fuse = RewardFuse()
        self._lock = threading.Lock()
        self._calls = 0
        # Threads of these pools are daemons: a process that fails elsewhere does not wait for a service.
        self._pool, self._worker = ThreadPool(len(self._components)), ThreadPool(1)

    def __call__(self, completions: Sequence[Any], **columns: Any) -> list[float]:
        """The reward of each response, in order; NaN where there is none.

        Raises:
            RewardConfigError: a row lacks a reference that the configuration names.
            RewardGoneError: more than 80 % of the last samples (100, at least 20) got no reward.
            ValueError: columns of different lengths.
        """
        return [each.reward for each in self._watched(completions, **columns)]

    def submit(self, completions: Sequence[Any], **columns: Any) -> PendingReward:
        """The same call in a background thread, so that the caller can compute meanwhile."""
        return PendingReward(self._worker.apply_async(functools.partial(self._watched, list(completions), **columns)))

    def details(
        self,
        completions: Sequence[Any],
        references: Sequence[Mapping[str, Any] | None] | None = None,
        prompts: Sequence[Any] | None = None,
        system_instruction: Sequence[str | None] | None = None,
        examples: Sequence[Mapping[str, Any]] | None = None,
        step: int | None = None,
        **_ignored: Any,
    ) -> list[SampleResult]:
        """How the reward of each response comes about; nothing is counted towards stopping the run."""
        with self._lock:
            self._calls += 1
            step = self._calls if step is None else step
        samples = make_samples(completions, references, prompts, system_instruction, examples, step)
        self.check([sample.references for sample in samples])
        return evaluate(self._components, samples, self._policy, self._pool)

    @property
    def scales(self) -> dict[str, tuple[float, float]]:
        """The wrong and the right answer's reward, of the rewards that have only these two."""
        scales = {each.config.reward_name: each.config.scale for each in self._rewards}
        return {name: scale for name, scale in scales.items() if scale is not None}

    def check(self, references: Sequence[Mapping[str, Any]]) -> None:
        """Raise RewardConfigError if a row (counted from 1) lacks a reference that the configuration names."""
        for reward in self._rewards:
            for where, template in reward.config.templates:
                needed = set(reference_keys(template))
                for number, row in enumerate(references, start=1):
                    missing = sorted(key for key in needed if row.get(key) is None)
                    if missing:
                        raise RewardConfigError(
                            f"{reward.path}.{where}",
                            f"{{{{references.{missing[0]}}}}} is not defined in row {number}, whose references are: "
                            f"{', '.join(row) or 'none'}",
                            self._source,
                        )

    def close(self) -> None:
        """End threads, processes and connections."""
        for component in self._components:
            component.scorer.close()
        self._patterns.close()
        self._pool.terminate()
        self._worker.terminate()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _watched(self, completions: Sequence[Any], **columns: Any) -> list[SampleResult]:
        results = self.details(completions, **columns)
        failures = Counter(
            f"{each.name}: {each.error}" for result in results for each in result.components if each.error is not None
        )
        with self._lock:
            for reason in failures.keys() - self.errors.keys():
                if len(self.errors) < 20:  # snippets can word each failure differently
                    logger.warning("no reward: %s", reason)
            self.errors.update(failures)
        self._fuse.record(results)
        return results
