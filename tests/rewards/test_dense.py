"""Shaping rewards per token: they sum to the scalars and sit on the tokens that earn them."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import ragged_batch, tiny_gpt2, tiny_tokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model
from trl.rewards import (
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
    token_overlong,
    token_repetition_penalty,
)

IDS = st.lists(st.lists(st.integers(0, 3), max_size=20), max_size=4)


def test_repetition_by_hand() -> None:
    # bigrams 1 2, 2 1, 1 2, 2 1, 1 2; the last three are repeats of -1/5 each, half of it on each of two tokens
    assert token_repetition_penalty([[1, 2, 1, 2, 1, 2]], ngram_size=2) == [
        pytest.approx([0.0, 0.0, -0.1, -0.2, -0.2, -0.1])
    ]
    assert token_repetition_penalty([[1, 2, 3, 9, 1, 2, 3], [1, 2], []]) == [
        pytest.approx([0, 0, 0, 0, -1 / 15, -1 / 15, -1 / 15]),
        [0.0, 0.0],
        [],
    ]


@given(IDS, st.integers(1, 5), st.floats(-10, 0))
def test_repetition_sums_to_the_scalar(ids: list[list[int]], n: int, penalty: float) -> None:
    vectors = token_repetition_penalty(ids, ngram_size=n, max_penalty=penalty)
    assert [len(vector) for vector in vectors] == [len(tokens) for tokens in ids]
    totals = get_repetition_penalty_reward(n, penalty)(completion_ids=ids)
    assert [sum(vector) for vector in vectors] == pytest.approx(totals, abs=1e-9)


@given(IDS, st.integers(1, 5))
def test_repetition_is_on_tokens_of_repeats_only(ids: list[list[int]], n: int) -> None:
    for tokens, vector in zip(ids, token_repetition_penalty(ids, ngram_size=n), strict=True):
        ngrams = [tokens[i : i + n] for i in range(len(tokens) - n + 1)]
        repeats = [i for i, ngram in enumerate(ngrams) if ngram in ngrams[:i]]
        covered = {position for start in repeats for position in range(start, start + n)}
        assert {position for position, reward in enumerate(vector) if reward} == covered
        # a token's share is the number of repeats that it is in
        for position, reward in enumerate(vector):
            times = sum(start <= position < start + n for start in repeats)
            assert reward == pytest.approx(-times / (max(len(ngrams), 1) * n), abs=1e-12)


def test_overlong_by_hand() -> None:
    assert token_overlong([[1] * 3, [1] * 5, [1] * 7, []], max_completion_len=6, soft_punish_cache=2) == [
        [0.0] * 3,
        [0.0, 0.0, 0.0, 0.0, -0.5],
        [0.0, 0.0, 0.0, 0.0, -0.5, -0.5, 0.0],
        [],
    ]
    assert token_overlong([[1] * 5, [1] * 3], max_completion_len=3, soft_punish_cache=0) == [
        [0.0, 0.0, 0.0, -1.0, 0.0],
        [0.0, 0.0, 0.0],
    ]


@given(st.lists(st.integers(0, 60), max_size=4), st.integers(0, 40), st.data())
def test_overlong_is_the_increments_of_the_curve(lengths: list[int], longest: int, data: st.DataObject) -> None:
    cache = data.draw(st.integers(0, longest))
    scalar = get_soft_overlong_punishment(longest, cache)
    vectors = token_overlong([[1] * n for n in lengths], longest, cache)
    assert [len(vector) for vector in vectors] == lengths
    assert [sum(vector) for vector in vectors] == pytest.approx(scalar([[1] * n for n in lengths]), abs=1e-9)
    for length, vector in zip(lengths, vectors, strict=True):
        curve = scalar([[1] * n for n in range(length + 1)])
        assert vector == pytest.approx([b - a for a, b in itertools.pairwise(curve)], abs=1e-9)
        assert not any(vector[: longest - cache])


def test_ids_may_be_tensors() -> None:
    ids = torch.tensor([1, 2, 1, 2, 1, 2])
    assert token_repetition_penalty([ids], ngram_size=2) == token_repetition_penalty([ids.tolist()], ngram_size=2)
    assert token_overlong([ids], 5, 2) == token_overlong([ids.tolist()], 5, 2)


@pytest.mark.parametrize(
    ("function", "settings", "named"),
    [
        (token_repetition_penalty, {"ngram_size": 0}, "ngram_size"),
        (token_repetition_penalty, {"max_penalty": 1.0}, "max_penalty"),
        (token_overlong, {"max_completion_len": 3, "soft_punish_cache": 4}, "soft_punish_cache"),
        (token_overlong, {"max_completion_len": -3, "soft_punish_cache": 0}, "max_completion_len"),
    ],
)
def test_arguments_out_of_range(function: Any, settings: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        function([], **settings)


def test_ppo_learns_from_the_vectors() -> None:
    """What a step was rewarded with, beside the KL penalty, is the vector, token by token."""
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_gpt2())
    config = PPOConfig(batch_size=3, mini_batch_size=3, ppo_epochs=1, init_kl_coef=0.0, adap_kl_ctrl=False)
    trainer = PPOTrainer(config, model, create_reference_model(model), tokenizer=tiny_tokenizer())
    queries, _ = ragged_batch([4, 2, 3], [1, 1, 1])
    responses = [torch.tensor(ids) for ids in ([5, 6, 5, 6, 5, 6], [7, 8, 9], [4, 4, 4, 4, 4, 4, 4, 4])]
    repetition = token_repetition_penalty(responses, ngram_size=2)
    overlong = token_overlong(responses, max_completion_len=7, soft_punish_cache=3)
    scores = [
        torch.tensor([a + b for a, b in zip(*vectors, strict=True)])
        for vectors in zip(repetition, overlong, strict=True)
    ]
    trainer.step(queries, responses, scores)
    for row, score in zip(trainer.last_rollout, scores, strict=True):
        assert row["token_reward"].tolist() == pytest.approx(score.tolist())
    assert scores[0].sum() == pytest.approx(-0.6 - 2 / 3)
    assert not scores[1].any()
