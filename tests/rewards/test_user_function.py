"""Reward functions from a Python file, by the convention of Hugging Face TRL's trainers."""

import math
import threading
import time
from pathlib import Path

import pytest

from trl.jsonl import DataFileError
from trl.rewards import RewardGoneError
from trl.rewards.user_function import FunctionReward

FILE = """
from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass

import neighbour
from trl.rewards import get_soft_overlong_punishment

threads = []


@dataclass
class Settings:
    length: int = 4


def by_length(completions, **kwargs):
    threads.append(threading.current_thread())
    return [len(each) / Settings().length for each in completions]


def with_solution(prompts, completions, solution, weight=1.0):
    return [neighbour.same(text, gold) for text, gold in zip(completions, solution)]


def nothing(completions, **kwargs):
    return [None, float("nan"), float("inf"), 1][: len(completions)]


async def slow(completions, **kwargs):
    threads.append(threading.current_thread())
    await asyncio.sleep(0.3)
    return [1.0] * len(completions)


def too_few(completions, **kwargs):
    return [1.0]


def a_number(completions, **kwargs):
    return 1.0


def broken(completions, **kwargs):
    raise KeyError("of the user")


def never(completions, **kwargs):
    return [None] * len(completions)


overlong = get_soft_overlong_punishment(10, 5)
not_a_function = 3
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    (folder / "neighbour.py").write_text("def same(text, gold):\n    return text == gold\n")
    (folder / "mine.py").write_text(FILE)
    return folder / "mine.py"


def test_columns_go_in_and_numbers_come_out(file: Path) -> None:
    reward = FunctionReward(f"{file}:with_solution")
    columns = {"prompts": ["p", "q"], "solution": ["a", "b"], "completion_ids": [[1], [2]], "level": [1, 2]}
    reward.check(columns.keys() | {"completions"})
    assert [each.reward for each in reward.details(["a", "c"], **columns)] == [1.0, 0.0]
    with pytest.raises(DataFileError, match=r"needs the column 'solution'.*completions, level, prompts"):
        reward.check(["prompts", "completions", "level"])


def test_callables_of_our_own_library_work(file: Path) -> None:
    reward = FunctionReward(f"{file}:overlong")
    reward.check(["completions", "completion_ids"])
    assert [each.reward for each in reward.details(["", ""], completion_ids=[[0] * 5, [0] * 11])] == [0.0, -1.0]


def test_no_verdict_and_no_number(file: Path) -> None:
    results = FunctionReward(f"{file}:nothing").details(["a"] * 4)
    assert [math.isnan(each.reward) for each in results] == [True, True, True, False]
    assert [each.error for each in results] == ["nothing returned None", "nothing returned nan",
                                                "nothing returned inf", None]  # fmt: skip
    with pytest.raises(TypeError, match=r"mine\.py:too_few returned 1 rewards for 2"):
        FunctionReward(f"{file}:too_few").details(["a", "b"])
    with pytest.raises(TypeError, match=r"mine\.py:a_number returned 1\.0"):
        FunctionReward(f"{file}:a_number").details(["a"])
    with pytest.raises(KeyError, match="of the user"):
        FunctionReward(f"{file}:broken").submit(["a"])


def test_a_generator_is_a_list_too_and_numbers_can_be_too_large(tmp_path: Path) -> None:
    (tmp_path / "f.py").write_text(
        "def lazy(completions): return (1.0 for _ in completions)\ndef large(completions): return [10**400]\n"
    )
    assert [each.reward for each in FunctionReward(f"{tmp_path / 'f.py'}:lazy").details(["a", "b"])] == [1.0, 1.0]
    with pytest.raises(TypeError, match=r"f\.py:large returned \[10+"):
        FunctionReward(f"{tmp_path / 'f.py'}:large").details(["a"])


@pytest.mark.parametrize("kind", ["def", "async def"])
def test_a_function_that_exits_does_not_end_the_run_as_a_success(tmp_path: Path, kind: str) -> None:
    (tmp_path / "f.py").write_text(f"import sys\n{kind} leave(completions): sys.exit(0)\n")
    with pytest.raises(RuntimeError, match=r"f\.py:leave called sys\.exit\(0\)"):
        FunctionReward(f"{tmp_path / 'f.py'}:leave").details(["a"])


def test_an_ordinary_function_runs_here_and_an_async_one_in_the_background(file: Path) -> None:
    here = FunctionReward(f"{file}:by_length")
    assert here.submit(["abcd", "ab"]).result() == [1.0, 0.5]
    assert here._function.__globals__["threads"] == [threading.current_thread()]
    slow = FunctionReward(f"{file}:slow")
    begin = time.monotonic()
    pending = slow.submit(["a"])
    assert time.monotonic() - begin < 0.25
    assert pending.result() == [1.0] and pending.stats == {}
    assert slow._function.__globals__["threads"] != [threading.current_thread()]
    assert [each.reward for each in slow.details(["a"])] == [1.0]


def test_without_any_verdict_the_run_should_stop(file: Path) -> None:
    reward = FunctionReward(f"{file}:never")
    assert all(map(math.isnan, reward.submit(["a"] * 19).result()))
    reward.details(["a"] * 100)  # counts nothing
    with pytest.raises(RewardGoneError, match="20 x never returned None"):
        reward.submit(["a"]).result()


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("def mine(): pass\ndef _own(): pass", "yours", r"no function 'yours' in it; it has mine"),
        ("x = 3", "x", "no function 'x'"),
        ("def f(:", "f", "SyntaxError"),
        ("import no_such_package_here", "f", "No module named 'no_such_package_here'"),
        ("from ..import_utils import f", "f", "relative import"),
    ],
)
def test_files_that_do_not_work_are_one_line(tmp_path: Path, source: str, name: str, message: str) -> None:
    (tmp_path / "odd.py").write_text(source)
    with pytest.raises(DataFileError, match=message):
        FunctionReward(f"{tmp_path}/odd.py:{name}")


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="there is no file"):
        FunctionReward(f"{tmp_path}/none.py:f")
