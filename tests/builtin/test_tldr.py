import random
from pathlib import Path

import pytest

from trl.builtin import resolve
from trl.builtin.__main__ import main
from trl.builtin.catalog import BuiltinError, Source
from trl.builtin.store import sha256_of_folder
from trl.builtin.tldr import build, make_splits, parse, split_sentences, to_row
from trl.builtin.wheels import locate
from trl.jsonl import read_jsonl

LEAD = "The minister of fish has told a meeting in Hull that the sea is full."


def article(number: int, *, lead: str = "", body: str = "") -> str:
    lead = lead or f"Minister number {number} has told a meeting in Hull that the sea is full."
    words = " ".join(f"word{number}x{index}" for index in range(18))
    body = body or " ".join(f"Then {words} {part}." for part in range(6))
    return f"Headline {number}\n\n{lead}\n\n{body}\n"


@pytest.mark.parametrize(
    ("paragraph", "count"),
    [
        ('"It was cold," she said. "Very cold." He agreed.', 3),
        ("Sales rose 12.7% in the U.S. market, to $1.5bn (£0.8bn).", 1),
        ("Who won? Nobody knows. £5 was paid.", 3),
        ("Mr Smith of St James's said no. but went on.", 1),
    ],
)
def test_sentences(paragraph: str, count: int) -> None:
    parts = split_sentences(paragraph)
    assert len(parts) == count and " ".join(parts) == paragraph


def test_the_prompt_is_the_body_without_headline_and_lead() -> None:
    sentences = [f"Fact {number} {'is told here at some length ' * 4}to all." for number in range(6)]
    text = f"Too many fish\n\n{LEAD}\n\n{sentences[0]}  {sentences[1]}\n\nA HEADING\n\n{' '.join(sentences[2:])}\n"
    found = parse(text)
    assert found is not None and found.fits
    # 28 words each: three whole sentences are within 90 words, four are not
    assert to_row(found) == {"prompt": " ".join(sentences[:3]) + "\n\nTL;DR:", "label": LEAD}


def test_quotation_marks_and_white_space_are_made_one() -> None:
    found = parse(f"H\n\n{LEAD}\n\nHe said:\t''Fish  are fine.''  They agreed.\n")
    assert found is not None and found.body == ('He said: "Fish are fine."', "They agreed.")


@pytest.mark.parametrize(
    "text",
    [
        "Headline\n\nOnly a lead follows this headline here.\n",
        f"Headline\n\n{LEAD} And it has a second sentence.\n\nBody text is here.\n",
        "",
    ],
)
def test_what_has_no_lead_sentence_is_left_out(text: str) -> None:
    assert parse(text) is None


@pytest.mark.parametrize(
    "text",
    [
        article(1, lead="The sea is full."),
        article(1, lead=f"{'The sea is full ' * 8}."),
        article(1, lead="How full is the sea these days, and what can be done about it?"),
        article(1, body="Too short a body is left."),
    ],
)
def test_lengths_and_questions_do_not_fit(text: str) -> None:
    splits, counts = make_splits([text])
    assert not any(splits.values()) and counts == {"not of fitting form": 1, "duplicates dropped": 0}


def test_the_split_depends_on_the_texts_alone() -> None:
    texts = [article(number) for number in range(300)]
    splits, counts = make_splits(texts)
    assert sum(counts.values()) == 0 and sum(map(len, splits.values())) == 300
    assert all(15 <= len(splits[name]) <= 50 for name in ("valid", "test"))
    assert make_splits(random.Random(0).sample(texts, 300))[0] == splits
    # A story more moves no other one.
    more, _ = make_splits([*texts, article(300)])
    assert all(set(splits[name]) <= set(more[name]) for name in splits)


def test_versions_of_a_story_stay_together() -> None:
    """One sentence in common, directly or over a third article, makes them one story."""
    shared = [f"Sentence {letter} that two of the three articles have in common, word for word." for letter in "ab"]
    texts = []
    for story in range(60):
        ends = [shared[0].replace("two", f"{story} two"), shared[1].replace("two", f"{story} two")]
        for version, extra in enumerate((ends[:1], ends, ends[1:])):
            filler = article(story * 10 + version)
            texts.append(filler.rstrip("\n") + " " + " ".join(extra) + "\n")
    splits, _ = make_splits(texts)
    place = {a.lead: name for name, articles in splits.items() for a in articles}
    assert len(place) == 180 and len(set(place.values())) == 3
    for story in range(60):
        leads = [f"Minister number {story * 10 + v} has told a meeting in Hull that the sea is full." for v in range(3)]
        assert len({place[lead] for lead in leads}) == 1


def test_each_lead_and_each_document_once() -> None:
    first = article(1)
    same_lead = article(2, lead="Minister number 1 has told a meeting in Hull that the SEA is full.")
    same_body = article(3, body=first.split("\n\n")[2].strip())
    splits, counts = make_splits([first, first, same_lead, same_body])
    assert sum(map(len, splits.values())) == 1 and counts["duplicates dropped"] == 3


def test_files_in_either_encoding_are_read(tmp_path: Path) -> None:
    (tmp_path / "in" / "business").mkdir(parents=True)
    for number, encoding in enumerate(("utf-8", "latin-1")):
        text = article(number, lead=f"Shares of firm {number} are up by £5m, the firm's owners say.")
        (tmp_path / "in" / "business" / f"{number}.txt").write_bytes(text.encode(encoding))
    (tmp_path / "out").mkdir()
    measured = build(tmp_path / "out", tmp_path / "in", lambda stage, fraction: None)
    rows = [row for name in ("train", "valid", "test") for row in read_jsonl(tmp_path / "out" / f"{name}.jsonl")]
    assert len(rows) == measured["train"] + measured["valid"] + measured["test"] == 2
    assert all("by £5m, the" in row["label"] for row in rows)


def test_a_folder_of_a_wheel_is_pinned_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data_package_with_folder" / "texts"
    (folder / "b").mkdir(parents=True)
    for name in ("b/1.txt", "b/2.txt", "b/ignored.pyc"):
        (folder / name).write_text("abc")
    monkeypatch.syspath_prepend(str(tmp_path))
    # printf '%s  b/1.txt\n%s  b/2.txt\n' $ABC $ABC | sha256sum, with sha256("abc") twice
    expected = "0ce64a25a7c56f0954f798cf14854b7718b85c6eed9de3cc381bf740c439d72d"
    source = Source("x==1", "data_package_with_folder", "texts", expected, files="*/*.txt")
    assert locate(source) == folder and sha256_of_folder(folder, "*/*.txt") == expected
    (folder / "b" / "ignored.pyc").write_text("more")
    assert locate(source) == folder
    (folder / "b" / "2.txt").rename(folder / "b" / "3.txt")
    with pytest.raises(BuiltinError, match=r"texts is not the folder of x==1"):
        locate(source)


@pytest.mark.builtin
def test_the_real_articles() -> None:
    assert main(["prepare", "tldr"]) == 0
    rows = {
        name: read_jsonl(resolve("builtin:tldr", "summaries") / f"{name}.jsonl") for name in ("train", "valid", "test")
    }
    assert {name: len(part) for name, part in rows.items()} == {"train": 1551, "valid": 228, "test": 177}
    every = [row for part in rows.values() for row in part]
    assert all(len({row[key] for row in every}) == len(every) for key in ("label", "prompt"))
    for row in every:
        document = row["prompt"].removesuffix("\n\nTL;DR:")
        assert document != row["prompt"] and 50 <= len(document.split()) <= 90 and 8 <= len(row["label"].split()) <= 30
        assert row["label"] not in document and row["label"].endswith(".")
        assert not {"\ufffd", "Â", "â"} & set(document + row["label"]) and "  " not in document
