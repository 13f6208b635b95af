"""What the two summarization scripts share: their settings, and an environment that is asked by document."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl.run import CriticKind, RunArgs, check_lengths

Reward = Callable[..., Sequence[float | None]]


@dataclass
class SummaryArgs(RunArgs):
    """Settings that the summarization scripts have besides `RunArgs`."""

    prompt_file: str = "prompts/prompt_summ_3shot_rouge_v2.txt"
    """Few-shot prompt of the critic (openai, local): document, summary and score out of 10."""
    intrinsic_reward_threshold: float = 100.0
    """The critic is asked where the environment's raw score is at or below this."""
    critic_score_bounds: tuple[float, float] = (0.0, 100.0)
    """The environment's scores that the critic is shown as 0 and 10; linear between them, cut off beyond."""
    output_min_length: int = 30
    """Shortest summary in tokens, unless the model ends earlier."""
    output_max_length: int = 50
    """Longest summary in tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_lengths(self.output_min_length, self.output_max_length)
        low, high = self.critic_score_bounds
        if not low < high:
            raise ValueError(f"--critic_score_bounds are {low} and {high}; expected the lower one first")

    @property
    def default_critic_kind(self) -> CriticKind:
        """The small built-in model is of no use as a critic of summaries; the reward itself is."""
        is_builtin = self.preset == "builtin" or (self.ppo_config.model_name or "").startswith("builtin:")
        return "attribution" if is_builtin and self.critic_replay is None else super().default_critic_kind


def of_documents(reward: Reward, rows: Sequence[Mapping[str, Any]]) -> Reward:
    """``reward`` as a function of ``prompts`` (here: documents) and ``completions`` alone.

    The policy's prompt and the human summary are found by document, so that the attribution critic, which knows
    documents only, asks for the same reward that the environment gives. A document that occurs several times is
    scored against all of its human summaries (`RougeReward`: the best match counts).

    Args:
        reward: called with keyword lists ``prompts``, ``completions`` and ``references`` (lists of texts).
        rows: ``query``, ``label`` and ``document`` of each sample, see `trl.data.summarization`.
    """
    queries: dict[str, str] = {}
    references: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for row in rows:
        queries.setdefault(row["document"], row["query"])
        references[row["document"]][row["label"]] = None

    def of(*, prompts: Sequence[str], completions: Sequence[str], **_ignored: object) -> Sequence[float | None]:
        return reward(
            prompts=[queries[document] for document in prompts],
            completions=completions,
            references=[list(references[document]) for document in prompts],
        )

    return of
