"""Rows of a user's task as token ids: what is held out, chat templates, and prompts that are too long."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_tokenizer
from trl.data.task_prompts import (
    encode_rows,
    read_task_rows,
    split_by_content,
    train_and_eval_rows,
    uses_chat_template,
)
from trl.jsonl import DataFileError

CHAT = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHAT


def row(text: str, *earlier: str, **more: Any) -> dict[str, Any]:
    turns = [{"role": ("user", "model")[i % 2], "parts": [{"text": each}]} for i, each in enumerate((*earlier, text))]
    return {"contents": turns, **more}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")
    return path


def test_further_keys_are_columns_and_lines_are_named(tmp_path: Path) -> None:
    file = write(tmp_path / "rows.jsonl", row("Hi", references={"answer": "x"}, solution="4", level=2))
    with file.open("a") as stream:
        stream.write("\n" + json.dumps(row("Bye")) + "\n")
    first, second = read_task_rows(str(file))
    assert first.columns == {"solution": "4", "level": 2}
    assert first.tuning.references == {"answer": "x"}
    assert second.columns == {} and second.where == f"{file}, line 3"


@pytest.mark.parametrize("bad", ['{"contents": []}', '{"prompt": "Hi"}', "not JSON", '{"contents": [{"parts": 1}]}'])
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, bad: str) -> None:
    file = write(tmp_path / "rows.jsonl", row("Hi"))
    file.write_text(file.read_text() + f"\n{bad}\n{json.dumps(row('Bye'))}\n")
    with pytest.raises(DataFileError, match=r"rows\.jsonl, line 3"):
        read_task_rows(str(file))


def test_an_empty_and_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("")
    with pytest.raises(DataFileError, match="the file is empty"):
        read_task_rows(str(tmp_path / "rows.jsonl"))
    with pytest.raises(FileNotFoundError, match="nowhere"):
        read_task_rows(str(tmp_path / "nowhere.jsonl"))


def test_what_is_held_out_depends_on_the_prompts_alone(tmp_path: Path) -> None:
    rows = [row(f"Question {number}", references={"answer": str(number)}) for number in range(200)]
    again = [row(f"Question {number}", references={"answer": "another"}) for number in range(200)]
    read = read_task_rows(str(write(tmp_path / "a.jsonl", *rows, *again)))
    train, held_out = split_by_content(read, 0.25)
    assert len(train) + len(held_out) == 400
    assert not {each.shown for each in train} & {each.shown for each in held_out}
    assert 0.15 < len(held_out) / 400 < 0.35
    mixed = read_task_rows(str(write(tmp_path / "b.jsonl", *reversed(rows), row("One more"))))
    other = {each.shown for each in split_by_content(mixed, 0.25)[1]}
    assert other - {"One more"} == {each.shown for each in held_out}
    # at least one prompt, however small the share
    assert len({each.shown for each in split_by_content(read, 1e-9)[1]}) == 1


def test_where_held_out_rows_come_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "task"
    folder.mkdir()
    write(folder / "train.jsonl", *(row(f"Question {number}") for number in range(30)))
    data = str(folder)
    train, held_out = train_and_eval_rows(data, None, 0.3, 100)
    assert len(train) + len(held_out) == 30 and held_out
    assert train_and_eval_rows(data, None, 0.3, 0)[1] == [] and len(train_and_eval_rows(data, None, 0.3, 0)[0]) == 30
    write(folder / "eval.jsonl", row("Question 7"), *(row(f"Exam {number}") for number in range(9)))
    caplog.clear()
    train, held_out = train_and_eval_rows(data, None, 0.3, 100)
    assert (len(train), len(held_out)) == (30, 10)
    assert "1 of 10 held-out prompts are trained on, too" in caplog.text
    few = train_and_eval_rows(data, None, 0.3, 4)[1]
    assert few == held_out[:4]
    other = str(write(tmp_path / "other.jsonl", row("Else")))
    assert [each.shown for each in train_and_eval_rows(data, other, 0.3, 100)[1]] == ["Else"]


def test_rows_that_all_have_one_prompt_hold_nothing_out(tmp_path: Path) -> None:
    file = str(write(tmp_path / "rows.jsonl", row("Hi"), row("Hi")))
    with pytest.raises(DataFileError, match="give --eval_data"):
        train_and_eval_rows(file, None, 0.1, 10)


def test_chat_and_plain_prompts(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    system = {"systemInstruction": {"parts": [{"text": "Be brief."}]}}
    rows = read_task_rows(str(write(tmp_path / "rows.jsonl", row("Bye", "Hi", "Hello", **system), row("Alone"))))
    first, second = encode_rows(rows, tokenizer, chat=True, longest=None)
    expected = "<system>Be brief.</s><user>Hi</s><assistant>Hello</s><user>Bye</s><assistant>"
    assert tokenizer.decode(first["input_ids"]) == expected
    assert first["query"] == "user: Hi\n\nassistant: Hello\n\nuser: Bye"
    assert tokenizer.decode(first["critic_ids"]) == first["query"] + "\n"
    assert second["query"] == "Alone" and first["row"] is rows[0]
    assert first["input_ids"].dtype == torch.long
    plain, _ = encode_rows(rows, tokenizer, chat=False, longest=None)
    assert tokenizer.decode(plain["input_ids"]) == "Be brief.\n\nHi\n\nHello\n\nBye"
    assert plain["critic_ids"] is not None and plain["critic_ids"].equal(plain["input_ids"])


def test_which_models_chat() -> None:
    tokenizer = tiny_tokenizer()
    assert not uses_chat_template("auto", tokenizer) and not uses_chat_template("off", tokenizer)
    with pytest.raises(DataFileError, match="has no chat template"):
        uses_chat_template("on", tokenizer)
    tokenizer.chat_template = CHAT
    assert uses_chat_template("auto", tokenizer) and uses_chat_template("on", tokenizer)
    assert not uses_chat_template("off", tokenizer)


def test_a_template_without_system_instructions_says_which_row(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = NO_SYSTEM
    rows = read_task_rows(str(write(tmp_path / "rows.jsonl", row("Fine"), row("Hi", systemInstruction="Be brief."))))
    with pytest.raises(DataFileError, match=r"rows\.jsonl, line 2.*no system role"):
        encode_rows(rows, tokenizer, chat=True, longest=None)


def test_long_prompts_lose_their_beginning_and_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = tiny_tokenizer()
    texts = ["short", "a " * 50 + "end", "b " * 60 + "end"]
    rows = read_task_rows(str(write(tmp_path / "rows.jsonl", *map(row, texts))))
    encoded = encode_rows(rows, tokenizer, chat=False, longest=12)
    for text, each in zip(texts, encoded, strict=True):
        assert each["input_ids"].tolist() == tokenizer(text)["input_ids"][-12:]
    assert "2 of 3 prompts have more than 12 tokens and lose their beginnings" in caplog.text
    assert "line 2" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        encode_rows(rows, tokenizer, chat=False, longest=None)
    assert caplog.text == ""


def test_odd_prompts_have_tokens(tmp_path: Path) -> None:
    texts = ["", "\x00\x07\u202e", "👩‍👩‍👧 שלום", "x" * 100_000]
    rows = read_task_rows(str(write(tmp_path / "rows.jsonl", *map(row, texts))))
    encoded = encode_rows(rows, tiny_tokenizer(), chat=False, longest=64)
    assert [1 <= len(each["input_ids"]) <= 64 for each in encoded] == [True] * 4
