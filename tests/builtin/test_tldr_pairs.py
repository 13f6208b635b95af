import random
from collections import Counter

import pytest

from trl.builtin import resolve
from trl.builtin.__main__ import main
from trl.builtin.tldr_pairs import (
    MAKERS,
    Summary,
    baselines,
    detail,
    length,
    make_pairs,
    names,
    order,
    other,
    repeat,
    sentence,
    splice,
)
from trl.data.summarization import load_preference_pairs
from trl.jsonl import read_jsonl

OWN = Summary(
    'Mr Blair said so in Hull. "It is a good plan for all of us in Hull," he said. '
    "He will pay for the plan out of the taxes of next year. "
    "Farmers and fishers in the town of Hull have asked for such a plan for many years.\n\nTL;DR:",
    "A plan of Tony Blair to spend £5m on 12 schools in Hull has been welcomed by farmers.",
)
ALIKE = Summary(
    "The Bank of Spain said in June that it was $7bn, and 30% more was lent by Maria Lopez in Madrid.\n\nTL;DR:",
    "Banks lent $7bn to Gordon Brown in Madrid last year, which is more than they ever did.",
)


@pytest.fixture
def draw() -> random.Random:
    return random.Random(0)


def test_other_is_the_other_lead(draw: random.Random) -> None:
    assert other(OWN, ALIKE, draw) == ALIKE.lead


def test_names_and_figures_are_replaced_by_the_others(draw: random.Random) -> None:
    text = names(OWN, ALIKE, draw)
    assert not any(own in text for own in ("Tony", "Blair", "£5m", "12", "Hull"))
    assert text.startswith("A plan of ") and " schools in " in text and text.endswith(" has been welcomed by farmers.")
    foreign = text.removeprefix("A plan of ").split(" to spend ")[0]
    assert foreign in f"{ALIKE.lead} {ALIKE.document}"
    within = Summary(OWN.prompt, "A concert of U2 in Rome has sold out 2 times.")
    assert names(within, Summary("x", "Some 77 came."), draw) == "A concert of U2 in Rome has sold out 77 times."
    plain = Summary(OWN.prompt, "A plan to spend more on schools has been welcomed by farmers.")
    assert names(plain, ALIKE, draw) == plain.lead  # nothing to replace: make_pairs leaves it out


def test_splice_joins_two_halves(draw: random.Random) -> None:
    assert (
        splice(OWN, ALIKE, draw) == "A plan of Tony Blair to spend £5m on last year, which is more than they ever did."
    )


def test_order_keeps_all_words_and_both_ends(draw: random.Random) -> None:
    text = order(OWN, ALIKE, draw)
    assert text != OWN.lead and sorted(text.split()) == sorted(OWN.words)
    assert text.startswith("A ") and text.endswith(" farmers.")


def test_repeat_says_its_last_words_over_and_over(draw: random.Random) -> None:
    for _ in range(20):
        words = repeat(OWN, ALIKE, draw).rstrip(".").split()
        assert len(words) == len(OWN.words)
        assert any(words[-n:] == words[-2 * n : -n] for n in (2, 3, 4))


def test_detail_is_a_sentence_of_the_body_that_stands_alone(draw: random.Random) -> None:
    text = "Farmers and fishers in the town of Hull have asked for such a plan for many years."
    assert detail(OWN, ALIKE, draw) == text
    assert detail(Summary("He said so. Very short.\n\nTL;DR:", OWN.lead), ALIKE, draw) == ""


def test_length_is_half_or_one_and_a_half(draw: random.Random) -> None:
    counts = Counter(len(length(OWN, ALIKE, draw).split()) for _ in range(200))
    assert set(counts) == {9, 27} and min(counts.values()) > 70


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("said he was, -", "Said he was."),
        ('a "whole" thing', 'A "whole" thing.'),
        ('a "half thing."', "A half thing."),
        ('said "both" and "one', "Said both and one."),
        ("ends well.", "Ends well."),
    ],
)
def test_sentences_begin_and_end_alike(words: str, text: str) -> None:
    assert sentence(words.split()) == text


def toy_summaries(count: int) -> list[Summary]:
    draw = random.Random(5)
    words = ["plan", "school", "tax", "vote", "strike", "farm", "port", "road", "bank", "film", "song", "game"]

    def text(length: int) -> str:
        return f"{' '.join(draw.choices(words, k=length - 2))} in Town{draw.choice('abcdefghij')}"

    return [
        Summary(f"The {text(12)}. The {text(16)}. The {text(20)}.\n\nTL;DR:", f"The {text(draw.randint(9, 20))}.")
        for _ in range(count)
    ]


def test_pairs_depend_on_the_summaries_alone() -> None:
    summaries = toy_summaries(40)
    pairs = make_pairs(summaries)
    assert make_pairs(summaries) == pairs and len(pairs) == 120
    assert set(Counter(pair["prompt"] for pair in pairs).values()) == {3}
    assert {pair["kind"] for pair in pairs} == set(MAKERS)
    assert [pair["kind"] for pair in pairs[:20]] != sorted(pair["kind"] for pair in pairs[:20])
    for pair in pairs:
        assert pair["chosen"] != pair["rejected"] and pair["rejected"].endswith(".") and pair["rejected"][0].isupper()
        assert Summary(pair["prompt"], pair["chosen"]) in summaries


def test_baselines_find_a_surface_cue() -> None:
    """Chosen texts are one word longer and say "yes": three of the four judges must see it."""

    def pairs(seed: int) -> list[dict[str, str]]:
        draw = random.Random(seed)
        texts = [" ".join(draw.choices(["tax", "vote", "road"], k=8)) for _ in range(60)]
        return [{"prompt": "p", "chosen": f"{text} yes.", "rejected": f"{text}."} for text in texts]

    found = baselines(pairs(0), pairs(1))
    assert found == {"longer": 100, "ends with a full stop": 50, "lengths": 100, "words": 100}
    blind = [pair | {"rejected": pair["chosen"]} for pair in pairs(2)]
    assert set(baselines(pairs(0), blind).values()) == {50}


@pytest.mark.builtin
def test_the_real_pairs() -> None:
    assert main(["prepare", "tldr-pairs"]) == 0
    folder = resolve("builtin:tldr-pairs", "preference pairs")
    articles = resolve("builtin:tldr", "summaries")
    sizes = {"train": 4653, "valid": 684, "test": 531}
    for name, size in sizes.items():
        pairs = read_jsonl(folder / f"{name}.jsonl")
        own = {(row["prompt"], row["label"]) for row in read_jsonl(articles / f"{name}.jsonl")}
        leads = {label for _, label in own}
        assert len(pairs) == size and {(pair["prompt"], pair["chosen"]) for pair in pairs} == own
        assert all(pair["rejected"] in leads for pair in pairs if pair["kind"] == "other")
        assert len(load_preference_pairs("builtin:tldr-pairs", split=name)) == size
        share = Counter(pair["kind"] for pair in pairs)
        assert min(share.values()) > size / 10 and max(share.values()) < size / 5
