import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, RobertaConfig

from tests.rewards.toy_classifiers import TEXTS, save_classifier
from trl.rewards import SentimentReward, TextClassifier, load_classifier
from trl.rewards.classifiers import _positions


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_classifier(tmp_path_factory.mktemp("classifier"), ["NEGATIVE", "POSITIVE"])


def slow_logits(folder: Path, text: str) -> list[float]:
    """One text at a time, with nothing but transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(**tokenizer(text, return_tensors="pt")).logits[0].tolist()


def random_texts(count: int) -> list[str]:
    draw = random.Random(0)
    words = " ".join(TEXTS).split()
    return [" ".join(draw.choices(words, k=draw.randint(1, 30))) for _ in range(count)]


def test_batching_and_order_do_not_change_logits(folder: Path) -> None:
    texts = random_texts(37)
    expected = torch.tensor([slow_logits(folder, text) for text in texts])
    assert expected.std() > 0.1  # the toy model tells texts apart, so a mixed-up order would show
    for batch_size in (1, 5, 64):
        classifier = TextClassifier(str(folder), device="cpu", batch_size=batch_size)
        torch.testing.assert_close(classifier.logits(texts), expected, atol=1e-5, rtol=1e-5)


def test_reward_is_the_raw_positive_logit_of_prompt_and_completion(folder: Path) -> None:
    reward = SentimentReward(str(folder), device="cpu")
    got = reward(prompts=["a wonderful", "a dull"], completions=[" film", " plot ."], completion_ids=[[1], [2]])
    expected = [slow_logits(folder, text)[1] for text in ("a wonderful film", "a dull plot .")]
    assert got == pytest.approx(expected, abs=1e-5)
    assert reward.__name__ == "sentiment_reward"


def test_conversations_are_read_in_order(folder: Path) -> None:
    reward = SentimentReward(str(folder), device="cpu")
    prompt = [{"role": "user", "content": "the movie was"}]
    answer = [{"role": "assistant", "content": "dull and bad"}]
    plain = reward(prompts=["the movie was\n"], completions=["dull and bad"])
    assert reward(prompts=[prompt], completions=[answer]) == pytest.approx(plain)


def test_blank_text_has_no_verdict(folder: Path) -> None:
    reward = SentimentReward(str(folder), device="cpu")
    got = reward(prompts=["", "a great cast", " "], completions=["", "", "\n"])
    assert got[0] is None and got[2] is None
    assert got[1] == pytest.approx(slow_logits(folder, "a great cast")[1], abs=1e-5)
    assert reward(prompts=[], completions=[]) == []


def test_a_broken_model_gives_no_verdict(folder: Path) -> None:
    reward = SentimentReward(str(folder), device="cpu")
    with torch.no_grad():
        reward.classifier.model.classifier.bias.fill_(math.nan)
    assert reward(prompts=["a"], completions=["film"]) == [None]


def test_lengths_must_agree(folder: Path) -> None:
    with pytest.raises(ValueError, match="2 prompts and 1 completions"):
        SentimentReward(str(folder), device="cpu")(prompts=["a", "b"], completions=["c"])


@pytest.mark.parametrize(
    ("labels", "index"),
    [
        (["NEGATIVE", "POSITIVE"], 1),
        (["positive", "negative"], 0),
        (["LABEL_0", "LABEL_1"], 1),
        (["neg", "neu", "Pos"], 2),
    ],
)
def test_the_label_is_found_by_name(labels: list[str], index: int, tmp_path: Path) -> None:
    assert SentimentReward(str(save_classifier(tmp_path, labels)), device="cpu").index == index


def test_a_missing_label_lists_those_of_the_model(tmp_path: Path) -> None:
    save_classifier(tmp_path, ["joy", "anger"])
    with pytest.raises(ValueError, match="joy, anger"):
        SentimentReward(str(tmp_path), device="cpu")
    with pytest.raises(ValueError, match=r"joy, anger.*fear"):
        SentimentReward(str(tmp_path), "fear", device="cpu")
    with pytest.raises(ValueError, match="joy, anger"):
        load_classifier(str(tmp_path), device="cpu")
    assert SentimentReward(str(tmp_path), "Anger", device="cpu").index == 1


def test_long_text_loses_its_beginning(tmp_path: Path) -> None:
    save_classifier(tmp_path, ["NEGATIVE", "POSITIVE"], positions=16)
    classifier = TextClassifier(str(tmp_path), device="cpu")
    start, end = "the movie was good " * 20, "a dull plot and no sense at all"
    other = classifier.logits(["bad jokes " * 20 + start + end, start + end])
    torch.testing.assert_close(other[0], other[1])
    changed = classifier.logits([start + "a great cast and a story that moves"])
    assert not torch.allclose(changed[0], other[0], atol=1e-3)


def test_written_special_tokens_are_ordinary_text(folder: Path) -> None:
    classifier = TextClassifier(str(folder), device="cpu")
    ids = classifier.tokenizer("good [SEP] bad [PAD]", split_special_tokens=True)["input_ids"]
    assert ids.count(classifier.tokenizer.sep_token_id) == 1 and ids[-1] == classifier.tokenizer.sep_token_id
    expected = slow_logits(folder, "good bad")
    assert not np.allclose(classifier.logits(["good [SEP] bad"])[0], expected, atol=1e-3)
    forged = slow_logits(folder, "good [SEP] bad")  # plain transformers reads it as a separator
    assert not np.allclose(classifier.logits(["good [SEP] bad"])[0], forged, atol=1e-3)


def test_positions_of_roberta_start_behind_the_padding_id() -> None:
    config = RobertaConfig(max_position_embeddings=514, pad_token_id=1)
    assert _positions(config) == 512


def test_probabilities_are_the_softmax(folder: Path) -> None:
    texts = random_texts(9)
    classify = load_classifier(str(folder), device="cpu", batch_size=4)
    expected = [np.exp(b) / (np.exp(a) + np.exp(b)) for a, b in (slow_logits(folder, text) for text in texts)]
    got = classify(texts)
    assert got.shape == (9,)
    np.testing.assert_allclose(got, expected, atol=1e-5)
    assert classify([]).shape == (0,)


def test_an_unreachable_model_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(OSError, match=r"cannot load the classifier .*builtin:sentiment") as error:
        load_classifier(str(tmp_path / "missing"))
    assert "\n" not in str(error.value)


def test_bad_batch_size(folder: Path) -> None:
    with pytest.raises(ValueError, match="batch_size"):
        TextClassifier(str(folder), batch_size=0)
