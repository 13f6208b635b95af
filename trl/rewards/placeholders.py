"""``{{name}}`` placeholders of reward configurations. What is put in is never searched for placeholders again."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

_PLACEHOLDER = re.compile(r"\{\{\s*([^{}]+?)\s*\}\}")
_REFERENCES = "references."
PROMPT_FIELDS = ("prompt", "response", "system_instruction")
"""The placeholders of a judge's prompt besides the references."""


def names_in(template: str) -> list[str]:
    """The names of all placeholders, as they come."""
    return _PLACEHOLDER.findall(template)


def reference_keys(template: str) -> list[str]:
    """The keys of all ``{{references.key}}``, as they come."""
    return [name.removeprefix(_REFERENCES) for name in names_in(template) if name.startswith(_REFERENCES)]


def fill(template: str, values: Mapping[str, str], transform: Callable[[str], str] = str) -> str:
    """Put in ``transform(values[name])`` for each ``{{name}}`` of ``values``; all other braces stay as they are."""

    def value(found: re.Match[str]) -> str:
        return transform(values[found[1]]) if found[1] in values else found[0]

    return _PLACEHOLDER.sub(value, template)


def reference_values(references: Mapping[str, Any]) -> dict[str, str]:
    """The texts of ``references.key`` placeholders: a string as it is, anything else as JSON."""
    return {
        _REFERENCES + key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for key, value in references.items()
        if value is not None
    }


def regex_of(template: str, references: Mapping[str, Any] | None) -> str:
    """A regular expression with the references escaped in it; None: every reference is the letter x."""
    if references is None:
        references = dict.fromkeys(reference_keys(template), "x")
    return fill(template, reference_values(references), re.escape)
