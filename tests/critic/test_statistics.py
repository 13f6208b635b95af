"""The critic's statistics of a step that several processes shared, by hand."""

from trl.critic.statistics import of_processes


def test_counts_add_up_and_rates_are_of_all() -> None:
    first = {"critic/requests": 6.0, "critic/hit_rate": 0.5, "critic/matched": 4.0, "critic/latency": 2.0}
    first |= {"critic/cost_usd": 0.25, "critic/latency_p50": 1.0, "critic/latency_p95": 2.0}
    second = {"critic/requests": 2.0, "critic/hit_rate": 1.0, "critic/matched": 3.0, "critic/latency": 5.0}
    second |= {"critic/mean_abs_intrinsic": 0.5}
    assert of_processes([first, second]) == {
        "critic/requests": 8.0,
        "critic/hit_rate": 0.625,  # 3 + 2 of 8
        "critic/matched": 7.0,
        "critic/latency": 5.0,
        "critic/cost_usd": 0.25,  # the second asked nothing over the wire
        "critic/latency_p50": 1.0,
        "critic/latency_p95": 2.0,
        "critic/mean_abs_intrinsic": 0.5,
    }


def test_one_process_is_as_it_was() -> None:
    alone = {"critic/requests": 0.0, "critic/hit_rate": 0.0, "critic/skipped": 16.0, "critic/latency": 0.1}
    assert of_processes([alone]) == alone
