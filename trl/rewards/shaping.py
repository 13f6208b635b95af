"""Rewards for form: reasoning tags, repetition, length. No model and no solution is asked.

Needs only the standard library, so that this file can also be loaded by its path where ``trl`` is another
library, and its functions given to that library's trainers as ``reward_funcs``. Reward by length *and* rightness:
``get_cosine_scaled_reward`` in accuracy.py. One reward per token: dense.py.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

Completion = str | Sequence[Mapping[str, object]]


@dataclass(frozen=True)
class _ThinkFormatReward:
    prefilled: bool
    __name__: ClassVar[str] = "think_format_reward"  # trainers that take a list of reward functions report by this

    def __call__(self, completions: Sequence[Completion], **_ignored: object) -> list[float | None]:
        """One reward per completion."""
        opened = "<think>" if self.prefilled else ""
        texts = [opened + _text(completion, sample) for sample, completion in enumerate(completions)]
        return [
            float(text.startswith("<think>") and text.count("<think>") == 1 and "</think>" in text) for text in texts
        ]


def think_format_reward(completions: Sequence[Completion], **_ignored: object) -> list[float | None]:
    """1.0 where a text starts with ``<think>``, has no further ``<think>`` and a ``</think>``; else 0.0.

    What follows ``</think>`` may be anything, or nothing. ``completions`` are texts or conversations, whose last
    message is judged. Raises ``ValueError`` naming a completion of another form.
    """
    return _ThinkFormatReward(prefilled=False)(completions)


def get_think_format_reward(prefilled: bool = False) -> Callable[..., list[float | None]]:
    """``think_format_reward``; with ``prefilled`` for chat templates whose prompt ends with the opening tag already.

    The completion then holds no opening tag at all. The callable takes ``completions`` and can be pickled.
    """
    return _ThinkFormatReward(prefilled)


@dataclass(frozen=True)
class _RepetitionPenaltyReward:
    ngram_size: int
    max_penalty: float
    __name__: ClassVar[str] = "repetition_penalty_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_ignored: object) -> list[float | None]:
        """One reward of ``max_penalty`` … 0 per completion. ``completion_ids``: (B,) lists of token ids."""
        return [self._penalty(ids) for ids in completion_ids]

    def _penalty(self, ids: Sequence[int]) -> float:
        repeats, total = repeated_ngrams(ids, self.ngram_size)
        return self.max_penalty * len(repeats) / total if repeats else 0.0


def get_repetition_penalty_reward(ngram_size: int = 3, max_penalty: float = -1.0) -> Callable[..., list[float | None]]:
    """``max_penalty`` times the share of n-grams of token ids that occurred before in the same completion.

    Completions of less than ``ngram_size`` tokens get 0. Source: Yeo et al. 2025, Demystifying Long Chain-of-Thought
    Reasoning, appendix C.2, without its trade of penalty against length.

    The callable takes ``completion_ids`` and can be pickled. Raises ``ValueError`` naming an argument out of range.
    """
    check_repetition_arguments(ngram_size, max_penalty)
    return _RepetitionPenaltyReward(ngram_size, max_penalty)


def check_repetition_arguments(ngram_size: int, max_penalty: float) -> None:
    if not (isinstance(ngram_size, int) and ngram_size >= 1):
        raise ValueError(f"ngram_size is {ngram_size!r}; expected a whole number of at least 1")
    if not -math.inf < max_penalty <= 0:
        raise ValueError(f"max_penalty is {max_penalty!r}; expected a finite number of at most 0")


def repeated_ngrams(ids: Sequence[int], ngram_size: int) -> tuple[list[int], int]:
    """Where an n-gram starts that occurred before, and how many n-grams there are.

    ``ids`` (N,) may be a list, or a 1-D tensor of integers.
    """
    tokens = [int(token) for token in ids]  # elements of a tensor are never equal as dictionary keys
    ngrams = list(zip(*(tokens[i:] for i in range(ngram_size)), strict=False))
    first: dict[tuple[int, ...], int] = {}
    return [i for i, ngram in enumerate(ngrams) if first.setdefault(ngram, i) != i], len(ngrams)


@dataclass(frozen=True)
class _SoftOverlongPunishment:
    max_completion_len: int
    soft_punish_cache: int
    __name__: ClassVar[str] = "soft_overlong_punishment_reward"

    def __call__(self, completion_ids: Sequence[Sequence[int]], **_ignored: object) -> list[float | None]:
        """One reward of -1 … 0 per completion. ``completion_ids``: (B,) lists of token ids."""
        return [self._punishment(len(ids)) for ids in completion_ids]

    def _punishment(self, length: int) -> float:
        free = self.max_completion_len - self.soft_punish_cache
        if length <= free:
            return 0.0
        if length > self.max_completion_len:
            return -1.0
        return (free - length) / self.soft_punish_cache


def get_soft_overlong_punishment(max_completion_len: int, soft_punish_cache: int) -> Callable[..., list[float | None]]:
    """0 for completions of up to L - C tokens, then falling evenly to -1 at L tokens, -1 beyond.

    L is ``max_completion_len``, C is ``soft_punish_cache``, in tokens; C = 0 is a hard cut after L. Source: Yu et al.
    2025, DAPO, equation 13.

    The callable takes ``completion_ids`` and can be pickled. Raises ``ValueError`` naming an argument out of range.
    """
    check_overlong_arguments(max_completion_len, soft_punish_cache)
    return _SoftOverlongPunishment(max_completion_len, soft_punish_cache)


def check_overlong_arguments(max_completion_len: int, soft_punish_cache: int) -> None:
    if not (isinstance(max_completion_len, int) and max_completion_len >= 0):
        raise ValueError(f"max_completion_len is {max_completion_len!r}; expected a whole number of at least 0")
    if not (isinstance(soft_punish_cache, int) and 0 <= soft_punish_cache <= max_completion_len):
        raise ValueError(
            f"soft_punish_cache is {soft_punish_cache!r}; expected a whole number from 0 to max_completion_len "
            f"({max_completion_len})"
        )


def _text(completion: Completion, sample: int) -> str:
    """The completion itself, or the content of its last message."""
    match completion:
        case str():
            return completion
        case [*_, {"content": str() as text}]:
            return text
    raise ValueError(
        f"completions[{sample}] is {completion!r:.100}; expected a string or a list of messages like "
        '{"role": "assistant", "content": "…"}'
    )
