"""IntrinsicReward: a batch of responses → which to critique → critiques → one reward per token."""

import copy
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.pool import AsyncResult, ThreadPool
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from trl.critic import statistics
from trl.critic.align import RewardMode, SpanRewards, span_rewards
from trl.critic.log import CritiqueLog
from trl.critic.types import Critic, Critique, CritiqueRequest, Style

_SKIPPED = Critique(spans=(), status="skipped")


@dataclass(frozen=True)
class _Outcome:
    rewards: list[Tensor]
    critiques: list[Critique]
    tally: statistics.Tally


class PendingIntrinsic:
    """Intrinsic rewards on their way. Each access waits for the work; its exceptions are raised there."""

    def __init__(self, outcome: "AsyncResult[_Outcome]") -> None:
        self._outcome = outcome

    def result(self) -> list[Tensor]:
        """The reward of each response token: one (N_i,) float32 CPU tensor per response."""
        return self._outcome.get().rewards

    @property
    def critiques(self) -> list[Critique]:
        """One per response, in order; status "skipped" where the critic was not asked."""
        return self._outcome.get().critiques

    @property
    def tally(self) -> statistics.Tally:
        """What ``stats`` is made of, which several processes can put together."""
        return self._outcome.get().tally

    @property
    def stats(self) -> dict[str, float]:
        """``critic/*`` of this process, see :meth:`trl.critic.statistics.Tally.stats`."""
        return self.tally.stats()


class IntrinsicReward:
    """Asks the critic about low-scoring responses and rewards the tokens that it quoted.

    A response is critiqued when its raw score is at or below ``threshold``; not when the score is NaN or it
    shows no text. Tokens in positive spans get ``positive_value``, in negative spans ``negative_value``, all
    others 0. In the styles whose critic marks flaws only (toxicity, summary), ``positive_value`` goes to the
    tokens that no flaw covers. No positive value is given to a response with a flaw that is quoted but not
    there, and nothing at all where the critique is skipped, failed or unparsable. Special tokens get 0.

    Source: "Enhancing Reinforcement Learning with Dense Rewards from Language Model Critic", EMNLP 2024.

    Args:
        critic: any backend. It sees query and response; in the summary style document, response and score.
        tokenizer: the policy's.
        style: the critic's.
        threshold: highest raw score that is critiqued.
        positive_value: reward of a good token.
        negative_value: reward of a bad token (usually negative).
        mode: "each" or "spread", see :func:`trl.critic.span_rewards`.
        score_bounds: scores that the critic is shown as 0 and 10 (the summary style shows it a score out of 10);
            linear between them, cut off beyond. None: shown as they are.
        log_path: file that keeps every critique with its request and rewards, see :class:`trl.critic.log.CritiqueLog`.
        step: says which training step a batch is of, for that file. Default: batches are counted from 1.
    """

    def __init__(
        self,
        critic: Critic,
        tokenizer: PreTrainedTokenizerBase,
        style: Style,
        *,
        threshold: float,
        positive_value: float,
        negative_value: float,
        mode: RewardMode = "each",
        score_bounds: tuple[float, float] | None = None,
        log_path: str | Path | None = None,
        step: Callable[[], int] | None = None,
    ) -> None:
        if style not in get_args(Style):
            raise ValueError(f"style is {style!r}; expected one of {', '.join(get_args(Style))}")
        if mode not in get_args(RewardMode):
            raise ValueError(f"mode is {mode!r}; expected one of {', '.join(get_args(RewardMode))}")
        if math.isnan(threshold):
            raise ValueError("threshold is NaN; expected the highest score that is critiqued")
        if score_bounds is not None and not score_bounds[0] < score_bounds[1]:
            raise ValueError(f"score_bounds is {score_bounds}; expected the lower bound first")
        self.critic, self._style, self._threshold, self._mode = critic, style, threshold, mode
        self._bounds = score_bounds
        # A copy: fast tokenizers raise "Already borrowed" when two threads use one.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._positive, self._negative = positive_value, negative_value
        self._log = None if log_path is None else CritiqueLog(log_path)
        self._step = step or itertools.count(1).__next__
        # Its thread is a daemon: a process that fails elsewhere does not wait for the critic before it ends.
        self._worker = ThreadPool(1)

    def submit(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        scores: Sequence[float] | Tensor | Callable[[], Sequence[float]],
        documents: Sequence[str] | None = None,
    ) -> PendingIntrinsic:
        """Start critiquing in a background thread.

        Args:
            queries: B prompts, each (Q_i,) token ids.
            responses: B sampled responses, each (N_i,) token ids, N_i may be 0.
            scores: B raw environment scores, or a callable that waits for them, called in the thread.
            documents: B source texts, for the summary style.

        Raises:
            ValueError: lengths that differ, or the summary style without documents.
        """
        values = scores if callable(scores) else [float(score) for score in scores]
        lengths = {"queries": len(queries), "responses": len(responses)}
        if not callable(values):
            lengths["scores"] = len(values)
        if documents is not None:
            lengths["documents"] = len(documents)
        elif self._style == "summary":
            raise ValueError("the summary style shows the critic the source text; pass documents")
        if len(set(lengths.values())) > 1:
            raise ValueError(f"submit got different numbers of {lengths}; expected one of each per sample")
        # The caller may reuse its tensors while the thread reads.
        query_ids = [self._shown_query(query) for query in queries]
        response_ids = [response.tolist() for response in responses]
        texts = list(documents) if documents is not None else [None] * len(query_ids)
        work = (self._step(), query_ids, response_ids, values, texts)
        return PendingIntrinsic(self._worker.apply_async(self._work, work))

    def _shown_query(self, query: Tensor) -> list[int]:
        """In the summary style the query is the document, which the critic is shown apart."""
        return [] if self._style == "summary" else query.tolist()

    def request(self, prompt: str, response: str, score: float) -> CritiqueRequest:
        """What the critic is asked about a response to a prompt; in the summary style, about a document's summary."""
        if self._style == "summary":
            return CritiqueRequest(response, document=prompt, score=self._shown_score(score))
        return CritiqueRequest(prompt + response, score=self._shown_score(score), start=len(prompt))

    def _shown_score(self, score: float) -> float:
        """An environment score as the critic is shown it."""
        if self._bounds is None:
            return score
        low, high = self._bounds
        return 10 * (min(max(score, low), high) - low) / (high - low)

    def _work(
        self,
        step: int,
        queries: list[list[int]],
        responses: list[list[int]],
        values: list[float] | Callable[[], Sequence[float]],
        documents: list[str] | list[None],
    ) -> _Outcome:
        scores = [float(score) for score in (values() if callable(values) else values)]
        if len(scores) != len(queries):
            raise ValueError(f"got {len(scores)} scores for {len(queries)} samples; expected one per sample")
        begin = time.perf_counter()
        requests: dict[int, CritiqueRequest] = {}
        for i, score in enumerate(scores):
            if score <= self._threshold:  # False for NaN
                request = self._request(queries[i], responses[i], score, documents[i])
                if request is not None:
                    requests[i] = request
        answers = self.critic.critique(list(requests.values())) if requests else []
        critiques = [_SKIPPED] * len(scores)
        for i, critique in zip(requests, answers, strict=True):
            critiques[i] = critique
        placed = [
            self._place(critique, query, response)
            for critique, query, response in zip(critiques, queries, responses, strict=True)
        ]
        rewards = [self._rewards(*pair) for pair in zip(critiques, placed, strict=True)]
        if self._log is not None and requests:
            self._log.write(step, list(requests.values()), answers, [rewards[i] for i in requests])
        skipped, latency = len(scores) - len(requests), time.perf_counter() - begin
        return _Outcome(rewards, critiques, statistics.of_batch(answers, skipped, placed, rewards, latency))

    def _request(
        self, query: list[int], response: list[int], score: float, document: str | None
    ) -> CritiqueRequest | None:
        """What to ask about one response; None when the response shows no text."""
        unmarked = span_rewards((), query, response, self._tokenizer, positive_value=0, negative_value=0)
        shown = [start for start, end in unmarked.ranges if start < end]
        if not shown or not unmarked.text[shown[0] :].strip():
            return None
        return CritiqueRequest(unmarked.text, document=document, score=self._shown_score(score), start=shown[0])

    def _place(self, critique: Critique, query: list[int], response: list[int]) -> SpanRewards:
        def place(positive_value: float) -> SpanRewards:
            return span_rewards(
                critique.spans,
                query,
                response,
                self._tokenizer,
                positive_value=positive_value,
                negative_value=self._negative,
                mode=self._mode,
            )

        placed = place(self._positive)
        return place(0.0) if _invents_a_flaw(placed) else placed

    def _rewards(self, critique: Critique, placed: SpanRewards) -> Tensor:
        if critique.status not in ("ok", "none"):
            return torch.zeros_like(placed.rewards)
        if self._style == "sentiment" or _invents_a_flaw(placed):
            return placed.rewards
        clean = placed.visible & ~placed.covered
        return torch.where(clean, torch.full_like(placed.rewards, self._positive), placed.rewards)


def _invents_a_flaw(placed: SpanRewards) -> bool:
    return any(span.polarity == "negative" for span in placed.unmatched)
