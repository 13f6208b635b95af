"""The window of recent failures that both fuses watch."""

from trl.failures import FailureWindow


def test_too_many_means_more_than_80_percent_of_at_least_20():
    window = FailureWindow()
    for _ in range(19):
        window.record("down")
    assert not window.mostly_failed
    window.record("down")
    assert window.mostly_failed
    for _ in range(5):
        window.record(None)
    assert (len(window), window.failed, window.mostly_failed) == (25, 20, False)
    window.record("down")
    assert window.mostly_failed
    window.clear()
    assert len(window) == 0 and not window.mostly_failed


def test_only_the_last_100_count():
    window = FailureWindow()
    for outcome in ["old"] * 50 + [None] * 90:
        window.record(outcome)
    assert (len(window), window.failed) == (100, 10)


def test_reasons_are_counted_and_a_flood_of_them_is_cut():
    window = FailureWindow()
    for reason in ["b", "a", "a", "a"]:
        window.record(reason)
    assert window.reasons == "3 x a, 1 x b"
    for number in range(30):
        window.record(f"own {number}")
    assert window.reasons.startswith("3 x a, 1 x b, 1 x own 0, ")
    assert window.reasons.endswith(", 22 x other reasons")
