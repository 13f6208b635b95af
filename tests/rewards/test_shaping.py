"""Rewards for form: tags, repetition, length."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trl.rewards import (
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    get_think_format_reward,
    think_format_reward,
)

THINKING = {
    "<think>why</think>because": 1.0,
    "<think>\nwhy\n</think>\nbecause": 1.0,
    "<think></think>": 1.0,
    "<think>why</think>": 1.0,
    "<think>a</think>b</think>c": 1.0,
    "": 0.0,
    "because": 0.0,
    "<think>why": 0.0,
    "why</think>because": 0.0,
    " <think>why</think>because": 0.0,
    "</think><think>": 0.0,
    "<think>a<think>b</think>c": 0.0,
    "<think>a</think>b<think>c</think>": 0.0,
    "<THINK>why</THINK>because": 0.0,
}

FACTORIES: dict[str, tuple[Callable[[], Callable[..., Any]], dict[str, Any]]] = {
    "think_format_reward": (lambda: get_think_format_reward(prefilled=True), {"completions": ["a</think>b", "a"]}),
    "repetition_penalty_reward": (lambda: get_repetition_penalty_reward(1), {"completion_ids": [[1, 1], []]}),
    "soft_overlong_punishment_reward": (
        lambda: get_soft_overlong_punishment(4, 2),
        {"completion_ids": [[1] * 3, []]},
    ),
}


def test_think_format() -> None:
    texts = list(THINKING)
    expected = list(THINKING.values())
    assert think_format_reward(completions=texts) == expected
    conversations = [[{"role": "assistant", "content": text}] for text in texts]
    assert think_format_reward(completions=conversations, prompts=["p"] * len(texts), trainer_state=None) == expected
    assert get_think_format_reward()(texts) == expected


def test_think_format_where_the_prompt_opened_the_tag() -> None:
    texts = ["why</think>because", "</think>", "why", "", "<think>why</think>because", "a</think>b<think>c"]
    assert get_think_format_reward(prefilled=True)(completions=texts) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", [None, 5, [], [{"role": "assistant"}], [{"content": None}], ["text"]], ids=repr)
def test_malformed_completions_are_named(bad: object) -> None:
    with pytest.raises(ValueError, match=r"completions\[1\] is .* expected a string or a list of messages"):
        think_format_reward(["fine", bad])  # type: ignore[list-item]


def test_repetition_by_hand() -> None:
    # 1 2, 2 1, 1 2, 2 1, 1 2: two of five are new
    assert get_repetition_penalty_reward(2)(completion_ids=[[1, 2, 1, 2, 1, 2]]) == pytest.approx([-0.6])
    assert get_repetition_penalty_reward(2, -1.0)([[1, 2, 3, 4], [5, 5, 5, 5, 5]]) == pytest.approx([0.0, -0.75])
    assert get_repetition_penalty_reward()([[1, 2], [1, 2, 3], []]) == [0.0, 0.0, 0.0]
    assert get_repetition_penalty_reward(1, -2.0)([[7, 7, 7, 7]]) == pytest.approx([-1.5])
    assert get_repetition_penalty_reward(1, 0.0)([[7, 7]]) == [0.0]


@given(
    st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=4),
    st.integers(1, 5),
    st.floats(-10, 0),
)
def test_repetition_is_the_share_of_ngrams_that_are_not_new(ids: list[list[int]], n: int, penalty: float) -> None:
    for tokens, got in zip(ids, get_repetition_penalty_reward(n, penalty)(completion_ids=ids), strict=True):
        ngrams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
        expected = (1 - len(set(ngrams)) / len(ngrams)) * penalty if ngrams else 0.0
        assert got == pytest.approx(expected, abs=1e-9)


def test_ids_may_be_tensors() -> None:
    ids = torch.tensor([1, 2, 1, 2, 1, 2])
    assert get_repetition_penalty_reward(2)(completion_ids=[ids]) == pytest.approx([-0.6])
    assert get_soft_overlong_punishment(6, 2)(completion_ids=[ids]) == [-1.0]


def test_overlong_by_hand() -> None:
    reward = get_soft_overlong_punishment(max_completion_len=100, soft_punish_cache=20)
    lengths = [0, 80, 81, 90, 100, 101, 1000]
    assert reward(completion_ids=[[1] * n for n in lengths]) == pytest.approx([0, 0, -0.05, -0.5, -1, -1, -1])
    hard = get_soft_overlong_punishment(100, 0)
    assert hard(completion_ids=[[1] * n for n in (0, 100, 101)]) == [0.0, 0.0, -1.0]
    soft_from_the_start = get_soft_overlong_punishment(4, 4)
    assert soft_from_the_start(completion_ids=[[1] * n for n in range(6)]) == [0.0, -0.25, -0.5, -0.75, -1.0, -1.0]
    assert get_soft_overlong_punishment(0, 0)(completion_ids=[[], [1]]) == [0.0, -1.0]


@pytest.mark.parametrize(
    ("factory", "settings", "named"),
    [
        (get_repetition_penalty_reward, {"ngram_size": 0}, "ngram_size"),
        (get_repetition_penalty_reward, {"ngram_size": -1}, "ngram_size"),
        (get_repetition_penalty_reward, {"ngram_size": 2.5}, "ngram_size"),
        (get_repetition_penalty_reward, {"max_penalty": 0.1}, "max_penalty"),
        (get_repetition_penalty_reward, {"max_penalty": math.nan}, "max_penalty"),
        (get_repetition_penalty_reward, {"max_penalty": -math.inf}, "max_penalty"),
        (get_soft_overlong_punishment, {"max_completion_len": 10, "soft_punish_cache": 11}, "soft_punish_cache"),
        (get_soft_overlong_punishment, {"max_completion_len": 10, "soft_punish_cache": -1}, "soft_punish_cache"),
        (get_soft_overlong_punishment, {"max_completion_len": -1, "soft_punish_cache": 0}, "max_completion_len"),
        (get_soft_overlong_punishment, {"max_completion_len": 1.5, "soft_punish_cache": 0}, "max_completion_len"),
    ],
)
def test_arguments_out_of_range(factory: Callable[..., Any], settings: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=f"^{named} is .* expected"):
        factory(**settings)


@pytest.mark.parametrize("name", FACTORIES)
def test_callables_can_be_pickled_and_say_their_names(name: str) -> None:
    make, keywords = FACTORIES[name]
    reward = make()
    again = pickle.loads(pickle.dumps(reward))
    assert reward.__name__ == again.__name__ == name
    result = reward(**keywords, prompts=["p", "q"], unknown=object())
    assert again(**keywords) == result
    assert len(set(result)) == 2
