import json
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

from tests.tiny import tiny_tokenizer
from trl.builtin import NotPreparedError, UnknownBuiltinError
from trl.builtin.catalog import find_item
from trl.builtin.store import publish
from trl.data.toxicity import load_toxicity_prompts
from trl.jsonl import DataFileError


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return tiny_tokenizer()


def row(number: int, toxicity: float | None, text: str | None = None) -> dict[str, Any]:
    """As RealToxicityPrompts has them, with the fields that are not read here."""
    prompt = {"text": text or f"prompt number {number} was", "toxicity": toxicity, "insult": 0.1, "threat": None}
    return {"filename": "a.txt", "begin": 0, "challenging": False, "prompt": prompt, "continuation": prompt}


ROWS = [row(number, number / 100) for number in range(100)] + [row(100, None)]


def save(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


def numbers(rows: list[dict[str, Any]]) -> list[int]:
    return [int(one["query"].split()[2]) for one in rows]


def test_the_first_four_fifths_above_the_level_are_for_training(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = str(save(tmp_path / "p.jsonl", ROWS))
    train = load_toxicity_prompts(path, tokenizer)
    held_out = load_toxicity_prompts(path, tokenizer, split="eval")
    assert numbers(train) == list(range(31, 86)) and numbers(held_out) == list(range(86, 100))  # 69: 55 and 14
    assert [one["toxicity"] for one in train] == [number / 100 for number in range(31, 86)]
    for one in train:
        assert one["input_ids"] == tokenizer(one["query"])["input_ids"]
    assert numbers(load_toxicity_prompts(path, tokenizer, min_toxicity=0.9)) == list(range(91, 98))


def test_a_limit_is_a_random_sample_of_the_split(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    path = str(save(tmp_path / "p.jsonl", ROWS))
    some = numbers(load_toxicity_prompts(path, tokenizer, limit=10, seed=1))
    assert some == sorted(set(some)) and len(some) == 10 and set(some) < set(range(31, 86))
    assert numbers(load_toxicity_prompts(path, tokenizer, limit=10, seed=1)) == some
    assert numbers(load_toxicity_prompts(path, tokenizer, limit=10, seed=2)) != some
    assert len(load_toxicity_prompts(path, tokenizer, limit=1000)) == 55


def test_long_and_blank_prompts_are_left_out_and_move_no_cut(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase
) -> None:
    rows = [row(number, 0.9) for number in range(10)]
    rows[3]["prompt"]["text"] += " and so on" * 30
    path = str(save(tmp_path / "p.jsonl", [row(10, 0.9, "  "), *rows]))
    assert numbers(load_toxicity_prompts(path, tokenizer, max_tokens=20)) == [0, 1, 2, 4, 5, 6, 7]
    assert numbers(load_toxicity_prompts(path, tokenizer, max_tokens=20, split="eval")) == [8, 9]
    assert numbers(load_toxicity_prompts(path, tokenizer, max_tokens=1000)) == list(range(8))
    with pytest.raises(DataFileError, match="at most 1 tokens"):
        load_toxicity_prompts(path, tokenizer, max_tokens=1)


@pytest.mark.parametrize("kind", ["folder", "saved", "saved splits", "copy of a repository", "builtin"])
def test_all_sources_read_alike(
    kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load_toxicity_prompts(str(save(tmp_path / "p.jsonl", ROWS)), tokenizer)
    data, name = Dataset.from_list(ROWS), str(tmp_path / "d")
    match kind:
        case "folder":
            (tmp_path / "d").mkdir()
            save(tmp_path / "d" / "prompts.jsonl", ROWS)
        case "saved":
            data.save_to_disk(name)
        case "saved splits":
            DatasetDict({"train": data}).save_to_disk(name)
        case "copy of a repository":
            (tmp_path / "d").mkdir()
            data.to_parquet(tmp_path / "d" / "train-00000-of-00001.parquet")
        case _:
            monkeypatch.setenv("RELC_HOME", str(tmp_path / "cache"))
            name = "builtin:toxicity-prompts"

            def fill(target: Path) -> dict[str, float]:
                save(target / "prompts.jsonl", ROWS)
                return {}

            publish(find_item(name), fill, lambda: 0.0)
    assert load_toxicity_prompts(name, tokenizer) == expected


@pytest.mark.parametrize(
    "bad", [{"text": "a b"}, {"prompt": "a b"}, {"prompt": {"text": "a b"}}, {"prompt": {"text": 1, "toxicity": 0.5}}]
)
def test_a_bad_row_is_named(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, bad: dict[str, Any]) -> None:
    path = save(tmp_path / "p.jsonl", [ROWS[50], bad])
    with pytest.raises(DataFileError, match=r'p\.jsonl, line 2: expected \{"prompt": \{"text"'):
        load_toxicity_prompts(str(path), tokenizer)


def test_errors_say_what_to_do(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(save(tmp_path / "p.jsonl", ROWS[:50]))
    with pytest.raises(DataFileError, match=r"0 of 50 prompts .* above 0\.6.*lower the level"):
        load_toxicity_prompts(path, tokenizer, min_toxicity=0.6)
    with pytest.raises(ValueError, match=r"min_toxicity is 1\.0"):
        load_toxicity_prompts(path, tokenizer, min_toxicity=1.0)
    with pytest.raises(ValueError, match="split is 'test'"):
        load_toxicity_prompts(path, tokenizer, split="test")  # type: ignore[arg-type]
    (tmp_path / "p.csv").write_text("prompt\n")
    with pytest.raises(DataFileError, match=r"expected a \.jsonl file"):
        load_toxicity_prompts(str(tmp_path / "p.csv"), tokenizer)
    Dataset.from_dict({"text": ["x"]}).save_to_disk(tmp_path / "d")
    with pytest.raises(DataFileError, match="columns text"):
        load_toxicity_prompts(str(tmp_path / "d"), tokenizer)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    with pytest.raises(DataFileError, match=r"'no/such-set'.*builtin:toxicity-prompts") as error:
        load_toxicity_prompts("no/such-set", tokenizer)
    assert "\n" not in str(error.value)
    monkeypatch.setenv("RELC_HOME", str(tmp_path))
    with pytest.raises(NotPreparedError, match="prepare toxicity-prompts"):
        load_toxicity_prompts("builtin:toxicity-prompts", tokenizer)
    with pytest.raises(UnknownBuiltinError, match="'builtin:imdb' is a data set, not a prompt set"):
        load_toxicity_prompts("builtin:imdb", tokenizer)
