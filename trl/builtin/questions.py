"""``builtin:questions``: short questions with one right answer each, made by rules from small word lists.

Rows of ``train.jsonl`` and ``eval.jsonl`` are tuning rows (`trl.data.tuning_rows`): an instruction, one solved example
of the same kind, the question, and ``references.answer``, one word. A small chat model gets about a third of
them right when it samples; most of what it gets wrong is a babbled answer and not a lack of knowledge.

Within a kind of question, what is asked about in one split (a word, a country) is not asked about in the other,
and the questions of ``eval`` are worded in a way that ``train`` does not have.
"""

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl.builtin.catalog import Progress
from trl.jsonl import dump_line

INSTRUCTION = "Answer with one word."
PER_KIND = {"train": 80, "eval": 16}
"""Most rows of one kind of question."""
HELD_OUT = 4
"""Every fourth thing that is asked about is for ``eval``."""

_CAPITALS = (
    "France Paris, Japan Tokyo, Italy Rome, Egypt Cairo, Spain Madrid, Kenya Nairobi, Canada Ottawa, Greece Athens, "
    "Germany Berlin, Russia Moscow, Portugal Lisbon, Austria Vienna, Poland Warsaw, Hungary Budapest, Norway Oslo, "
    "Sweden Stockholm, Denmark Copenhagen, Finland Helsinki, Ireland Dublin, Cuba Havana, Peru Lima, Thailand Bangkok, "
    "Vietnam Hanoi, Iraq Baghdad, Iran Tehran, Syria Damascus, Lebanon Beirut, Turkey Ankara, Belgium Brussels, "
    "Australia Canberra, England London, China Beijing"
)
_COLORS = (
    "grass green, snow white, blood red, coal black, a_banana yellow, a_carrot orange, the_sky blue, chocolate brown, "
    "a_lemon yellow, a_tomato red, milk white, a_cucumber green, a_strawberry red, spinach green, a_crow black, "
    "a_pumpkin orange, salt white, broccoli green, a_cherry red, a_flamingo pink, a_sunflower yellow, lettuce green, "
    "the_ocean blue, a_swan white, soil brown, a_lime green, an_elephant gray, butter yellow, a_polar_bear white, "
    "a_fire_truck red, tar black, a_frog green"
)
_OPPOSITES = (
    "hot cold, up down, day night, wet dry, open closed, left right, north south, east west, black white, in out, "
    "on off, early late, before after, buy sell, win lose, push pull, love hate, alive dead, full empty, high low, "
    "strong weak, young old, long short, rich poor, good bad, clean dirty, first last, inside outside, life death, "
    "war peace, true false, male female"
)
_KINDS = {
    "animal": "horse tiger rabbit goat shark lion monkey cow pig wolf",
    "fruit": "banana grape mango peach pear plum cherry melon lemon fig",
    "tool": "hammer saw drill wrench shovel chisel screwdriver rake pliers file",
    "vehicle": "bus truck bicycle car tractor motorcycle van taxi train tram",
    "sport": "tennis hockey golf baseball rugby cricket football boxing skiing judo",
    "metal": "iron gold copper tin lead zinc nickel steel bronze brass",
}
_PLURALS = (
    "cat cats, tree trees, car cars, book books, river rivers, stone stones, cloud clouds, house houses, box boxes, "
    "bus buses, church churches, dish dishes, fox foxes, glass glasses, city cities, baby babies, lady ladies, "
    "story stories, dog dogs, road roads, bird birds, ship ships, table tables, window windows, garden gardens, "
    "brush brushes, bench benches, party parties, letter letters, bridge bridges, flower flowers, engine engines"
)
_CONTINENTS = {
    "Europe": "France Italy Spain Greece Germany Portugal Austria Poland Hungary Norway Sweden Belgium",
    "Asia": "Japan Thailand Vietnam Iraq Iran China India Nepal Pakistan Mongolia Cambodia Korea",
    "Africa": "Kenya Egypt Morocco Nigeria Ghana Ethiopia Uganda Algeria Zambia Senegal Angola Tunisia",
}


@dataclass(frozen=True)
class Case:
    """One thing to ask: what fills the blanks of a wording, and the right answer."""

    blanks: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Kind:
    """A kind of question: wordings (the last one for ``eval`` alone), and the cases of either split."""

    name: str
    wordings: tuple[str, ...]
    train: list[Case]
    eval: list[Case]


def build(target: Path, source: Path | None, progress: Progress) -> dict[str, float]:
    """Write both splits."""
    counts: dict[str, float] = {}
    for split in ("train", "eval"):
        progress(f"writing {split}", 0.5)
        rows = make_rows(split)
        (target / f"{split}.jsonl").write_text("".join(dump_line(row) + "\n" for row in rows), encoding="utf-8")
        counts[split] = len(rows)
    return counts


def make_rows(split: str) -> list[dict[str, Any]]:
    """The rows of ``train`` or ``eval``, always the same, in an order that looks random."""
    rows = [row for kind in kinds() for row in _rows_of(kind, split)]
    return sorted(rows, key=lambda row: _rank(dump_line(row)))


def _rows_of(kind: Kind, split: str) -> list[dict[str, Any]]:
    cases, wordings = (kind.train, kind.wordings[:-1]) if split == "train" else (kind.eval, kind.wordings[-1:])
    pairs = sorted(itertools.product(cases, wordings), key=lambda pair: _rank(f"{kind.name} {pair}"))
    rows = []
    for case, wording in pairs[: PER_KIND[split]]:
        # the example is never about the same thing, and always about one of train
        others = [other for other in kind.train if not set(other.blanks) & set(case.blanks)]
        example = min(others, key=lambda other: _rank(f"{case} {wording} {other}"))
        turns = [
            {"role": "user", "parts": [{"text": wording.format(*example.blanks)}]},
            {"role": "model", "parts": [{"text": example.answer}]},
            {"role": "user", "parts": [{"text": wording.format(*case.blanks)}]},
        ]
        references = {"answer": case.answer, "kind": kind.name}
        rows.append(
            {"systemInstruction": {"parts": [{"text": INSTRUCTION}]}, "contents": turns, "references": references}
        )
    return rows


def kinds() -> Iterator[Kind]:
    """All kinds of question with their cases."""
    yield _of_pairs(
        "capital",
        ("What is the capital of {}?", "Which city is the capital of {}?", "Name the capital city of {}."),
        _CAPITALS,
    )
    yield _of_pairs("color", ("What color is {}?", "Which color does {} have?", "Name the color of {}."), _COLORS)
    yield _of_pairs(
        "opposite",
        ("What is the opposite of {}?", "Which word is the opposite of {}?", "Name the opposite of {}."),
        _OPPOSITES,
    )
    yield _of_pairs(
        "plural",
        ("What is the plural of {}?", "What do you call more than one {}?", "Write the plural of {}."),
        _PLURALS,
    )
    countries, words = _by_answer(_CONTINENTS), _by_answer(_KINDS)
    yield Kind(
        "continent",
        ("On which continent is {}?", "Which continent does {} belong to?", "Name the continent of {}."),
        *(list(_plain(split)) for split in countries),
    )
    yield Kind(
        "kind",
        ("What kind of thing is {}?", "Which kind of thing does {} mean?", "Name the kind of thing that {} is."),
        *(list(_plain(split)) for split in words),
    )
    yield Kind(
        "either",
        ("Is {} the name of {} or of {}?", "What is {}: {} or {}?", "Does {} mean {} or {}?"),
        *(list(_either(split)) for split in words),
    )


def _of_pairs(name: str, wordings: tuple[str, ...], pairs: str) -> Kind:
    """From "thing answer, thing answer"; an underscore is a space within a thing."""
    cases = [Case((thing.replace("_", " "),), answer) for thing, answer in (pair.split() for pair in pairs.split(", "))]
    return Kind(name, wordings, *_split(cases))


def _split(things: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """For ``train``, and every fourth in an order that looks random for ``eval``."""
    order = sorted(things, key=lambda thing: _rank(repr(thing)))
    return [each for i, each in enumerate(order) if i % HELD_OUT], order[::HELD_OUT]


def _by_answer(lists: dict[str, str]) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """From words by their answer to the words of either split."""
    halves = {answer: _split(words.split()) for answer, words in lists.items()}
    train = {answer: words for answer, (words, _) in halves.items()}
    return train, {answer: words for answer, (_, words) in halves.items()}


def _plain(words: dict[str, list[str]]) -> Iterator[Case]:
    for answer, members in words.items():
        yield from (Case((word,), answer) for word in members)


def _either(words: dict[str, list[str]]) -> Iterator[Case]:
    for kind, other in itertools.permutations(words, 2):
        for word in words[kind]:
            pair = (kind, other) if _rank(f"{word} {other}") < _MIDDLE else (other, kind)
            yield Case((word, *map(_with_article, pair)), kind)


def _with_article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


_MIDDLE = "8"  # of the first hexadecimal digit


def _rank(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
