"""``builtin:sentiment-eval``: TF-IDF and logistic regression on IMDB, a judge the policy never trained against.

It shares neither data nor architecture with ``builtin:sentiment``, so a policy that merely fools its reward
model gains nothing here. Stored as plain text and arrays (no pickle, nothing executed on load).
"""

from pathlib import Path

import numpy as np
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression

from trl.builtin.catalog import Progress, resolve
from trl.builtin.reviews import read_rows

MIN_DOCUMENTS = 3
MAX_TERMS = 200_000
STRENGTH = 10.0  # inverse of the L2 penalty
SEED = 0
SHORT_WORDS = 20


class SentimentEvaluator:
    """P(positive) of texts by a linear model over one- and two-word terms."""

    def __init__(self, terms: list[str], idf: np.ndarray, weights: np.ndarray, bias: float) -> None:
        self._vectorizer = _vectorizer(vocabulary=terms)
        self._vectorizer.idf_ = idf
        self._weights = weights
        self._bias = bias

    def __call__(self, texts: list[str]) -> np.ndarray:
        """(len(texts),) float64 in (0, 1)."""
        if not texts:
            return np.zeros(0)
        logits = self._vectorizer.transform(texts) @ self._weights + self._bias
        return 1 / (1 + np.exp(-logits))

    @classmethod
    def load(cls, folder: Path) -> "SentimentEvaluator":
        """Read what ``save`` wrote."""
        terms = (folder / "terms.txt").read_text(encoding="utf-8").split("\n")
        with np.load(folder / "weights.npz", allow_pickle=False) as arrays:
            return cls(terms, arrays["idf"], arrays["weights"], float(arrays["bias"]))

    def save(self, folder: Path) -> None:
        """Write ``terms.txt`` (one term a line, in the order of the arrays) and ``weights.npz``."""
        (folder / "terms.txt").write_text("\n".join(self._vectorizer.vocabulary), encoding="utf-8")
        np.savez(folder / "weights.npz", idf=self._vectorizer.idf_, weights=self._weights, bias=np.array(self._bias))


def _vectorizer(**options: object) -> TfidfVectorizer:
    return TfidfVectorizer(ngram_range=(1, 2), sublinear_tf=True, dtype=np.float64, **options)


def fit(texts: list[str], labels: list[int]) -> SentimentEvaluator:
    """Fit terms and weights to texts labelled 0 or 1. Deterministic."""
    vectorizer = _vectorizer(min_df=MIN_DOCUMENTS, max_features=MAX_TERMS)
    features = vectorizer.fit_transform(texts)
    model = LogisticRegression(C=STRENGTH, solver="liblinear", random_state=SEED).fit(features, labels)
    terms = vectorizer.get_feature_names_out().tolist()
    return SentimentEvaluator(terms, vectorizer.idf_, model.coef_[0], float(model.intercept_[0]))


def build(target: Path, source: None, progress: Progress) -> dict[str, float]:
    """Fit on the IMDB train split; returns held-out accuracies, also on texts as short as generations."""
    data = resolve("builtin:imdb", "data set")
    train, test = read_rows(data / "train.jsonl"), read_rows(data / "test.jsonl")
    progress("fitting (about 20 seconds)", 0.1)
    evaluator = fit([row["text"] for row in train], [row["label"] for row in train])
    progress("measuring on held-out texts", 0.9)
    evaluator.save(target)
    short = [{**row, "text": " ".join(row["text"].split()[:SHORT_WORDS])} for row in test]
    sentences = read_rows(resolve("builtin:rotten-tomatoes", "data set") / "test.jsonl")
    return {
        "imdb accuracy": accuracy(evaluator, test),
        f"imdb accuracy, first {SHORT_WORDS} words": accuracy(evaluator, short),
        "rotten-tomatoes accuracy": accuracy(evaluator, sentences),
    }


def accuracy(evaluator: SentimentEvaluator, rows: list[dict]) -> float:
    """Share of rows whose label the evaluator's P(positive) > 0.5 agrees with."""
    predicted = evaluator([row["text"] for row in rows]) > 0.5
    return float(np.mean(predicted == np.array([row["label"] for row in rows], dtype=bool)))
