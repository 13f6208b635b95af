"""Quoted spans → one reward per sampled response token.

A critic quotes text; the reward belongs to the tokens that wrote it. Quotes are searched in the text of
query + response, and a token is hit when its characters overlap the quote's (see ``token_text``).
Method: "Enhancing Reinforcement Learning with Dense Rewards from Language Model Critic" (EMNLP 2024).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trl.critic.decoders import Range
from trl.critic.locate import Occurrence, locate
from trl.critic.template import single_line
from trl.critic.token_text import token_ranges
from trl.critic.types import Span

__all__ = ["RewardMode", "SpanRewards", "critic_text", "span_rewards", "token_ranges"]

RewardMode = Literal["each", "spread"]


@dataclass(frozen=True)
class SpanRewards:
    """Where the spans of one critique lie and what they are worth. N is the number of response tokens."""

    rewards: Tensor
    """(N,) float32, CPU."""
    matched: int
    """Quoted spans found in query or response; the same text quoted twice counts once."""
    unmatched: tuple[Span, ...]
    """Quotes that are nowhere in the text."""
    text: str
    """Query + response as the critic saw it: no special tokens, line breaks as spaces."""
    ranges: tuple[Range, ...]
    """(N) character range of each response token in ``text``."""
    covered: Tensor
    """(N,) bool: inside a matched span of either sign, whatever its value; also the blanks inside it."""
    visible: Tensor
    """(N,) bool: False for tokens that show no character (special tokens, ids outside the vocabulary)."""

    @property
    def token_texts(self) -> tuple[str, ...]:
        """Text of each response token; a character shared by several tokens is given to the first."""
        texts = []
        shown = 0
        for start, end in self.ranges:
            texts.append(self.text[max(start, shown) : end])
            shown = max(shown, end)
        return tuple(texts)


def critic_text(
    query_ids: Sequence[int] | Tensor,
    response_ids: Sequence[int] | Tensor,
    tokenizer: PreTrainedTokenizerBase,
) -> str:
    """The text to show the critic: ids decoded together, special tokens left out, line breaks as spaces."""
    return single_line(token_ranges([*_as_list(query_ids), *_as_list(response_ids)], tokenizer)[0])


def span_rewards(
    spans: Sequence[Span],
    query_ids: Sequence[int] | Tensor,
    response_ids: Sequence[int] | Tensor,
    tokenizer: PreTrainedTokenizerBase,
    *,
    positive_value: float,
    negative_value: float,
    mode: RewardMode = "each",
) -> SpanRewards:
    """Give the response tokens inside quoted spans their reward; all others get 0.

    The first of these ways to find a quote that finds any decides, and all its finds count: as whole words;
    as whole words after folding case, white space and quotation marks; inside words; folded inside words.
    Where spans overlap, the shorter one decides token by token, of two equally long ones the negative one.

    Args:
        spans: what the critic quoted.
        query_ids: (Q,) prompt token ids, padding allowed; pass none if the critic saw only the response.
        response_ids: (N,) sampled token ids.
        positive_value: reward of a token in a positive span.
        negative_value: reward of a token in a negative span.
        mode: "each" gives every token of a span its value, "spread" divides the value over the tokens that
            an occurrence holds in the response, so that long spans don't earn more.

    Raises:
        ValueError: unknown mode, or ids that are not one-dimensional.
    """
    if mode not in ("each", "spread"):
        raise ValueError(f"mode is {mode!r}; expected 'each' or 'spread'")
    query, response = _as_list(query_ids), _as_list(response_ids)
    raw_text, all_ranges = token_ranges([*query, *response], tokenizer)
    text = single_line(raw_text)
    ranges = all_ranges[len(query) :]

    occurrences, matched, unmatched = locate(spans, text)
    # Longest first, so that what is painted later wins: shorter spans, and negative ones of equal length.
    occurrences.sort(key=lambda found: (found.start - found.end, found.polarity == "negative"))
    holder = [-1] * len(ranges)
    covered = [False] * len(ranges)
    words = [_without_leading_space(text, token) for token in ranges]
    for number, found in enumerate(occurrences):
        for n in range(len(ranges)):
            covered[n] = covered[n] or _overlap(ranges[n], found)
            if _overlap(words[n], found):
                holder[n] = number

    value = {"positive": positive_value, "negative": negative_value}
    held = [holder.count(number) if mode == "spread" else 1 for number in range(len(occurrences))]
    rewards = [value[occurrences[number].polarity] / held[number] if number >= 0 else 0.0 for number in holder]
    return SpanRewards(
        rewards=torch.tensor(rewards, dtype=torch.float32),
        matched=matched,
        unmatched=tuple(unmatched),
        text=text,
        ranges=tuple(ranges),
        covered=torch.tensor(covered, dtype=torch.bool),
        visible=torch.tensor([start < end for start, end in ranges], dtype=torch.bool),
    )


def _as_list(ids: Sequence[int] | Tensor) -> list[int]:
    if isinstance(ids, Tensor):
        if ids.dim() != 1:
            raise ValueError(f"token ids have shape {tuple(ids.shape)}; expected one sequence, shape (N,)")
        return [int(i) for i in ids.tolist()]
    return [int(i) for i in ids]


def _overlap(token: Range, found: Occurrence) -> bool:
    return max(token[0], found.start) < min(token[1], found.end)


def _without_leading_space(text: str, token: Range) -> Range:
    start, end = token
    while start < end and text[start].isspace():
        start += 1
    return start, end
