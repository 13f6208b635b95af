"""Prompt sets for reinforcement tuning: JSONL rows as Vertex AI's tuning data sets have them.

    {"systemInstruction"?: {"parts": [{"text": "…"}]},
     "contents": [{"role": "user", "parts": [{"text": "…"}]}, …],
     "references"?: {"answer": "…"}}

Keys may be snake_case. ``systemInstruction`` may also be a plain string. Other keys are ignored.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl.jsonl import DataFileError, Row, is_text, read_jsonl

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]

_ROLES = {"user": "user", "model": "assistant"}


@dataclass(frozen=True)
class TuningRow:
    """One prompt with what its reward needs to know."""

    prompt: list[Message]
    """The turns as ``{"role": "user" | "assistant", "content"}``, without the system instruction."""
    system_instruction: str | None = None
    references: dict[str, Any] = field(default_factory=dict)
    contents: list[Any] = field(default_factory=list)
    """The turns as they are in the file."""

    @property
    def messages(self) -> list[Message]:
        """The turns, after the system instruction if there is one."""
        if self.system_instruction is None:
            return self.prompt
        return [{"role": "system", "content": self.system_instruction}, *self.prompt]

    @property
    def example(self) -> dict[str, Any]:
        """The row as snippets and services get it, with camelCase keys."""
        example: dict[str, Any] = {"contents": self.contents}
        if self.system_instruction is not None:
            example["systemInstruction"] = {"role": "system", "parts": [{"text": self.system_instruction}]}
        if self.references:
            example["references"] = self.references
        return example


def read_rows(path: str | Path) -> list[TuningRow]:
    """All rows of a file. Raises DataFileError with the line number of a row that is not as above."""
    rows = read_jsonl(path)
    lines = [n for n, line in enumerate(Path(path).read_bytes().split(b"\n"), start=1) if line.strip()]
    if not rows:
        raise DataFileError(f'{path}: expected at least one row {{"contents": [...]}}, the file is empty')
    # a last line that was cut off is no row
    return [parse_row(row, f"{path}, line {number}") for row, number in zip(rows, lines, strict=False)]


def parse_row(row: Row, where: str) -> TuningRow:
    """One row, checked. Raises DataFileError that starts with ``where``."""
    contents = _one_of(row, "contents", "contents", where)
    instruction = _one_of(row, "systemInstruction", "system_instruction", where)
    references = _one_of(row, "references", "references", where)
    if not isinstance(contents, list) or not contents:
        raise DataFileError(f"{where}: contents is {_shown(contents)}; expected a list of turns, at least one")
    prompt = [_message(turn, f"{where}, contents[{index}]") for index, turn in enumerate(contents)]
    if prompt[-1]["role"] != "user":
        raise DataFileError(f"{where}: the last turn is the model's; expected the user's, which the model answers")
    if not isinstance(references, dict | None):
        raise DataFileError(f"{where}: references is {_shown(references)}; expected an object of names and values")
    for key, value in (references or {}).items():
        if (problem := _unusable([key, value])) is not None:
            raise DataFileError(f"{where}: references.{key if is_text(key) else ascii(key)} holds {problem}")
    return TuningRow(
        prompt=prompt,
        system_instruction=None if instruction is None else _text(instruction, f"{where}, systemInstruction"),
        references={key: value for key, value in (references or {}).items() if value is not None},
        contents=contents,
    )


def prompt_text(row: TuningRow, tokenizer: "PreTrainedTokenizerBase") -> str:
    """What a causal LM continues: the chat template's text where the tokenizer has one, else the turns by lines.

    Without a template, turns are joined by blank lines. The template's beginning-of-text token is left out where the
    tokenizer adds its own.
    """
    if tokenizer.chat_template is None:
        return "\n\n".join(message["content"] for message in row.messages)
    text = str(tokenizer.apply_chat_template(row.messages, tokenize=False, add_generation_prompt=True))
    begin = tokenizer.bos_token
    adds_its_own = begin is not None and tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
    return text.removeprefix(str(begin)) if adds_its_own else text


def _unusable(value: Any) -> str | None:
    """What in ``value`` neither text nor JSON can hold."""
    if isinstance(value, dict | list):
        items = [*value, *value.values()] if isinstance(value, dict) else value
        return next((problem for item in items if (problem := _unusable(item)) is not None), None)
    if isinstance(value, str) and not is_text(value):
        return "half of a character (a lone surrogate)"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value}, which is no number; leave it out or give a value"
    return None


def _one_of(row: Row, camel: str, snake: str, where: str) -> Any:
    if camel != snake and camel in row and snake in row:
        raise DataFileError(f"{where}: has {camel} and {snake}; expected one of them")
    return row.get(camel, row.get(snake))


def _message(turn: Any, where: str) -> Message:
    role = turn.get("role", "user") if isinstance(turn, dict) else None
    if not isinstance(role, str) or role not in _ROLES:
        raise DataFileError(f"{where}: {_shown(turn)}; expected an object with role user or model, and parts")
    return {"role": _ROLES[role], "content": _text(turn, where)}


def _text(content: Any, where: str) -> str:
    """The parts' texts, one after the other."""
    if isinstance(content, str):
        content = {"parts": [{"text": content}]}
    parts = content.get("parts") if isinstance(content, dict) else None
    if not isinstance(parts, list) or not parts:
        raise DataFileError(f'{where}: {_shown(content)}; expected {{"parts": [{{"text": "…"}}]}}')
    for part in parts:
        if not isinstance(part, dict) or set(part) != {"text"} or not is_text(part["text"]):
            raise DataFileError(f'{where}: a part is {_shown(part)}; expected {{"text": "…"}} of whole characters')
    return "".join(part["text"] for part in parts)


def _shown(value: Any) -> str:
    text = "missing" if value is None else ascii(value)
    return text if len(text) <= 80 else text[:77] + "..."
