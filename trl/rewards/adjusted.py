"""A preference score with what it misses taken off: a penalty for short texts, a guard against gibberish."""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from trl.rewards.classifiers import TextClassifier

Reward = Callable[..., Sequence[float | None]]
NanPolicy = Literal["strict", "renormalise"]


class AdjustedReward:
    """``reward - length_penalty * missing words - gibberish_penalty * P(gibberish)``.

    A reward model that was trained on whole summaries can be talked into high scores by texts that are too short or
    not language at all; both adjustments are off unless asked for. After a call, ``parts`` holds what each sample got
    of every part, under ``reward/*``, NaN for "no verdict".

    Args:
        reward: scores prompts and completions; its None (no verdict) stays None.
        length_penalty: taken off for every word that a completion has less than ``min_words``.
        guard: a text classifier; ``clean_label`` is its class of sound language.
        gibberish_penalty: taken off, times the guard's probability of everything but ``clean_label``.
        nan_policy: where the guard gives no verdict: "strict" leaves the sample out, "renormalise" only the guard.

    Raises:
        ValueError: a negative penalty, an unknown policy, a guard without that label.
    """

    def __init__(
        self,
        reward: Reward,
        *,
        length_penalty: float = 0.0,
        min_words: int = 20,
        guard: "TextClassifier | None" = None,
        clean_label: str = "clean",
        gibberish_penalty: float = 1.0,
        nan_policy: NanPolicy = "strict",
    ):
        if length_penalty < 0 or gibberish_penalty < 0 or min_words < 0:
            raise ValueError(
                f"length_penalty is {length_penalty}, gibberish_penalty {gibberish_penalty} and min_words {min_words}; "
                "expected 0 or more, they are taken off the reward"
            )
        if nan_policy not in get_args(NanPolicy):
            raise ValueError(f"nan_policy is {nan_policy!r}; expected one of {', '.join(get_args(NanPolicy))}")
        self._reward, self._guard, self._nan_policy = reward, guard, nan_policy
        self._length_penalty, self._min_words, self._gibberish_penalty = length_penalty, min_words, gibberish_penalty
        self._clean = guard.label_index([clean_label]) if guard is not None else 0
        self.parts: dict[str, list[float]] = {}

    def __call__(self, *, prompts: Sequence[str], completions: Sequence[str], **columns: object) -> list[float | None]:
        """One number per completion, None for "no verdict"."""
        scores = self._reward(prompts=prompts, completions=completions, **columns)
        missing = [max(0, self._min_words - len(text.split())) for text in completions]
        short = [self._length_penalty * count for count in missing]
        gibberish = [None if p is None else self._gibberish_penalty * p for p in self._gibberish(completions)]
        parts: dict[str, Sequence[float | None]] = {"reward/preference": scores}
        if self._length_penalty:
            parts["reward/length_penalty"] = short
        if self._guard is not None:
            parts["reward/gibberish_penalty"] = gibberish
        self.parts = {name: [math.nan if v is None else v for v in values] for name, values in parts.items()}
        totals: list[float | None] = []
        for score, words, noise in zip(scores, short, gibberish, strict=True):
            if noise is None and self._nan_policy == "renormalise":
                noise = 0.0
            totals.append(None if score is None or noise is None else score - words - noise)
        return totals

    def _gibberish(self, texts: Sequence[str]) -> list[float | None]:
        if self._guard is None:
            return [0.0] * len(texts)
        clean = self._guard.logits(texts).softmax(dim=1)[:, self._clean].tolist()
        return [None if math.isnan(p) else 1 - p for p in clean]
