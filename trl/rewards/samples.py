"""The columns that a reward function is called with, as samples."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trl.rewards.perspective import Text, response_text
from trl.rewards.scoring import Sample

Columns = dict[str, Sequence[Any] | None]


def make_samples(
    completions: Sequence[Text],
    references: Sequence[Mapping[str, Any] | None] | None = None,
    prompts: Sequence[Text] | None = None,
    system_instruction: Sequence[str | None] | None = None,
    examples: Sequence[Mapping[str, Any]] | None = None,
    step: int = 0,
) -> list[Sample]:
    """One sample per completion. What no column says is taken from ``examples``, whole data rows, and vice versa.

    Raises ValueError for columns of different lengths.
    """
    columns: Columns = {
        "references": references,
        "prompts": prompts,
        "system_instruction": system_instruction,
        "examples": examples,
    }
    lengths = {name: len(column) for name, column in columns.items() if column is not None}
    if set(lengths.values()) - {len(completions)}:
        raise ValueError(f"got {len(completions)} completions but {lengths}; expected one of each per completion")
    rows = [
        {name: column[i] for name, column in columns.items() if column is not None} for i in range(len(completions))
    ]
    return [_sample(completion, step, **row) for completion, row in zip(completions, rows, strict=True)]


def _sample(
    completion: Text,
    step: int,
    references: Mapping[str, Any] | None = None,
    prompts: Text | None = None,
    system_instruction: str | None = None,
    examples: Mapping[str, Any] | None = None,
) -> Sample:
    example = dict(camel_row(examples)) if examples is not None else {}
    if prompts is not None and "contents" not in example:
        example["contents"] = _contents(prompts)
    instruction = system_instruction or _system_message(prompts)
    if instruction and "systemInstruction" not in example:
        example["systemInstruction"] = {"role": "system", "parts": [{"text": instruction}]}
    if references is not None and "references" not in example:
        example["references"] = dict(references)
    return Sample(
        response=response_text(completion),
        prompt=prompt_text(example.get("contents", [])),
        system_instruction=parts_text(example.get("systemInstruction", {})),
        references=references if references is not None else example.get("references", {}),
        example=example,
        step=step,
    )


def camel_row(value: Any) -> Any:
    """A data row with camelCase keys, but for the user's own keys in ``references``."""
    if isinstance(value, Mapping):
        keys = {key: re.sub(r"_([a-z0-9])", lambda found: found[1].upper(), str(key)) for key in value}
        return {keys[key]: item if key == "references" else camel_row(item) for key, item in value.items()}
    return [camel_row(item) for item in value] if isinstance(value, list) else value


def parts_text(content: Mapping[str, Any] | str) -> str:
    """The texts of a content's parts, one after the other."""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text", "")) for part in content.get("parts", []))


def prompt_text(contents: Sequence[Mapping[str, Any]]) -> str:
    """A prompt as a judge reads it: one turn alone as it is, several with their roles."""
    if len(contents) == 1:
        return parts_text(contents[0])
    return "\n\n".join(f"{turn.get('role', 'user')}: {parts_text(turn)}" for turn in contents)


def _contents(prompt: Text) -> list[dict[str, Any]]:
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [
        {"role": "model" if turn["role"] == "assistant" else turn["role"], "parts": [{"text": str(turn["content"])}]}
        for turn in turns
        if turn["role"] != "system"
    ]


def _system_message(prompt: Text | None) -> str | None:
    if prompt is None or isinstance(prompt, str):
        return None
    return next((str(turn["content"]) for turn in prompt if turn["role"] == "system"), None)
