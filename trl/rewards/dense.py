"""Shaping rewards on the tokens that earn them: one reward per response token instead of one per response.

Each vector sums to what the scalar function in shaping.py gives, so the totals of a run stay comparable, and can be
given to ``PPOTrainer.step`` as a score, alone or added to other token rewards.
"""

from collections.abc import Sequence

from trl.rewards.shaping import check_overlong_arguments, check_repetition_arguments, repeated_ngrams


def token_repetition_penalty(
    completion_ids: Sequence[Sequence[int]], ngram_size: int = 3, max_penalty: float = -1.0
) -> list[list[float]]:
    """``get_repetition_penalty_reward`` on the tokens of the repeats: (B,) lists of one float per token.

    Each n-gram that occurred before takes an equal part of the completion's penalty and divides it equally over its
    ``ngram_size`` tokens, so tokens that overlapping repeats share carry more. First occurrences carry nothing.

    ``completion_ids``: (B,) lists or 1-D integer tensors. Raises ``ValueError`` naming an argument out of range.
    """
    check_repetition_arguments(ngram_size, max_penalty)
    rewards = []
    for ids in completion_ids:
        vector = [0.0] * len(ids)
        repeats, total = repeated_ngrams(ids, ngram_size)
        for start in repeats:
            for position in range(start, start + ngram_size):
                vector[position] += max_penalty / (total * ngram_size)
        rewards.append(vector)
    return rewards


def token_overlong(
    completion_ids: Sequence[Sequence[int]], max_completion_len: int, soft_punish_cache: int
) -> list[list[float]]:
    """``get_soft_overlong_punishment`` on the tokens past L - C: (B,) lists of one float per token.

    Token t carries what the curve loses from length t - 1 to t: -1/C on each of the C tokens up to L, nothing before
    and after; with C = 0, -1 on the first token past L.

    ``completion_ids``: (B,) lists or 1-D tensors. Raises ``ValueError`` naming an argument out of range.
    """
    check_overlong_arguments(max_completion_len, soft_punish_cache)
    free = max_completion_len - soft_punish_cache
    slope = [-1.0 / soft_punish_cache] * soft_punish_cache if soft_punish_cache else [-1.0]
    rewards = []
    for ids in completion_ids:
        past = len(ids) - free - len(slope)
        rewards.append(([0.0] * free + slope + [0.0] * max(past, 0))[: len(ids)])
    return rewards
