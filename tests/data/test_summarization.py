import json
import logging
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

from tests.tiny import tiny_tokenizer
from trl.builtin import NotPreparedError, UnknownBuiltinError
from trl.builtin.catalog import find_item
from trl.builtin.store import publish
from trl.data.summarization import answer, document_of, load_preference_pairs, load_summaries, load_summary_prompts
from trl.jsonl import DataFileError

REDDIT = "SUBREDDIT: r/pets\nTITLE: My cat\nPOST: It sleeps all day.\nAnd at night too.\nTL;DR:"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


def save(path: Path, rows: list[Any]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def post(number: int, **other: Any) -> dict[str, Any]:
    return {"prompt": f"Post number {number} is long.\n\nTL;DR:", "label": f" Summary {number}.\n", **other}


def test_rows_of_both_layouts(tmp_path: Path) -> None:
    path = save(tmp_path / "a.jsonl", [{"prompt": REDDIT + " ", "label": " cat  sleeps "}, post(1, upvotes=3)])
    assert load_summaries(path) == [
        {"prompt": REDDIT, "label": "cat  sleeps", "document": "It sleeps all day.\nAnd at night too."},
        {"prompt": "Post number 1 is long.\n\nTL;DR:", "label": "Summary 1.", "document": "Post number 1 is long."},
    ]


def test_the_document_of_a_prompt() -> None:
    assert document_of("A story about a POST: office.\nTL;DR:") == "A story about a POST: office."
    assert document_of("TITLE: x\nPOST: first\nPOST: second\nTL;DR:") == "first\nPOST: second"
    assert document_of("He wrote TL;DR: in it.\n\nTL;DR:") == "He wrote TL;DR: in it."


@pytest.mark.parametrize("label", ["said so", " said so", "  said so\n"])
def test_a_label_follows_its_prompt_with_one_space(label: str) -> None:
    assert answer(label) == " said so"


def test_other_prompts_are_left_out_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path / "a.jsonl", [post(0), {"prompt": "No ending", "label": "x"}, post(2)])
    with caplog.at_level(logging.INFO):
        rows = load_summaries(path)
    assert [row["label"] for row in rows] == ["Summary 0.", "Summary 2."]
    assert "left out 1 of 3 rows whose prompt does not end in 'TL;DR:'" in caplog.text
    bad = save(tmp_path / "b.jsonl", [{"prompt": "No ending", "label": "x"}])
    with pytest.raises(DataFileError, match="has 1 rows, and all of them are left out"):
        load_summaries(bad)
    with pytest.raises(DataFileError, match="has no rows"):
        load_summaries(save(tmp_path / "c.jsonl", []))


def test_prompts_within_both_lengths(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, caplog: pytest.LogCaptureFixture
) -> None:
    def of_length(length: int) -> dict[str, Any]:
        return {"prompt": "x" * (length - 7) + "\nTL;DR:", "label": f"{length}"}

    path = save(tmp_path / "a.jsonl", [of_length(length) for length in (2001, 2000, 30, 31)])
    with caplog.at_level(logging.INFO):
        rows = load_summary_prompts(path, tokenizer, max_tokens=10_000)
    assert [row["label"] for row in rows] == ["2000", "30", "31"]
    assert "left out 1 of 4 rows of more than 2000 characters or 10000 tokens" in caplog.text
    for row in rows:
        assert row["input_ids"] == tokenizer(row["query"])["input_ids"] and row["query"].endswith("TL;DR:")
        assert row["document"] == row["query"].removesuffix("TL;DR:").strip()
    exact = len(rows[1]["input_ids"])
    assert [row["label"] for row in load_summary_prompts(path, tokenizer, max_tokens=exact)] == ["30"]
    with pytest.raises(DataFileError, match="all of them are left out: of more than 2000 characters or 3 tokens"):
        load_summary_prompts(path, tokenizer, max_tokens=3)
    with pytest.raises(DataFileError, match="of more than 5 characters"):
        load_summary_prompts(path, tokenizer, max_chars=5)


def test_a_limit_takes_the_first_rows_before_any_is_left_out(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = save(tmp_path / "a.jsonl", [post(0), {"prompt": "No ending", "label": "x"}, *map(post, range(2, 9))])
    assert [row["label"] for row in load_summaries(path, limit=3)] == ["Summary 0.", "Summary 2."]
    assert len(load_summary_prompts(path, tokenizer, limit=4)) == 3
    assert len(load_summaries(path, limit=100)) == 8


@pytest.mark.parametrize("kind", ["folder", "saved", "saved splits", "copy of a repository", "builtin"])
def test_all_sources_read_alike(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train, test = [post(number, upvotes=number) for number in range(5)], [post(number) for number in (7, 8)]
    expected = load_summaries(save(tmp_path / "train.jsonl", train))
    folder = tmp_path / "d"
    match kind:
        case "folder":
            save(folder / "train.jsonl", train)
            save(folder / "test.jsonl", test)
        case "saved":
            Dataset.from_list(train).save_to_disk(folder)
        case "saved splits":
            DatasetDict({"train": Dataset.from_list(train), "test": Dataset.from_list(test)}).save_to_disk(folder)
        case "copy of a repository":
            folder.mkdir()
            Dataset.from_list(train).to_parquet(folder / "train-00000-of-00001.parquet")
            Dataset.from_list(test).to_parquet(folder / "test-00000-of-00001.parquet")
        case _:
            monkeypatch.setenv("RELC_HOME", str(tmp_path / "cache"))

            def fill(target: Path) -> dict[str, float]:
                save(target / "train.jsonl", train)
                save(target / "test.jsonl", test)
                return {}

            publish(find_item("tldr"), fill, lambda: 0.0)
    name = "builtin:tldr" if kind == "builtin" else str(folder)
    assert load_summaries(name) == expected and load_summaries(name, limit=2) == expected[:2]
    if kind != "saved":
        assert [row["label"] for row in load_summaries(name, split="test")] == ["Summary 7.", "Summary 8."]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"prompt": REDDIT}, r"expected a string called label.*None among prompt"),
        ({"prompt": REDDIT, "label": 3}, "expected a string called label, of whole characters, got 3"),
        ({"prompt": REDDIT, "label": "half \ud83d"}, "of whole characters"),
        ({"prompt": REDDIT, "label": " \n"}, "label is empty"),
        ({"prompt": "", "label": "x"}, "prompt is empty"),
        ("[1]", "expected a JSON object"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, bad: Any, says: str) -> None:
    path = save(tmp_path / "p.jsonl", [post(0), "", post(1), bad])
    with pytest.raises(DataFileError, match=rf"p\.jsonl, line 4: .*{says}"):
        load_summaries(path)


def test_errors_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path / "p.jsonl", [post(0)])
    with pytest.raises(DataFileError, match=r"one file, so it has no split 'test'.*test\.jsonl"):
        load_summaries(path, split="test")
    (tmp_path / "p.csv").write_text("prompt,label\n")
    with pytest.raises(DataFileError, match=r'expected a \.jsonl file with "prompt" and "label"'):
        load_summaries(str(tmp_path / "p.csv"))
    Dataset.from_dict({"prompt": ["x"], "summary": ["y"]}).save_to_disk(tmp_path / "d")
    with pytest.raises(DataFileError, match=r"columns prompt, summary; .*\(missing: label\)"):
        load_summaries(str(tmp_path / "d"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataFileError, match=r"split 'valid' of 'no/such-set'.*builtin:tldr") as error:
        load_summaries("no/such-set", split="valid")
    assert "\n" not in str(error.value)
    monkeypatch.setenv("RELC_HOME", str(tmp_path))
    with pytest.raises(NotPreparedError, match="prepare tldr"):
        load_summaries("builtin:tldr")
    with pytest.raises(UnknownBuiltinError, match="is a data set, not a summaries"):
        load_summaries("builtin:imdb")


def test_pairs_follow_their_prompt_with_one_space(tmp_path: Path) -> None:
    path = save(
        tmp_path / "p.jsonl",
        [
            {"prompt": "Post.\n\nTL;DR:", "chosen": " good one\n", "rejected": "bad one"},
            {"prompt": "POST: Cat.\n", "chosen": "TL;DR:  good", "rejected": "TL;DR: bad"},
            {"prompt": "Post.\nTL;DR:", "chosen": "TL;DR: good", "rejected": " TL;DR: bad"},
            {"prompt": "Question?", "chosen": "TL;DR: is an answer", "rejected": "none"},
        ],
    )
    assert load_preference_pairs(path) == [
        {"prompt": "Post.\n\nTL;DR:", "chosen": " good one", "rejected": " bad one"},
        {"prompt": "POST: Cat.\nTL;DR:", "chosen": " good", "rejected": " bad"},
        {"prompt": "Post.\nTL;DR:", "chosen": " good", "rejected": " bad"},
        {"prompt": "Question?", "chosen": " TL;DR: is an answer", "rejected": " none"},
    ]
    assert len(load_preference_pairs(path, limit=2)) == 2


def test_pairs_of_equal_texts_are_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pairs = [("good", "bad"), ("same", "same"), ("same ", " same"), ("TL;DR: a", "TL;DR:  a")]
    path = save(tmp_path / "p.jsonl", [{"prompt": "Post.", "chosen": a, "rejected": b} for a, b in pairs])
    with caplog.at_level(logging.INFO):
        assert len(load_preference_pairs(path)) == 1
    assert "left out 3 of 4 rows of two equal texts" in caplog.text


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"prompt": "p", "chosen": "x"}, "expected a string called rejected"),
        ({"prompt": "p", "chosen": " ", "rejected": "x"}, "chosen is empty"),
        ({"prompt": "p", "chosen": "TL;DR: x", "rejected": "TL;DR: "}, "rejected is empty"),
        ({"prompt": " ", "chosen": "x", "rejected": "y"}, "prompt is empty"),
    ],
)
def test_a_bad_pair_is_named_with_its_line(tmp_path: Path, bad: Any, says: str) -> None:
    path = save(tmp_path / "p.jsonl", ["", {"prompt": "p", "chosen": "x", "rejected": "y"}, bad])
    with pytest.raises(DataFileError, match=rf"p\.jsonl, line 3: {says}"):
        load_preference_pairs(path)
