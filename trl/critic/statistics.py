"""The ``critic/*`` statistics of one batch."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import get_args

import numpy as np
from torch import Tensor

from trl.critic.align import SpanRewards
from trl.critic.types import Call, Critique, Status


def of_batch(
    answers: Sequence[Critique],
    skipped: int,
    placed: Sequence[SpanRewards],
    rewards: Sequence[Tensor],
    latency: float,
) -> dict[str, float]:
    """What a batch's metrics say about the critic.

    requests: texts shown to the critic; ok, none, unparsable, failed, skipped: critiques by status; matched and
    unmatched: spans; mean_abs_intrinsic: over all response tokens; hit_rate: share of the critiqued responses with
    a matched span; latency: seconds for the whole batch. Of critics behind an endpoint also http_requests (sent,
    retries counted), cache_hits, budget_skipped, tokens_in, tokens_out, latency_p50 and latency_p95 (seconds per
    text that was asked), and cost_usd where the prices are known.

    Args:
        answers: the critic's, one per text that it was shown.
        skipped: responses that it was not shown.
        placed, rewards: where the spans are, and the rewards (N_i,), of every response.
        latency: seconds.
    """
    statuses = Counter(critique.status for critique in answers)
    statuses["skipped"] += skipped
    tokens = sum(len(reward) for reward in rewards)
    mass = sum(float(reward.abs().sum()) for reward in rewards)
    hits = sum(p.matched > 0 for p in placed)
    return {
        "critic/requests": float(len(answers)),
        **{f"critic/{status}": float(statuses[status]) for status in get_args(Status)},
        "critic/matched": float(sum(p.matched for p in placed)),
        "critic/unmatched": float(sum(len(p.unmatched) for p in placed)),
        "critic/mean_abs_intrinsic": mass / tokens if tokens else 0.0,
        "critic/hit_rate": hits / len(answers) if answers else 0.0,
        "critic/latency": latency,
        **_of_endpoint(answers),
    }


def of_processes(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The statistics of a step that several processes shared, from those of each, as `of_batch` gives them.

    Counts and dollars add up; hit_rate is of all critiqued responses; of the waits, latency and latency_p95 are the
    longest and latency_p50 is a mean, as mean_abs_intrinsic is.
    """
    found: dict[str, float] = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        values = [part[key] for part in parts if key in part]
        match key:
            case "critic/hit_rate":
                asked = [part["critic/requests"] for part in parts]
                hits = sum(part[key] * count for part, count in zip(parts, asked, strict=True))
                found[key] = hits / sum(asked) if any(asked) else 0.0
            case "critic/latency" | "critic/latency_p95":
                found[key] = max(values)
            case "critic/latency_p50" | "critic/mean_abs_intrinsic":
                found[key] = sum(values) / len(values)
            case _:
                found[key] = sum(values)
    return found


def _of_endpoint(answers: Sequence[Critique]) -> dict[str, float]:
    calls = [critique.call for critique in answers if critique.call is not None]
    if not calls:
        return {}
    stats = {
        "critic/http_requests": float(sum(call.requests for call in calls)),
        "critic/cache_hits": float(sum(call.cached for call in calls)),
        "critic/budget_skipped": float(sum(critique.status == "skipped" for critique in answers)),
        "critic/tokens_in": float(sum(call.tokens_in for call in calls)),
        "critic/tokens_out": float(sum(call.tokens_out for call in calls)),
    }
    return stats | _latencies(calls) | _cost(calls)


def _latencies(calls: Sequence[Call]) -> dict[str, float]:
    waits = [call.latency for call in calls if call.requests]
    if not waits:
        return {}
    return {f"critic/latency_p{share}": float(np.percentile(waits, share)) for share in (50, 95)}


def _cost(calls: Sequence[Call]) -> dict[str, float]:
    costs = [call.usd for call in calls if call.usd is not None]
    return {"critic/cost_usd": sum(costs)} if costs else {}
