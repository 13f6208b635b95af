"""Our reward functions give the values that Hugging Face TRL's gave (benchmarks/peer/reward_values.py)."""

import json
from pathlib import Path
from typing import Any

import pytest

from trl.rewards import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    reasoning_accuracy_reward,
    think_format_reward,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "peer_rewards.json").read_text(encoding="utf-8"))


def messages(texts: list[str]) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def judged(function: Any, case: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """The rewards and the columns for the log, as they were recorded."""
    columns: dict[str, Any] = {}
    rewards = function(
        completions=messages(case["completions"]),
        solution=case["solution"],
        log_extra=columns.__setitem__,
        **settings,
    )
    return {"completions": case["completions"], **columns, "rewards": rewards}


def test_accuracy() -> None:
    case = GOLDEN["accuracy"]
    assert judged(accuracy_reward, case) == case
    assert accuracy_reward(completions=case["completions"], solution=case["solution"]) == case["rewards"]
    assert {reward: case["rewards"].count(reward) > 50 for reward in (0.0, 1.0, None)} == dict.fromkeys(
        (0, 1, None), True
    )


def test_reasoning_accuracy() -> None:
    for case in GOLDEN["reasoning"]:
        delimiters = case["reasoning_delimiters"]
        got = judged(reasoning_accuracy_reward, case, reasoning_delimiters=delimiters)
        assert {"reasoning_delimiters": delimiters, **got} == case


def test_cosine() -> None:
    for case in GOLDEN["cosine"]:
        reward = get_cosine_scaled_reward(**case["settings"])
        got = reward(messages(case["completions"]), case["solution"], [[1] * case["length"]])
        assert got == ([None] if case["rewards"] == [None] else pytest.approx(case["rewards"], abs=1e-12))


def test_think_format() -> None:
    case = GOLDEN["think_format"]
    assert think_format_reward(completions=messages(case["completions"])) == case["rewards"]
    assert {0.0, 1.0} == set(case["rewards"])


def test_repetition() -> None:
    for case in GOLDEN["repetition"]:
        reward = get_repetition_penalty_reward(**case["settings"])
        assert reward(completion_ids=case["ids"]) == pytest.approx(case["rewards"], abs=1e-12)


def test_overlong() -> None:
    for case in GOLDEN["overlong"]:
        reward = get_soft_overlong_punishment(**case["settings"])
        got = reward(completion_ids=[[1] * length for length in case["lengths"]])
        assert got == pytest.approx(case["rewards"], abs=1e-12)
