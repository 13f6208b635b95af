import re
from pathlib import Path
from typing import Any

import pytest

from trl.builtin.catalog import find_item
from trl.builtin.questions import INSTRUCTION, PER_KIND, build, kinds, make_rows
from trl.builtin.store import sha256_of
from trl.data.tuning_rows import read_rows
from trl.rewards import load_reward

ROOT = Path(__file__).resolve().parents[2]


def question(row: dict[str, Any]) -> str:
    return str(row["contents"][-1]["parts"][0]["text"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("questions")
    counts = build(target, None, lambda doing, share: None)
    assert counts == {"train": 406, "eval": 73}
    return target


def test_the_files_are_tuning_rows_and_always_the_same(folder: Path, tmp_path: Path) -> None:
    assert find_item("builtin:questions").kind == "questions"
    build(tmp_path, None, lambda doing, share: None)
    for split, count in (("train", 406), ("eval", 73)):
        rows = read_rows(folder / f"{split}.jsonl")
        assert len(rows) == count
        assert {row.system_instruction for row in rows} == {INSTRUCTION}
        assert all([turn["role"] for turn in row.prompt] == ["user", "assistant", "user"] for row in rows)
        assert sha256_of(folder / f"{split}.jsonl") == sha256_of(tmp_path / f"{split}.jsonl")


def test_splits_share_no_question_no_case_and_no_wording() -> None:
    train, held_out = make_rows("train"), make_rows("eval")
    assert not {question(row) for row in train} & {question(row) for row in held_out}
    for kind in kinds():
        assert not {case.blanks[0] for case in kind.train} & {case.blanks[0] for case in kind.eval}, kind.name
    wordings = {kind.name: [re.escape(text).replace(r"\{\}", ".+") for text in kind.wordings] for kind in kinds()}
    for row in train:
        *learned, held = wordings[row["references"]["kind"]]
        assert any(re.fullmatch(pattern, question(row)) for pattern in learned)
        assert not re.fullmatch(held, question(row))
    for row in held_out:
        assert re.fullmatch(wordings[row["references"]["kind"]][-1], question(row))


def test_no_question_is_its_own_example_and_none_comes_twice() -> None:
    for split in ("train", "eval"):
        rows = make_rows(split)
        assert len({question(row) for row in rows}) == len(rows)
        examples = {each for kind in kinds() for case in kind.train for each in case.blanks}
        for row in rows:
            example, answer = (turn["parts"][0]["text"] for turn in row["contents"][:2])
            assert example != question(row)
            assert any(each in example for each in examples)
            assert answer
        for kind in kinds():
            found = [row for row in rows if row["references"]["kind"] == kind.name]
            assert len(rows) // 16 <= len(found) <= PER_KIND[split]


def test_answers_follow_the_rules() -> None:
    for row in make_rows("train") + make_rows("eval"):
        answer, kind = row["references"]["answer"], row["references"]["kind"]
        assert answer.isalpha()
        if kind == "either":
            assert re.search(rf" an? {answer}\b", question(row))
        else:
            assert answer not in question(row).split(), question(row)


def test_choices_are_right_as_often_first_as_second() -> None:
    rows = [row for row in make_rows("train") if row["references"]["kind"] == "either"]
    chosen = [re.findall(r"\ban? (\w+)", question(row)).index(row["references"]["answer"]) for row in rows]
    assert 0.35 <= sum(chosen) / len(chosen) <= 0.65


def test_the_shipped_reward_takes_the_right_answer_alone(folder: Path) -> None:
    row = next(row for row in read_rows(folder / "train.jsonl") if row.references["answer"] == "white")
    texts = ["white", " White.\n", "It is white", "white or black", "whiteness", ""]
    with load_reward(ROOT / "configs" / "rewards" / "questions.json") as reward:
        assert reward(completions=texts, references=[row.references] * len(texts)) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
