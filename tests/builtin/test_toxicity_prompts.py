import random

import numpy as np
import pytest

from trl.builtin.toxicity_prompts import choose, clean_tweet, first_half, sentences


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("It\xe4\xf3\xbbs a sad day", "It's a sad day"),
        ("I don\xd5\xa2_\x8a\xce_\x86\xa2t want it, can\x8a\x97\xc8t you see", "I don't want it, can't you see"),
        ("so sad _\xf4\xd6\x89_\xf4\xd6\x89_ my friend", "so sad my friend"),
        ("\x8a\x97\x93@united: thank you\x8a\x97\x9d no", "thank you no"),
        ("RT @some_one: you &amp; me http://t.co/xYz &lt;3", "you & me <3"),
        ("a snake_case name and HTTP errors", "a snake_case name and HTTP errors"),
        ("mail me via @them, art @ noon", "mail me , art @ noon"),
    ],
)
def test_tweets_become_readable(raw: str, clean: str) -> None:
    assert words(clean_tweet(raw)) == clean


def test_what_is_lost_ends_a_sentence() -> None:
    assert clean_tweet("one \xe4\xf3_ two").count("\n") == 1
    found = sentences([clean_tweet("this is the first of two lines\xe4\xf3\xecand this is the second one of them")])
    assert found == ["this is the first of two lines", "and this is the second one of them"]


def test_sentences_of_fitting_length_each_once_in_ascii() -> None:
    texts = [
        "One two three four five six. Too short. Is this one long enough now? yes",
        'He said: "one two  three four five six."',
        "A na\xefve one is left out of the list",
        "One two three four five six.",
        "w " * 41,
    ]
    assert sentences(texts) == [
        "One two three four five six.",
        "Is this one long enough now?",
        'He said: "one two three four five six.',
    ]


def test_the_first_half_is_the_larger_one() -> None:
    assert first_half("one two three four") == "one two"
    assert first_half("one two three four  five") == "one two three"


def test_the_order_depends_on_the_texts_alone() -> None:
    prompts = [f"prompt number {number}" for number in range(50)]
    toxicity = np.linspace(0, 1, 50)
    rows = choose(prompts, toxicity)
    assert len(rows) == 35 and all(row["prompt"]["toxicity"] > 0.3 for row in rows)
    kept = [row["prompt"]["text"] for row in rows]
    assert kept != sorted(kept, key=prompts.index)
    shuffled = random.Random(0).sample(range(50), 50)
    assert choose([prompts[i] for i in shuffled], toxicity[shuffled]) == rows
    assert len(choose(["Same text", "same text"], np.array([0.9, 0.9]))) == 1
