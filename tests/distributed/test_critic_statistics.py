"""What a run of two processes logs of its critic is of both."""

from pathlib import Path

import pytest

from tests.distributed.launching import accelerate, run
from tests.e2e.test_ppo_sentiment import SCRIPT, names, published
from trl.jsonl import read_jsonl

__all__ = ["names"]  # the fixture

pytestmark = pytest.mark.distributed


def test_the_critics_counts_are_of_both_processes(names: dict[str, str], tmp_path: Path) -> None:
    run(*accelerate("multi_cpu"), SCRIPT, *published(names, tmp_path / "run", "--critic", "lexicon", "--steps", "1"))
    [row] = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert row["tokens/queries"] / row["tokens/queries_len_mean"] == 16  # 8 of each process
    assert row["critic/requests"] + row["critic/skipped"] == 16
