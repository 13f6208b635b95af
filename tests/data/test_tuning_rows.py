"""Tuning rows: both spellings, what is refused and on which line, and the text that a model continues."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_tokenizer
from trl.data.tuning_rows import TuningRow, prompt_text, read_rows
from trl.jsonl import DataFileError

QUESTION = {"role": "user", "parts": [{"text": "What is "}, {"text": "2 + 2?"}]}
GOOD: dict[str, Any] = {"contents": [QUESTION], "references": {"answer": "4"}}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_a_row_of_vertex_ai(tmp_path):
    row = {"systemInstruction": {"role": "system", "parts": [{"text": "Be brief."}]}, **GOOD}
    (read,) = read_rows(write(tmp_path / "rows.jsonl", row))
    assert read.prompt == [{"role": "user", "content": "What is 2 + 2?"}]
    assert read.system_instruction == "Be brief."
    assert read.references == {"answer": "4"}
    assert read.contents == [QUESTION]
    assert read.messages[0] == {"role": "system", "content": "Be brief."}
    assert read.example == row


def test_snake_case_plain_instruction_and_turns(tmp_path):
    answer = {"role": "model", "parts": [{"text": "4"}]}
    row = {"system_instruction": "Be brief.", "contents": [QUESTION, answer, QUESTION], "id": 7}
    (read,) = read_rows(write(tmp_path / "rows.jsonl", row))
    assert read.system_instruction == "Be brief."
    assert [turn["role"] for turn in read.prompt] == ["user", "assistant", "user"]
    assert read.references == {}
    assert read.example["systemInstruction"]["parts"] == [{"text": "Be brief."}]
    assert "references" not in read.example


BAD = [
    ({}, "contents is missing"),
    ({"contents": []}, r"contents is \[\]"),
    ({"contents": "What?"}, "contents is 'What\\?'"),
    ({"contents": ["What?"]}, r"contents\[0\]: 'What\?'; expected an object with role"),
    ({"contents": [{"role": "assistant", "parts": [{"text": "x"}]}]}, "role user or model"),
    ({"contents": [{"role": "model", "parts": [{"text": "x"}]}]}, "last turn is the model's"),
    ({"contents": [{"role": "user", "parts": []}]}, 'expected {"parts"'),
    ({"contents": [{"role": "user", "parts": [{"fileData": {"fileUri": "gs://x"}}]}]}, "a part is {'fileData'"),
    ({"contents": [{"role": "user", "parts": [{"text": 4}]}]}, "whole characters"),
    ({"contents": [{"role": "user", "parts": [{"text": "\ud83d"}]}]}, "whole characters"),
    ({**GOOD, "references": ["4"]}, r"references is \['4'\]"),
    ({**GOOD, "references": {"answer": "\udc00"}}, "references.answer holds half"),
    ({**GOOD, "references": {"answer": [{"x": "\udc00"}]}}, "references.answer holds half"),
    ({**GOOD, "references": {"\udc00": 1}}, r"references.'\\udc00' holds half"),
    ({**GOOD, "references": {"answer": math.nan}}, "references.answer holds nan"),
    ({**GOOD, "references": {"answer": {"x": [-math.inf]}}}, "references.answer holds -inf"),
    ({"contents": [{"role": ["user"], "parts": [{"text": "x"}]}]}, "role user or model"),
    ({**GOOD, "systemInstruction": 4}, "systemInstruction: 4; expected"),
    ({**GOOD, "systemInstruction": "a", "system_instruction": "b"}, "expected one of them"),
]


@pytest.mark.parametrize(("row", "problem"), BAD)
def test_a_bad_row_is_reported_with_its_line(tmp_path, row, problem):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + json.dumps(row) + "\n")
    with pytest.raises(DataFileError, match=f"rows.jsonl, line 3.*{problem}"):
        read_rows(path)


def test_broken_json_and_an_empty_file(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(GOOD) + "\n{nope\n")
    with pytest.raises(DataFileError, match="line 2"):
        read_rows(path)
    path.write_text("\n")
    with pytest.raises(DataFileError, match="at least one row"):
        read_rows(path)


def test_any_text_survives(tmp_path):
    text = "emoji 👩‍🔬 עברית \x00\x1b[31m {{response}} " + "x" * 100_000
    row = {"contents": [{"parts": [{"text": text}]}], "references": {"answer": text}}
    (read,) = read_rows(write(tmp_path / "rows.jsonl", row))
    assert read.prompt[0]["content"] == text
    assert read.references["answer"] == text


def test_prompt_text_without_a_template():
    row = TuningRow(prompt=[{"role": "user", "content": "2 + 2?"}], system_instruction="Be brief.")
    assert prompt_text(row, tiny_tokenizer()) == "Be brief.\n\n2 + 2?"


@pytest.mark.parametrize("adds_bos", [True, False])
def test_prompt_text_with_a_template_has_one_beginning_in_the_end(adds_bos):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer.bos_token = "<|endoftext|>"
    if adds_bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", tokenizer.bos_token_id)]
        )
    row = TuningRow(prompt=[{"role": "user", "content": "2 + 2?"}], system_instruction="Be brief.")
    text = prompt_text(row, tokenizer)
    assert text.removeprefix("<|endoftext|>") == "[system] Be brief.\n[user] 2 + 2?\n[assistant]"
    ids = tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1
    assert ids[0] == tokenizer.bos_token_id
