"""Length penalty and gibberish guard around a reward, each off by default and reported on its own."""

import math
from pathlib import Path

import pytest
import torch

from tests.rewards.toy_classifiers import save_classifier
from trl.rewards.adjusted import AdjustedReward
from trl.rewards.classifiers import TextClassifier

TEXTS = ["a wonderful film , warm and funny", "bad jokes", "", "the movie was good ."]


def base(*, prompts, completions, **_) -> list[float | None]:
    return [None if text == "" else float(len(text)) for text in completions]


@pytest.fixture(scope="module")
def guard(tmp_path_factory) -> TextClassifier:
    return TextClassifier(str(save_classifier(Path(tmp_path_factory.mktemp("guard")), ["noise", "clean", "salad"])))


def call(reward: AdjustedReward) -> list[float | None]:
    return reward(prompts=["p"] * 4, completions=TEXTS, references=["r"] * 4)


def test_nothing_is_taken_off_by_default():
    reward = AdjustedReward(base)
    assert call(reward) == [33.0, 9.0, None, 20.0]
    assert reward.parts == {"reward/preference": pytest.approx([33.0, 9.0, math.nan, 20.0], nan_ok=True)}


def test_missing_words_cost_each():
    reward = AdjustedReward(base, length_penalty=0.5, min_words=6)
    assert call(reward) == [33.0, 9.0 - 2.0, None, 20.0 - 0.5]  # 7, 2, 0 and 5 words
    assert reward.parts["reward/length_penalty"] == [0.0, 2.0, 3.0, 0.5]


def test_the_guard_takes_off_the_probability_of_what_is_not_clean(guard):
    reward = AdjustedReward(base, guard=guard, gibberish_penalty=3.0)
    clean = guard.logits(TEXTS).softmax(1)[:, 1].tolist()
    expected = [
        score if score is None else score - 3 * (1 - p)
        for score, p in zip(base(prompts=[], completions=TEXTS), clean, strict=True)
    ]
    assert [x for x in call(reward) if x is not None] == pytest.approx([x for x in expected if x is not None])
    assert reward.parts["reward/gibberish_penalty"] == pytest.approx([3 * (1 - p) for p in clean])


@pytest.mark.parametrize(
    ("policy", "expected"), [("strict", [None, None, None, None]), ("renormalise", [33, 9, None, 20])]
)
def test_a_guard_without_a_verdict(guard, policy, expected):
    with torch.no_grad():
        before = guard.model.classifier.bias.clone()
        guard.model.classifier.bias.fill_(math.nan)
    try:
        assert call(AdjustedReward(base, guard=guard, nan_policy=policy)) == expected
    finally:
        with torch.no_grad():
            guard.model.classifier.bias.copy_(before)


def test_bad_settings_are_named(guard):
    with pytest.raises(ValueError, match="length_penalty is -1"):
        AdjustedReward(base, length_penalty=-1)
    with pytest.raises(ValueError, match="labels noise, clean, salad"):
        AdjustedReward(base, guard=guard, clean_label="sound")
    with pytest.raises(ValueError, match="nan_policy is 'zero'"):
        AdjustedReward(base, nan_policy="zero")
