"""The parts that fill the folders, on small inputs."""

import csv
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tests.rewards.toy_classifiers import TEXTS, save_classifier
from trl.builtin import sentiment
from trl.builtin.evaluator import SentimentEvaluator, accuracy, fit
from trl.builtin.reviews import clean, read_reviews, split


def test_line_breaks_become_spaces() -> None:
    assert clean("Good.<br /><br />Really good.\n Yes") == "Good. Really good. Yes"


def test_reviews_of_one_corpus_each_text_once(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    rows = [
        ('Fine, "quite" fine.<br />Yes', 1, "imdb"),
        ("elsewhere", 0, "rotten_tomatoes"),
        ('Fine, "quite" fine. Yes', 1, "imdb"),
        ("bad", 0, "imdb"),
    ]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label", "source"), *rows])
    found, duplicates = read_reviews(path, "imdb")
    assert found == [{"text": 'Fine, "quite" fine. Yes', "label": 1}, {"text": "bad", "label": 0}]
    assert duplicates == 1


def test_the_split_depends_on_the_texts_alone() -> None:
    rows = [{"text": f"review {number}", "label": number % 2} for number in range(200)]
    train, test = split(rows, 40)
    assert len(test) == 40 and sum(row["label"] for row in test) == 20
    assert not {row["text"] for row in train} & {row["text"] for row in test} and len(train) == 160
    shuffled = random.Random(1).sample(rows, len(rows))
    assert split(shuffled, 40) == (train, test)
    assert len({row["label"] for row in train[:12]}) == 2  # labels are mixed


def toy_reviews(count: int, seed: int) -> list[dict]:
    draw = random.Random(seed)
    words = {1: ["great", "lovely", "fine"], 0: ["awful", "dull", "bad"]}
    filler = ["the", "film", "and", "its", "cast", "were", "seen", "by", "us", "in", "a", "hall"]
    rows = []
    for number in range(count):
        text = draw.choices(filler, k=8) + draw.choices(words[number % 2], k=2)
        draw.shuffle(text)
        rows.append({"text": " ".join(text), "label": number % 2})
    return rows


def test_the_evaluator_learns_and_survives_saving(tmp_path: Path) -> None:
    train, test = toy_reviews(200, 0), toy_reviews(50, 1)
    evaluator = fit([row["text"] for row in train], [row["label"] for row in train])
    assert accuracy(evaluator, test) == 1.0
    evaluator.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["terms.txt", "weights.npz"]
    texts = [row["text"] for row in test] + ["", "unseen words only"]
    loaded = SentimentEvaluator.load(tmp_path)
    np.testing.assert_array_equal(loaded(texts), evaluator(texts))
    assert loaded([]).shape == (0,)
    with np.load(tmp_path / "weights.npz", allow_pickle=False) as arrays:
        assert set(arrays) == {"idf", "weights", "bias"}


def test_the_cached_lower_half_gives_the_models_own_logits(tmp_path: Path) -> None:
    save_classifier(tmp_path, ["NEGATIVE", "POSITIVE"], blocks=5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    rows = [{"text": text[:end]} for text in TEXTS for end in (20, 45, 70)]
    ids = sentiment._tokenize(tokenizer, rows)
    states = sentiment._lower_states(model, ids)
    assert [len(state) for state in states] == [len(one) for one in ids]
    with torch.no_grad():
        cached = sentiment._logits(model, states)
        expected = torch.cat([model(input_ids=one[None]).logits for one in ids])
    torch.testing.assert_close(cached, expected, atol=1e-5, rtol=1e-5)


def test_training_touches_only_the_upper_half_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sentiment, "LEARNING_RATE", 1e-3)
    monkeypatch.setattr(sentiment, "EPOCHS", 10)
    torch.manual_seed(0)
    save_classifier(tmp_path, ["NEGATIVE", "POSITIVE"], blocks=5)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    before = {name: value.clone() for name, value in model.named_parameters()}
    rows = [{"text": TEXTS[label], "label": 1 - label} for label in (0, 1)] * 96
    states = sentiment._lower_states(model, sentiment._tokenize(tokenizer, rows))
    labels = torch.tensor([row["label"] for row in rows])
    seen: list[float] = []
    sentiment._train(model, states, labels, lambda stage, fraction: seen.append(fraction))
    changed = {name for name, value in model.named_parameters() if not torch.equal(value, before[name])}
    assert not any(f"layer.{block}." in name for name in changed for block in range(3))
    assert not any("embeddings" in name for name in changed)
    assert any("layer.4." in name for name in changed) and "classifier.weight" in changed
    assert sentiment._accuracy(model, states, labels) == 1.0
    assert seen == sorted(seen) and seen[-1] == pytest.approx(0.95)
