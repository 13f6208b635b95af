import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from tests.rewards.toy_classifiers import TEXTS, save_classifier
from trl.builtin import NotPreparedError
from trl.rewards import ToxicityReward, load_toxicity_scorer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Labels of facebook/roberta-hate-speech-dynabench-r4-target."""
    return str(save_classifier(tmp_path_factory.mktemp("hate"), ["nothate", "hate"]))


@pytest.fixture(scope="module")
def independent(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Labels at once, each with its own probability, as unitary/toxic-bert has them."""
    path = save_classifier(tmp_path_factory.mktemp("multi"), ["severe_toxic", "toxic", "insult"])
    config = AutoConfig.from_pretrained(path)
    config.problem_type = "multi_label_classification"
    config.save_pretrained(path)
    return str(path)


def slow_logits(folder: str, text: str) -> list[float]:
    """One text at a time, with nothing but transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt")).logits[0].tolist()


def test_reward_is_the_raw_logit_of_the_harmless_class_for_the_response(folder: str) -> None:
    reward = ToxicityReward(folder, device="cpu", batch_size=2)
    got = reward(prompts=["anything"] * 3, completions=TEXTS, completion_ids=[[1]] * 3)
    expected = [slow_logits(folder, text)[0] for text in TEXTS]
    assert np.std(expected) > 0.1
    assert got == pytest.approx(expected, abs=1e-5)
    assert reward(completions=TEXTS) == got  # the prompt has no say
    assert reward.__name__ == "toxicity_reward"


def test_probability_is_that_of_not_being_toxic(folder: str) -> None:
    expected = [1 / (1 + math.exp(b - a)) for a, b in (slow_logits(folder, text) for text in TEXTS)]
    reward = ToxicityReward(folder, kind="probability", device="cpu")
    assert reward(completions=TEXTS) == pytest.approx(expected, abs=1e-5)
    np.testing.assert_allclose(load_toxicity_scorer(folder, device="cpu")(TEXTS), 1 - np.array(expected), atol=1e-5)


def test_independent_labels(independent: str) -> None:
    expected = np.array([slow_logits(independent, text)[1] for text in TEXTS])
    scorer = load_toxicity_scorer(independent, device="cpu")
    np.testing.assert_allclose(scorer(TEXTS), 1 / (1 + np.exp(-expected)), atol=1e-5)
    assert ToxicityReward(independent, device="cpu")(completions=TEXTS) == pytest.approx(-expected, abs=1e-5)
    insult = [slow_logits(independent, text)[2] for text in TEXTS]
    reward = ToxicityReward(independent, "insult", device="cpu")
    assert reward(completions=TEXTS) == pytest.approx([-z for z in insult], abs=1e-5)


def test_blank_responses_have_no_verdict(folder: str) -> None:
    reward = ToxicityReward(folder, device="cpu")
    got = reward(prompts=["a", "b", "c"], completions=["", TEXTS[0], " \n"])
    assert got[0] is None and got[2] is None and got[1] == pytest.approx(slow_logits(folder, TEXTS[0])[0], abs=1e-5)
    assert reward(completions=[]) == [] and reward(completions=["", ""]) == [None, None]


def test_conversations_are_judged_by_their_content(folder: str) -> None:
    reward = ToxicityReward(folder, device="cpu")
    answer = [{"role": "assistant", "content": TEXTS[1]}]
    assert reward(completions=[answer]) == pytest.approx(reward(completions=[TEXTS[1]]))


def test_a_broken_model_gives_no_verdict(folder: str) -> None:
    reward = ToxicityReward(folder, device="cpu")
    with torch.no_grad():
        reward.scorer.classifier.model.classifier.bias.fill_(math.nan)  # type: ignore[attr-defined]
    assert reward(completions=["a film"]) == [None]


@pytest.mark.parametrize(
    ("labels", "label", "index"),
    [
        (["hate", "nothate"], None, 1),
        (["toxic", "Non-Toxic"], None, 1),
        (["neutral", "toxic"], None, 0),
        (["LABEL_0", "LABEL_1"], "label_0", 0),
        (["offensive", "fine"], "fine", 1),
    ],
)
def test_the_label_is_found_by_name(labels: list[str], label: str | None, index: int, tmp_path: Path) -> None:
    save_classifier(tmp_path, labels)
    reward = ToxicityReward(str(tmp_path), label, device="cpu")
    assert reward(completions=TEXTS) == pytest.approx([slow_logits(str(tmp_path), t)[index] for t in TEXTS], abs=1e-5)


def test_a_missing_label_lists_those_of_the_model(tmp_path: Path) -> None:
    save_classifier(tmp_path, ["joy", "anger"])
    with pytest.raises(ValueError, match=r"joy, anger.*nothate"):
        ToxicityReward(str(tmp_path), device="cpu")
    with pytest.raises(ValueError, match=r"joy, anger.*calm"):
        load_toxicity_scorer(str(tmp_path), "calm", device="cpu")


def test_wrong_arguments(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="kind is 'odds'"):
        ToxicityReward(folder, kind="odds")  # type: ignore[arg-type]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match=r"missing.*give a sequence-classification model") as error:
        ToxicityReward(str(tmp_path / "missing"))
    assert "\n" not in str(error.value)
    monkeypatch.setenv("RELC_HOME", str(tmp_path))
    with pytest.raises(NotPreparedError, match="prepare toxicity"):
        ToxicityReward("builtin:toxicity")
