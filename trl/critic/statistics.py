"""The ``critic/*`` statistics of one batch, of one process or of all of them together."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
from torch import Tensor

from trl.critic.align import SpanRewards
from trl.critic.types import Critique, Status

_ENDPOINT = ("http_requests", "cache_hits", "budget_skipped", "tokens_in", "tokens_out")


@dataclass(frozen=True)
class Tally:
    """What a batch's statistics are made of, so that processes can put theirs together.

    Args:
        sums: what adds up, by fixed names.
        waits: seconds, per text that an endpoint was asked about.
        latency: seconds for the whole batch.
    """

    sums: dict[str, float]
    waits: list[float]
    latency: float

    def over_processes(
        self, add: Callable[[list[float]], list[float]], collect: Callable[[list[float], int], list[float]], most: int
    ) -> "Tally":
        """The tally of all processes, each of which calls this.

        ``add`` adds lists of one length over processes, ``collect(values, most)`` puts together lists of at most
        ``most`` values. The batch took as long as the slowest process.
        """
        sums = dict(zip(self.sums, add(list(self.sums.values())), strict=True))
        return Tally(sums, collect(self.waits, most), max(collect([self.latency], 1)))

    def stats(self) -> dict[str, float]:
        """What a batch's metrics say about the critic.

        requests: texts shown to the critic; ok, none, unparsable, failed, skipped: critiques by status; matched and
        unmatched: spans; mean_abs_intrinsic: over all response tokens; hit_rate: share of the critiqued responses with
        a matched span; latency: seconds for the whole batch. Of critics behind an endpoint also http_requests (sent,
        retries counted), cache_hits, budget_skipped, tokens_in, tokens_out, latency_p50 and latency_p95 (seconds per
        text that was asked), and cost_usd where the prices are known.
        """
        sums = self.sums
        named = ("requests", *get_args(Status), "matched", "unmatched")
        stats = {f"critic/{name}": sums[name] for name in named}
        stats["critic/mean_abs_intrinsic"] = sums["mass"] / sums["tokens"] if sums["tokens"] else 0.0
        stats["critic/hit_rate"] = sums["hits"] / sums["requests"] if sums["requests"] else 0.0
        stats["critic/latency"] = self.latency
        if sums["calls"]:
            stats |= {f"critic/{name}": sums[name] for name in _ENDPOINT}
        if self.waits:
            stats |= {f"critic/latency_p{share}": float(np.percentile(self.waits, share)) for share in (50, 95)}
        if sums["priced"]:
            stats["critic/cost_usd"] = sums["cost_usd"]
        return stats


def of_batch(
    answers: Sequence[Critique],
    skipped: int,
    placed: Sequence[SpanRewards],
    rewards: Sequence[Tensor],
    latency: float,
) -> Tally:
    """The tally of one process's batch.

    Args:
        answers: the critic's, one per text that it was shown.
        skipped: responses that it was not shown.
        placed, rewards: where the spans are, and the rewards (N_i,), of every response.
        latency: seconds.
    """
    statuses = Counter(critique.status for critique in answers)
    statuses["skipped"] += skipped
    calls = [critique.call for critique in answers if critique.call is not None]
    costs = [call.usd for call in calls if call.usd is not None]
    sums = {
        "requests": len(answers),
        **{status: statuses[status] for status in get_args(Status)},
        "matched": sum(p.matched for p in placed),
        "unmatched": sum(len(p.unmatched) for p in placed),
        "hits": sum(p.matched > 0 for p in placed),
        "tokens": sum(len(reward) for reward in rewards),
        "mass": sum(float(reward.abs().sum()) for reward in rewards),
        "calls": len(calls),
        "http_requests": sum(call.requests for call in calls),
        "cache_hits": sum(call.cached for call in calls),
        "budget_skipped": sum(critique.status == "skipped" for critique in answers) if calls else 0,
        "tokens_in": sum(call.tokens_in for call in calls),
        "tokens_out": sum(call.tokens_out for call in calls),
        "priced": len(costs),
        "cost_usd": sum(costs),
    }
    waits = [call.latency for call in calls if call.requests]
    return Tally({name: float(value) for name, value in sums.items()}, waits, latency)
