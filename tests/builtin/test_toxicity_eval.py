"""Conversion of a fitted linear model, with scikit-learn itself as the judge."""

from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from sklearn.calibration import CalibratedClassifierCV
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.svm import LinearSVC

from trl.builtin.catalog import BuiltinError
from trl.builtin.toxicity_eval import LinearToxicity, build, convert

TEXTS = [
    f"{adjective} {noun} number {i}" for i in range(6) for adjective in ("rude", "kind") for noun in ("man", "dog")
]
LABELS = [int(text.startswith("rude")) for text in TEXTS]
UNSEEN = ["a RUDE man, a rude dog", "kind", "", "unknown words", "dog dog dog rude kind", "number 3"]


def fitted(folder: Path, model: Any = None, **settings: Any) -> tuple[Path, Path, TfidfVectorizer, Any]:
    vectorizer = TfidfVectorizer(**{"stop_words": "english", "min_df": 1, **settings})
    features = vectorizer.fit_transform(TEXTS)
    model = (model or CalibratedClassifierCV(LinearSVC(class_weight="balanced"))).fit(features, LABELS)
    joblib.dump(model, folder / "model.joblib")
    joblib.dump(vectorizer, folder / "vectorizer.joblib")
    return folder / "model.joblib", folder / "vectorizer.joblib", vectorizer, model


def test_probabilities_are_those_of_scikit_learn(tmp_path: Path) -> None:
    source, _, vectorizer, model = fitted(tmp_path)
    target = tmp_path / "made"
    target.mkdir()
    build(target, source, lambda stage, fraction: None)
    assert sorted(path.name for path in target.iterdir()) == ["terms.txt", "weights.npz"]
    loaded = LinearToxicity.load(target)
    expected = model.predict_proba(vectorizer.transform(TEXTS + UNSEEN))[:, 1]
    assert expected.std() > 0.1
    np.testing.assert_allclose(loaded(TEXTS + UNSEEN), expected, rtol=1e-12)
    np.testing.assert_allclose(loaded.nontoxic_logits(UNSEEN), np.log(1 / loaded(UNSEEN) - 1), rtol=1e-9)
    assert loaded([]).shape == (0,)


@pytest.mark.parametrize("settings", [{"ngram_range": (1, 2)}, {"sublinear_tf": True}, {"lowercase": False}])
def test_other_settings_of_the_vectorizer_are_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    source, words, *_ = fitted(tmp_path, **settings)
    with pytest.raises(BuiltinError, match=f"fitted with .*{next(iter(settings))}"):
        convert(source, words)


def test_other_models_are_refused(tmp_path: Path) -> None:
    source, words, *_ = fitted(tmp_path, CalibratedClassifierCV(LinearSVC(), method="isotonic"))
    with pytest.raises(BuiltinError, match=r"IsotonicRegression|isotonic"):
        convert(source, words)
    source, words, *_ = fitted(tmp_path, LinearSVC())
    with pytest.raises(BuiltinError, match="fitted with None"):
        convert(source, words)
    joblib.dump([1, 2], source)
    with pytest.raises(BuiltinError, match="holds a list"):
        convert(source, words)
