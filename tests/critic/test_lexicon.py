import json
import time
from pathlib import Path

import pytest

from trl.builtin import NotPreparedError
from trl.builtin.catalog import find_item
from trl.builtin.store import publish
from trl.critic.lexicon import LexiconCritic
from trl.critic.types import CritiqueRequest


def spans_of(text: str) -> list[tuple[str, str]]:
    (critique,) = LexiconCritic("sentiment").critique([CritiqueRequest(text)])
    assert critique.status == ("ok" if critique.spans else "none")
    return [(span.text, span.polarity) for span in critique.spans]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The film was terrible", [("terrible", "negative")]),
        ("A wonderful, moving story", [("wonderful", "positive")]),
        ("It was really very good indeed", [("really very good", "positive")]),
        ("The man walks to the second house", []),
        ("", []),
        ("?! ... \n", []),
        # negation turns the sign, and its word is part of the quote
        ("This is not good at all", [("not good", "negative")]),
        ("It isn't a very good film", [("isn't a very good", "negative")]),
        ("It isn’t bad", [("isn’t bad", "positive")]),
        ("There is no fun in it", [("no fun", "negative")]),
        ("No, they left", []),
        # ... but not across punctuation or further than three words
        ("I would not, great as it is, go", [("great", "positive")]),
        ("Not that it would ever be great", [("great", "positive")]),
        # neighbours of one sign are one span, of two signs two
        ("a horrible awful mess", [("horrible awful mess", "negative")]),
        ("a great horrible thing", [("great", "positive"), ("horrible", "negative")]),
        ("great, wonderful", [("great", "positive"), ("wonderful", "positive")]),
        ("not good or funny", [("not good", "negative"), ("funny", "negative")]),
        # degree words that the lexicon also scores
        ("kind of boring", [("kind of boring", "negative")]),
        ("pretty bad", [("pretty bad", "negative")]),
        ("a pretty house", [("pretty", "positive")]),
        ("It was incredible", []),
        ("GREAT film", [("GREAT", "positive")]),
        ("so-called charming", [("charming", "positive")]),
    ],
)
def test_marks(text: str, expected: list[tuple[str, str]]) -> None:
    assert spans_of(text) == expected


def test_spans_are_quoted_verbatim_and_repeatable() -> None:
    text = "Isn't it  SO\tgood? The plot's dull, dull, DULL; but I love “the charming” cast…"
    spans = spans_of(text)
    assert spans and all(quote in text for quote, _ in spans)
    assert spans == spans_of(text)


def test_other_styles_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'summary'; expected 'sentiment' or 'toxicity'"):
        LexiconCritic("summary")


@pytest.fixture
def toxic_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELC_HOME", str(tmp_path))

    def fill(target: Path) -> dict[str, float]:
        (target / "lexicon.json").write_text(json.dumps({"idiot": 0.98, "stupid": 0.95, "freaking": 0.7}))
        return {}

    publish(find_item("toxicity"), fill, lambda: 0.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("You stupid IDIOT, go home", ["stupid IDIOT"]),
        ("stupid. idiot", ["stupid", "idiot"]),
        # unlike praise, abuse stays abuse behind a negation, and adverbs are not part of it
        ("he is not an idiot", ["idiot"]),
        ("it isn't very stupid, no idiot", ["stupid", "idiot"]),
        ("pretty stupid", ["stupid"]),
        ("freaking stupid", ["freaking stupid"]),  # VADER's adverb of degree
        ("a terrible, horrible day", []),  # bad, not toxic
        ("", []),
    ],
)
def test_toxic_words(toxic_words: None, text: str, expected: list[str]) -> None:
    (critique,) = LexiconCritic("toxicity").critique([CritiqueRequest(text)])
    assert [(span.text, span.polarity) for span in critique.spans] == [(quote, "negative") for quote in expected]
    assert critique.status == ("ok" if expected else "none")


def test_toxic_words_come_from_the_prepared_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELC_HOME", str(tmp_path))
    with pytest.raises(NotPreparedError, match="prepare toxicity"):
        LexiconCritic("toxicity")


def test_fast_and_linear() -> None:
    critic = LexiconCritic("sentiment")
    requests = [CritiqueRequest("not a very good film but the cast is wonderful " * 3)] * 16
    start = time.perf_counter()
    critic.critique(requests)
    assert time.perf_counter() - start < 0.25
    start = time.perf_counter()
    critic.critique([CritiqueRequest("good bad " * 50_000)])
    assert time.perf_counter() - start < 10
