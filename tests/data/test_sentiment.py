import csv
import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from tokenizers import processors
from transformers import PreTrainedTokenizerBase

from tests.tiny import EOS_ID, EOS_TOKEN, tiny_tokenizer
from trl.builtin import NotPreparedError, UnknownBuiltinError
from trl.data import sentiment
from trl.data.sentiment import load_sentiment_prompts, load_texts
from trl.jsonl import DataFileError

LONG = [f"Review {number}: " + "the film was a quiet wonder, and the acting was good. " * 6 for number in range(60)]
SHORT = "too short to keep"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split, texts in (("train", [SHORT, *LONG]), ("test", LONG[:5])):
        lines = (json.dumps({"text": text, "label": 1}) + "\n" for text in texts)
        (tmp_path / f"{split}.jsonl").write_text("".join(lines))
    return tmp_path


def test_queries_are_the_first_tokens_of_long_reviews(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = load_sentiment_prompts(str(folder), tokenizer)
    assert len(rows) == len(LONG)
    for row, text in zip(rows, LONG, strict=True):
        assert set(row) == {"query", "input_ids"}
        assert row["input_ids"] == tokenizer(text)["input_ids"][: len(row["input_ids"])]
        assert row["query"] == tokenizer.decode(row["input_ids"]) and text.startswith(row["query"])
    assert {len(row["input_ids"]) for row in rows} == {4, 5, 6, 7, 8, 9}


def test_reviews_must_be_longer_than_the_limit(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = tmp_path / "two.jsonl"
    path.write_text(json.dumps({"text": "a " * 100}) + "\n" + json.dumps({"text": "a " * 100 + "b"}) + "\n")
    assert len(load_sentiment_prompts(str(path), tokenizer)) == 1
    assert len(load_sentiment_prompts(str(path), tokenizer, min_chars=199)) == 2


def test_the_seed_alone_decides(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    first = load_sentiment_prompts(str(folder), tokenizer, seed=3)
    assert load_sentiment_prompts(str(folder), tokenizer, seed=3) == first
    assert load_sentiment_prompts(str(folder), tokenizer, seed=4) != first


def test_a_limit_is_a_random_sample_in_order(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = load_sentiment_prompts(str(folder), tokenizer, limit=10, min_tokens=15, max_tokens=15)
    numbers = [int(row["query"].split(":")[0].split()[1]) for row in rows]
    assert len(numbers) == 10 and numbers == sorted(set(numbers)) and numbers != list(range(10))
    assert len(load_sentiment_prompts(str(folder), tokenizer, limit=1000)) == len(LONG)


def test_a_fixed_length(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    rows = load_sentiment_prompts(str(folder), tokenizer, min_tokens=6, max_tokens=6)
    assert {len(row["input_ids"]) for row in rows} == {6}
    with pytest.raises(ValueError, match="min_tokens <= max_tokens, got 9 and 4"):
        load_sentiment_prompts(str(folder), tokenizer, min_tokens=9, max_tokens=4)


def test_tokens_longer_than_the_head_are_not_cut(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a head of 5 characters, every query would end in the wrong tokens if the head were trusted."""
    monkeypatch.setattr(sentiment, "HEAD_CHARACTERS", 5)
    texts = ["wonder " * 50, "=" * 300, "the acting was better than anything " * 9]
    path = tmp_path / "some.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    rows = load_sentiment_prompts(str(path), tokenizer, min_tokens=9, max_tokens=9)
    assert [row["input_ids"] for row in rows] == [tokenizer(text)["input_ids"][:9] for text in texts]


def test_an_opening_token_counts_but_is_not_text(folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{EOS_TOKEN} $A", special_tokens=[(EOS_TOKEN, EOS_ID)]
    )
    row = load_sentiment_prompts(str(folder), tokenizer, limit=1)[0]
    assert row["input_ids"][0] == EOS_ID and EOS_TOKEN not in row["query"]


def test_splits_of_a_folder(folder: Path) -> None:
    assert load_texts(str(folder), "train") == [SHORT, *LONG]
    assert load_texts(str(folder), "test") == LONG[:5]


def test_csv_with_quotes_and_line_breaks(tmp_path: Path) -> None:
    texts = ['He said "go", twice,\nand left.', "plain"]
    path = tmp_path / "reviews.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["label", "text"], *([1, text] for text in texts)])
    assert load_texts(str(path), "train") == texts


@pytest.mark.parametrize("kind", ["saved", "saved splits", "copy of a repository"])
def test_data_set_folders(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Dataset.from_dict({"text": LONG[:3]})
    match kind:
        case "saved":
            data.save_to_disk(tmp_path / "d")
        case "saved splits":
            DatasetDict({"train": data, "test": data}).save_to_disk(tmp_path / "d")
        case _:
            (tmp_path / "d").mkdir()
            data.to_parquet(tmp_path / "d" / "train-00000-of-00001.parquet")
    assert load_texts(str(tmp_path / "d"), "train") == LONG[:3]


def test_one_file_has_no_other_split(folder: Path) -> None:
    with pytest.raises(DataFileError, match=r"no split 'test'.*test\.jsonl"):
        load_texts(str(folder / "train.jsonl"), "test")


def test_wrong_files_say_what_is_wrong(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{"review": "no"}\n')
    with pytest.raises(DataFileError, match=r"line 2: expected a string called text.*review"):
        load_texts(str(tmp_path / "a.jsonl"), "train")
    (tmp_path / "b.txt").write_text("x")
    with pytest.raises(DataFileError, match=r"\.jsonl or \.csv"):
        load_texts(str(tmp_path / "b.txt"), "train")
    (tmp_path / "c.jsonl").write_text('{"text": "short"}\n')
    with pytest.raises(DataFileError, match="no text of more than 200 characters"):
        load_sentiment_prompts(str(tmp_path / "c.jsonl"), tokenizer)
    Dataset.from_dict({"review": ["x"]}).save_to_disk(tmp_path / "d")
    with pytest.raises(DataFileError, match="columns review"):
        load_texts(str(tmp_path / "d"), "train")


def test_unreachable_and_unknown_names_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataFileError, match=r"split 'train' of 'no/such-set'.*builtin:imdb") as error:
        load_texts("no/such-set", "train")
    assert "\n" not in str(error.value)
    with pytest.raises(UnknownBuiltinError, match="builtin:imdb"):
        load_texts("builtin:imbd", "train")
    monkeypatch.setenv("RELC_HOME", str(tmp_path))
    with pytest.raises(NotPreparedError, match="prepare imdb"):
        load_texts("builtin:imdb", "train")
