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
    assert counts == {"train": 432, "eval": 96}
    return target


def test_the_files_are_tuning_rows_and_always_the_same(folder: Path, tmp_path: Path) -> None:
    assert find_item("builtin:questions").kind == "questions"
    build(tmp_path, None, lambda doing, share: None)
    for split, count in (("train", 432), ("eval", 96)):
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
        numbers = [int(number) for number in re.findall(r"\d+", question(row))]
        match kind:
            case "larger":
                assert int(answer) == max(numbers) != min(numbers)
            case "smaller":
                assert int(answer) == min(numbers) != max(numbers)
            case "either":
                assert question(row).count(f" {answer}") == 1
            case "yes or no":
                assert answer in ("yes", "no")
            case _:
                assert not numbers and answer.isalpha()


@pytest.mark.parametrize(("name", "answers"), [("yes or no", ("yes", "no")), ("larger", ("first", "second"))])
def test_no_constant_answer_wins(name: str, answers: tuple[str, str]) -> None:
    rows = [row for row in make_rows("train") if row["references"]["kind"] == name]
    if name == "larger":
        starts = [re.findall(r"\d+", question(row)).index(row["references"]["answer"]) for row in rows]
        found = [answers[start] for start in starts]
    else:
        found = [row["references"]["answer"] for row in rows]
    assert all(0.35 <= found.count(answer) / len(found) <= 0.65 for answer in answers)


def test_the_shipped_reward_takes_the_right_answer_alone(folder: Path) -> None:
    row = next(row for row in read_rows(folder / "train.jsonl") if row.references["answer"] == "white")
    texts = ["white", " White.\n", "It is white", "white or black", "whiteness", ""]
    with load_reward(ROOT / "configs" / "rewards" / "questions.json") as reward:
        assert reward(completions=texts, references=[row.references] * len(texts)) == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
