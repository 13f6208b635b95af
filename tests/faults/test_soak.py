"""A short soak: thirty steps with a critic that misbehaves in every way leave nothing behind (`benchmarks.soak`)."""

import gc
from pathlib import Path

import pytest

from benchmarks.soak import BATCH, OUTAGE, SAVED, STATUSES, report, soak

STEPS = 30


@pytest.mark.usefixtures("fresh_accelerator_state")
def test_files_and_threads_stay_and_memory_nearly(tmp_path: Path) -> None:
    gc.collect()  # what earlier tests left must not close meanwhile
    rows = list(soak(tmp_path, STEPS))
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    totals = {status: sum(row[status] for row in rows) for status in STATUSES}
    assert min(totals[status] for status in ("ok", "failed", "unparsable", "skipped")) > 0, report(rows)
    assert sum(totals.values()) == STEPS * BATCH
    outage = rows[OUTAGE]
    assert outage["failed"] + outage["skipped"] == BATCH
    assert rows[OUTAGE + 1]["ok"] > 0

    warm = rows[SAVED:]  # the first checkpoint starts a thread that draws progress bars
    assert {row["files"] for row in warm} == {warm[0]["files"]}, report(rows)
    assert {row["threads"] for row in warm} == {warm[0]["threads"]}, report(rows)
    # the process may hold some of its own from before
    assert max(row["connections"] for row in warm) <= min(row["connections"] for row in rows) + 2 * BATCH, report(rows)
    assert warm[-1]["rss"] < warm[0]["rss"] + 50, report(rows)
