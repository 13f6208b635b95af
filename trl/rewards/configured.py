"""Rewards from a configuration file: ``load_reward("reward.json")`` gives a reward function like any other."""

import contextlib
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

from trl.rewards.autorater import AutoraterReward, Judge, JudgeSettings
from trl.rewards.cloud_run import CloudRunReward
from trl.rewards.composite import NanPolicy
from trl.rewards.config_file import LocatedReward, RewardConfigError, read_config
from trl.rewards.patterns import Patterns
from trl.rewards.placeholders import PROMPT_FIELDS, names_in
from trl.rewards.reward_function import ConfiguredReward
from trl.rewards.scoring import Scorer
from trl.rewards.string_match import StringMatchReward

logger = logging.getLogger(__name__)


def load_reward(
    path_or_dict: str | Path | Mapping[str, Any],
    *,
    nan_policy: NanPolicy = "strict",
    timeout: float | None = None,
    base_url: str | None = None,
    judge: JudgeSettings | None = None,
    allow_http: bool = False,
    tuning_job_id: int = 0,
) -> ConfiguredReward:
    """The reward function that a configuration describes.

    Args:
        path_or_dict: JSON file (``.json``), YAML file (any other name), or what such a file holds.
        nan_policy: what a reward that can't be computed does to a sample of a composite. strict: the sample has
            none; renormalise: the others make up its total.
        timeout: seconds for one evaluation by a judge, snippet or service; None: 60, 100 and 300.
        base_url: the judge's endpoint; None: OPENAI_BASE_URL from the environment, else OpenAI.
        judge: limits and cache of the judges.
        allow_http: let a service be asked over plain http on another machine.
        tuning_job_id: what services are told.

    Raises:
        RewardConfigError: the configuration can't be used; the message has the JSON path.
        EndpointAuthError: a judge without key and endpoint.
        OSError: the file can't be read.
    """
    if nan_policy not in get_args(NanPolicy):
        raise ValueError(f"nan_policy is {nan_policy!r}; expected one of {', '.join(get_args(NanPolicy))}")
    if timeout is not None and not 0 < timeout < math.inf:
        raise ValueError(f"timeout is {timeout}; expected seconds, more than 0")
    source = "reward configuration" if isinstance(path_or_dict, Mapping) else str(path_or_dict)
    rewards = read_config(path_or_dict)
    for each in rewards:
        for where, template in each.config.templates:
            known = PROMPT_FIELDS if where.endswith("autoraterPrompt") else ()
            for name in names_in(template):
                if name not in known and not name.startswith("references."):
                    logger.warning(
                        "%s: %s.%s: {{%s}} is no placeholder and stays as it is", source, each.path, where, name
                    )
    services = _Services(source, timeout, base_url, judge or JudgeSettings(), allow_http, tuning_job_id)
    services.snippets = sum(each.config.code_execution_reward_scorer is not None for each in rewards)
    with contextlib.ExitStack() as undo:  # what one reward opened is closed when another can't be made
        scorers = []
        for each in rewards:
            scorers.append(services.scorer(each))
            undo.callback(scorers[-1].close)
        undo.pop_all()
    return ConfiguredReward(rewards, scorers, services.patterns, nan_policy, source)


@dataclass
class _Services:
    """What the scorers of one configuration are made with."""

    source: str
    timeout: float | None
    base_url: str | None
    judge: JudgeSettings
    allow_http: bool
    tuning_job_id: int
    judges: dict[str, Judge] = field(default_factory=dict)
    """By model: rewards that ask the same model share its limits."""
    patterns: Patterns = field(default_factory=Patterns)
    snippets: int = 0
    """Of the whole configuration; they share the cores."""

    def scorer(self, reward: LocatedReward) -> Scorer:
        """The scorer of one reward. Raises RewardConfigError."""
        config = reward.config
        if config.string_match_reward_scorer is not None:
            return StringMatchReward(config.string_match_reward_scorer, self.patterns)
        if config.autorater_scorer is not None:
            model = config.autorater_scorer.autorater_config.autorater_model
            if model not in self.judges:
                self.judges[model] = Judge(model, self.base_url, self.timeout, self.judge)
            return AutoraterReward(config.autorater_scorer, self.judges[model], self.patterns)
        if config.cloud_run_reward_scorer is not None:
            uri = config.cloud_run_reward_scorer.cloud_run_uri
            try:
                return CloudRunReward(
                    uri, timeout=self.timeout, allow_http=self.allow_http, tuning_job_id=self.tuning_job_id
                )
            except ValueError as error:
                where = f"{reward.path}.cloudRunRewardScorer.cloudRunUri"
                raise RewardConfigError(where, str(error), self.source) from None
        if config.code_execution_reward_scorer is not None:
            from trl.rewards.code_execution import CodeExecutionReward

            snippet = config.code_execution_reward_scorer.python_code_snippet
            try:
                return CodeExecutionReward(snippet, self.timeout, sharers=self.snippets)
            except ValueError as error:
                where = f"{reward.path}.codeExecutionRewardScorer.pythonCodeSnippet"
                raise RewardConfigError(where, str(error), self.source) from None
        raise ValueError("the schema guarantees one scorer")
