import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.e2e.killing import kill_when_written, tear_last_line
from tests.rewards.toy_classifiers import save_classifier
from tests.tiny import tiny_gpt2, tiny_tokenizer
from trl.data.prompts import Args, choose, half_sentences, main, read_texts
from trl.jsonl import DataFileError, read_jsonl, read_prompts
from trl.rewards import load_classifier

WORDS = ("great", "dull", "odd", "long")
TEXTS = [
    f"The {noun} in this film was {judgement} from the first scene to the last. Short one. "
    f"I saw it with {number} friends who all said that the music was {judgement} too!"
    for number, (noun, judgement) in enumerate(
        (noun, judgement) for noun in ("cast", "plot", "light", "sound") for judgement in ("great", "dull", "odd")
    )
]


def test_half_sentences_are_the_first_half_of_one_sentence() -> None:
    halves = half_sentences(TEXTS, 12, min_words=4, max_words=8, seed=0)
    assert len(set(halves)) == 12
    for half in halves:
        assert 4 <= len(half.split()) <= 8
        text = next(text for text in TEXTS if half in text)
        sentence = next(part for part in text.replace("!", ".").split(". ") if part.startswith(half))
        assert len(half.split()) == len(sentence.split()) // 2


def test_half_sentences_depend_on_the_seed_and_stop_at_what_there_is() -> None:
    assert half_sentences(TEXTS, 5, 4, 8, seed=1) == half_sentences(TEXTS, 5, 4, 8, seed=1)
    assert half_sentences(TEXTS, 5, 4, 8, seed=1) != half_sentences(TEXTS, 5, 4, 8, seed=2)
    assert half_sentences(["Too short. Really."], 5, 4, 8, seed=0) == []


def test_choice_keeps_bounds_and_prefers_the_target() -> None:
    rows = [{"prompt": {"text": str(index)}, "num_positive": n} for index, n in enumerate([0, 9, 12, 15, 13, 25, 10])]
    texts = [row["prompt"]["text"] for row in choose(rows, (10, 15), 12.5, 9)]
    assert texts == ["2", "3", "4", "6"]
    assert [row["num_positive"] for row in choose(rows, (10, 15), 12.5, 2)] == [12, 13]
    assert choose(rows, (24, 25), 25, 5) == [{"prompt": {"text": "5"}, "num_positive": 25}]


def test_texts_of_plain_files_are_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("Third.\n")
    (tmp_path / "a.txt").write_text("First one.\nStill it.\n \n\nSecond é🙂.\n\n")
    assert [text.strip() for text in read_texts(str(tmp_path), "x", 9)] == [
        "First one.\nStill it.",
        "Second é🙂.",
        "Third.",
    ]
    assert len(read_texts(str(tmp_path), "x", 2)) == 2
    assert [text.strip() for text in read_texts(str(tmp_path / "b.txt"), "x", 9)] == ["Third."]
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(DataFileError, match=r"b\.txt: expected text in UTF-8"):
        read_texts(str(tmp_path), "x", 9)


def test_a_data_set_as_the_hub_has_it_is_read_as_far_as_needed(tmp_path: Path) -> None:
    """Two parts; the second can't be read, so whoever reads no further than the first does not notice."""
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"text": TEXTS, "id": range(12)}), tmp_path / "data" / "train-00000-of-00002.parquet")
    (tmp_path / "data" / "train-00001-of-00002.parquet").write_bytes(b"broken")
    assert read_texts(str(tmp_path), "train", 7) == TEXTS[:7]
    with pytest.raises(DataFileError, match="cannot load the split 'valid'"):
        read_texts(str(tmp_path), "valid", 7)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("models")
    tiny_gpt2().save_pretrained(folder / "lm")
    tiny_tokenizer().save_pretrained(folder / "lm")
    save_classifier(folder / "classifier", ["NEGATIVE", "POSITIVE"])
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return {
        "model": str(folder / "lm"),
        "classifier": str(folder / "classifier"),
        "source": str(folder / "texts.jsonl"),
    }


def arguments(models: dict[str, str], folder: Path) -> Args:
    return Args(
        folder,
        **models,
        split="train",
        candidates=10,
        num_return=6,
        max_new_tokens=8,
        neutral=(2, 4),
        negative=(0, 1),
        positive=(5, 6),
    )


def test_every_prompt_is_counted_and_sorted_into_its_set(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(arguments(models, tmp_path))
    candidates = read_jsonl(tmp_path / "candidates.jsonl")
    assert len(candidates) == 10
    classify = load_classifier(models["classifier"], device="cpu")
    for row in candidates:
        texts = [generation["text"] for generation in row["generations"]]
        judged = [p > 0.5 and bool(text.strip()) for p, text in zip(classify(texts), texts, strict=True)]
        assert len(texts) == 6 and row["num_positive"] == sum(judged)
    counts = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name, low, high in (("neutral", 2, 4), ("negative", 0, 1), ("positive", 5, 6)):
        expected = [row["prompt"]["text"] for row in candidates if low <= row["num_positive"] <= high]
        rows = read_prompts(tmp_path / f"{name}.jsonl") if expected else []
        assert [row["prompt"]["text"] for row in rows] == expected and counts[name] == len(expected)
    assert counts["neutral"] + counts["negative"] + counts["positive"] == 10


def test_a_killed_run_ends_like_an_uninterrupted_one(
    models: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [{"text": f"The {word} {n} of this very film was {word} too."} for word in WORDS for n in range(40)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = {**models, "source": str(tmp_path / "texts.jsonl")}
    main(replace(arguments(given, tmp_path / "whole"), candidates=160))
    flags = [word for name, value in given.items() for word in (f"--{name}", value)]
    flags += ["--split", "train", "--candidates", "160", "--num_return", "6", "--max_new_tokens", "8"]
    flags += ["--neutral", "2", "4", "--negative", "0", "1", "--positive", "5", "6"]
    command = [sys.executable, "-m", "trl.data.prompts", str(tmp_path / "cut"), *flags]
    file = tmp_path / "cut" / "candidates.jsonl"
    assert kill_when_written(command, file, random.Random(0).randrange(4, 60), dict(os.environ)) < 160
    assert not (tmp_path / "cut" / "neutral.jsonl").exists()
    tear_last_line(file)
    main(replace(arguments(given, tmp_path / "cut"), candidates=160))
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert second == {**first, "output_dir": str(tmp_path / "cut")}
    for name in ("candidates", "neutral", "negative", "positive"):
        assert (tmp_path / "cut" / f"{name}.jsonl").read_bytes() == (tmp_path / "whole" / f"{name}.jsonl").read_bytes()


@pytest.mark.parametrize(
    "wrong", [{"neutral": (4, 2)}, {"positive": (25, 25)}, {"negative": (-1, 0)}, {"min_words": 0}, {"min_words": 11}]
)
def test_bounds_that_no_prompt_can_meet_are_refused(models: dict[str, str], tmp_path: Path, wrong: dict) -> None:
    with pytest.raises(ValueError, match="expected"):
        replace(arguments(models, tmp_path), **wrong)


def test_errors_of_the_command_are_one_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trl.data.prompts", str(tmp_path / "out"), "--source", "builtin:nothing"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("error: there is no built-in 'builtin:nothing'")
    assert done.stderr.count("\n") == 1


SETS = Path(__file__).parents[2] / "eval_scripts" / "prompts"


@pytest.mark.parametrize(("name", "low", "high"), [("neutral_small", 10, 15), ("negative_small", 0, 6)])
def test_the_committed_sets_are_small_and_short(name: str, low: int, high: int) -> None:
    rows = read_prompts(SETS / f"{name}.jsonl")
    texts = [row["prompt"]["text"] for row in rows]
    assert len(set(texts)) == 24
    assert all(low <= row["num_positive"] <= high for row in rows)
    assert all(4 <= len(text.split()) <= 10 for text in texts)
