"""The critic's statistics of a step that several processes shared, by hand."""

from trl.critic.statistics import Tally, of_batch
from trl.critic.types import Call, Critique


def answer(status: str, seconds: float, usd: float | None = None) -> Critique:
    return Critique(spans=(), status=status, call=Call(requests=1, latency=seconds, tokens_in=10, usd=usd))


def together(parts: list[Tally]) -> dict[str, float]:
    """Each process's view of the whole, which must be the same."""

    def add(values: list[float]) -> list[float]:
        return [sum(column) for column in zip(*(each.sums.values() for each in parts), strict=True)]

    def collect(values: list[float], most: int) -> list[float]:
        assert len(values) <= most
        return [v for each in parts for v in ([each.latency] if most == 1 else each.waits)]

    views = [part.over_processes(add, collect, 8).stats() for part in parts]
    assert all(view == views[0] for view in views)
    return views[0]


def test_counts_add_up_and_rates_are_of_all() -> None:
    first = of_batch([answer("ok", 1.0, 0.25), answer("none", 3.0, 0.5)], 1, [], [], 4.0)
    first.sums.update(hits=1.0, tokens=10.0, mass=5.0)
    second = of_batch([answer("ok", 2.0)], 0, [], [], 2.5)
    second.sums.update(hits=1.0, tokens=30.0, mass=3.0)
    stats = together([first, second])
    assert (stats["critic/requests"], stats["critic/ok"], stats["critic/skipped"]) == (3, 2, 1)
    assert stats["critic/hit_rate"] == 2 / 3
    assert stats["critic/mean_abs_intrinsic"] == 8 / 40  # by token, not the mean of 0.5 and 0.1
    assert stats["critic/latency"] == 4.0  # the slower process's
    assert stats["critic/latency_p50"] == 2.0
    assert (stats["critic/cost_usd"], stats["critic/tokens_in"]) == (0.75, 30)


def test_a_process_without_calls_changes_nothing_but_counts() -> None:
    busy, idle = of_batch([answer("ok", 1.0)], 0, [], [], 1.0), of_batch([], 4, [], [], 0.0)
    stats = together([busy, idle])
    assert stats == busy.stats() | {"critic/skipped": 4.0}
    assert "critic/http_requests" not in idle.stats()
