"""ROUGE rewards: hand-counted overlaps, and the library's own scores as the slow twin."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from trl.critic.attribution import AttributionCritic
from trl.critic.types import CritiqueRequest
from trl.rewards import RougeReward
from trl.rewards.rouge import RougeKind
from trl.summary import of_documents

REFERENCE = "the cat sat on the mat"


def score(kind: RougeKind, completion: Any, reference: Any) -> float | None:
    (value,) = RougeReward(kind)(completions=[completion], references=[reference])
    return value


@pytest.mark.parametrize(
    ("kind", "completion", "reference", "expected"),
    [
        # 4 of 6 words on either side: the, cat, on, mat
        ("rouge1", "the cat lay on a mat", REFERENCE, 100 * 4 / 6),
        # the reference has two "the", so the third one does not count: P = 2/3, R = 2/6
        ("rouge1", "the the the", REFERENCE, 100 * 4 / 9),
        # 1 of 5 pairs: the cat
        ("rouge2", "the cat lay on a mat", REFERENCE, 20.0),
        # P = 1/1, R = 1/5
        ("rouge2", "sat on", REFERENCE, 100 / 3),
        # the, cat, on, mat in this order
        ("rougeL", "the cat lay on a mat", REFERENCE, 100 * 4 / 6),
        # all three words are there, but only one in order: P = 1/3, R = 1/6
        ("rouge1", "mat on cat", REFERENCE, 100 * 6 / 9),
        ("rougeL", "mat on cat", REFERENCE, 100 * 2 / 9),
        # sentences in another order: half of the words are a common subsequence, each sentence is one alone
        ("rougeL", "The cat slept. The dog barked.", "The dog barked. The cat slept.", 50.0),
        ("rougeLsum", "The cat slept. The dog barked.", "The dog barked. The cat slept.", 100.0),
        ("rougeLsum", "The cat slept\nThe dog barked", "The dog barked\nThe cat slept", 100.0),
        # "Mr." and "e.g." end no sentence, so the parts stay in one subsequence: 3 of 5 words
        ("rougeLsum", "Mr. Smith e.g. slept", "e.g. slept, Mr. Smith", 60.0),
        ("rouge1", "THE CAT, sat; on the mat!", REFERENCE, 100.0),
        ("rouge1", "", REFERENCE, 0.0),
        ("rouge1", " ... ", REFERENCE, 0.0),
        ("rouge1", "two cats jumping", "two cat jumps", 100.0),
    ],
)
def test_hand_counted(kind: RougeKind, completion: str, reference: str, expected: float) -> None:
    assert score(kind, completion, reference) == pytest.approx(expected)


def test_the_best_of_several_references_counts() -> None:
    assert score("rouge1", "a dog", ["the cat", "a dog barked", "a"]) == pytest.approx(80.0)
    assert score("rouge1", "a dog", ["", "a dog"]) == 100.0


@pytest.mark.parametrize("reference", ["", "...", [], ["", " – "]])
def test_no_verdict_without_a_reference(reference: Any) -> None:
    assert score("rouge1", "a dog", reference) is None


def test_one_score_per_sample_in_order_and_other_columns_are_ignored() -> None:
    scores = RougeReward()(
        prompts=["Post TL;DR:"] * 3,
        completions=["a dog", "a cat", [{"role": "assistant", "content": "a cat"}]],
        references=["a dog", "a dog", "a cat"],
        completion_ids=[[1]] * 3,
    )
    assert scores == [pytest.approx(100.0), pytest.approx(50.0), pytest.approx(100.0)]


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match=r"'rouge3'.*rouge1, rouge2, rougeL, rougeLsum"):
        RougeReward("rouge3")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="2 completions and 1 references"):
        RougeReward()(completions=["a", "b"], references=["a"])


WORDS = st.sampled_from(
    ("the", "a", "cats", "cat", "jumping", "jumped", "universities", "don't", "£4m", "naïve", ".", "\n")
)
TEXTS = st.lists(WORDS, max_size=25).map(" ".join)


@given(TEXTS, TEXTS.filter(lambda text: any(word.isascii() and word.isalnum() for word in text.split())))
def test_kept_stems_change_nothing(completion: str, reference: str) -> None:
    for kind in ("rouge1", "rouge2", "rougeL"):
        plain = RougeScorer([kind], use_stemmer=True).score(reference, completion)[kind].fmeasure
        assert score(kind, completion, reference) == 100 * plain


def test_words_are_stemmed_once() -> None:
    reward = RougeReward()
    texts = ["jumping over lazy dogs", "lazy dogs jumping"]
    reward(completions=texts * 50, references=texts[::-1] * 50)
    assert reward._tokenizer.stem.cache_info().misses == 4


# --- as the environment of a summary critic


def rows(*triples: tuple[str, str, str]) -> list[dict[str, str]]:
    return [dict(zip(("query", "document", "label"), triple, strict=True)) for triple in triples]


def test_rewards_by_document() -> None:
    calls = []

    def reward(**columns: Any) -> list[float]:
        calls.append(columns)
        return [1.0] * len(columns["completions"])

    of: Callable[..., Any] = of_documents(
        reward, rows(("A TL;DR:", "A", "one"), ("B TL;DR:", "B", "two"), ("A TL;DR:", "A", "three"), ("", "B", "two"))
    )
    assert of(prompts=["B", "A"], completions=["x", "y"], extra=[1, 2]) == [1.0, 1.0]
    assert calls == [
        {"prompts": ["B TL;DR:", "A TL;DR:"], "completions": ["x", "y"], "references": [["two"], ["one", "three"]]}
    ]


def quotes(summary: str, *labels: str) -> tuple[str, list[str]]:
    environment = of_documents(RougeReward(), rows(*(("", "the post", label) for label in labels)))
    [rouge] = environment(prompts=["the post"], completions=[summary])
    assert rouge is not None
    request = CritiqueRequest(summary, "the post", rouge / 10)
    (critique,) = AttributionCritic(environment, "summary").critique([request])
    assert all(span.polarity == "negative" for span in critique.spans)
    return critique.status, [span.text for span in critique.spans]


def test_attribution_marks_the_words_that_the_human_summary_does_not_have() -> None:
    label = "Police found the missing dog in a barn near Oxford"
    assert quotes(" A big dog was found near Oxford, say vets", label) == ("ok", ["big", "was", "say vets"])
    assert quotes(" The missing dog", label) == ("none", [])
    assert quotes(" big dogs", label, "A big day") == ("ok", ["dogs"])  # 40 for "A big day", 33 for the other


def test_a_word_that_rouge_counts_twice_hides_no_other() -> None:
    assert quotes(" The 33-year ban is off, he's sad", "The judge") == ("ok", ["33-year ban is off, he's sad"])
    many = " ".join(f"word{number}" for number in range(25))
    assert quotes(f" The judge {many} it's", "The judge") == ("ok", [f"{many} it's"])


def test_attribution_quotes_all_of_a_summary_that_has_no_word_of_the_human_one() -> None:
    """The limit of one common word, where all others are quoted; and no praise."""
    assert quotes(" nothing in common", "Police found the dog") == ("ok", ["nothing in common"])
    assert quotes(" nothing in the common", "Police found the dog") == ("ok", ["nothing in", "common"])
