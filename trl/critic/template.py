"""Prompt files: plain text with placeholders, turned into the prompt for one critique request."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from trl.critic.types import CritiqueRequest, Style

FIELDS: dict[Style, tuple[str, ...]] = {
    "sentiment": ("text",),
    "toxicity": ("text",),
    "summary": ("document", "summary", "score"),
}
"""The arguments of each style, in the order in which ``{}`` placeholders take them."""

STOP: dict[Style, tuple[str, ...]] = {
    "sentiment": ("#####", "Sentence to be Labeled:"),
    "toxicity": ("#####", "Sentence to be Labeled:"),
    "summary": ("#####", "\nDocument:"),
}
"""Where a reply starts to invent the next example. Sent to the server, and honoured by the parser too."""

_PLACEHOLDER = re.compile(r"\{(text|document|summary|score|)\}")
_LINE_BREAKS = str.maketrans({"\n": " ", "\r": " "})


class PromptFileError(ValueError):
    """A prompt file that cannot be used; the message names the file and what is wrong with it."""


def single_line(text: str) -> str:
    """Replace every line break character by one space, so that character offsets stay valid."""
    return text.translate(_LINE_BREAKS)


@dataclass(frozen=True)
class PromptTemplate:
    """A critic prompt, split at its placeholders.

    Inserted text is never searched for placeholders again, so a response that holds ``{}`` is harmless.
    """

    style: Style
    literals: tuple[str, ...]
    """Text before, between and after the placeholders: one more than ``fields``."""
    fields: tuple[str, ...]
    """Which argument each placeholder takes, in the order of the file."""

    @classmethod
    def from_file(cls, path: str | Path, *, style: Style) -> "PromptTemplate":
        """Read a prompt file.

        The file has one ``{}`` per argument, in order (text; or document, summary, score), or the same
        arguments by name. Every other brace is literal.

        Raises:
            PromptFileError: unreadable or empty file, or missing, surplus or mixed placeholders.
        """
        if style not in FIELDS:
            raise ValueError(f"style is {style!r}; expected one of {', '.join(FIELDS)}")
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise PromptFileError(f"prompt file {path} cannot be read: {error}. Give a UTF-8 text file") from error
        if not text.strip():
            raise PromptFileError(f"prompt file {path} is empty; expected {_expected(style)}")
        literals_and_names = _PLACEHOLDER.split(text)
        names = literals_and_names[1::2]
        problem = _placeholder_problem(names, FIELDS[style])
        if problem:
            raise PromptFileError(f"prompt file {path} {problem}; for the {style} style expected {_expected(style)}")
        fields = FIELDS[style] if "" in names else tuple(names)
        return cls(style, tuple(literals_and_names[0::2]), fields)

    @property
    def stop(self) -> tuple[str, ...]:
        """Stop sequences to send with every request (at most four, which is what OpenAI accepts)."""
        return STOP[self.style]

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of what the template says, for cache keys."""
        parts = [self.literals[0]]
        for name, literal in zip(self.fields, self.literals[1:], strict=True):
            parts += ["{", name, "}", literal]
        return hashlib.sha256("".join(parts).encode()).hexdigest()

    def fill(self, request: CritiqueRequest) -> str:
        """The prompt for one request.

        Line breaks in the inserted text become spaces; the score is written with one decimal.

        Raises:
            ValueError: the style needs a document or a score that the request does not have.
        """
        parts = [self.literals[0]]
        for name, literal in zip(self.fields, self.literals[1:], strict=True):
            parts += [single_line(_argument(request, name)), literal]
        return "".join(parts)


def _argument(request: CritiqueRequest, name: str) -> str:
    if name == "score":
        if request.score is None:
            raise ValueError("the prompt has a score placeholder but CritiqueRequest.score is None; pass one")
        return f"{request.score:.1f}"
    if name == "document":
        if request.document is None:
            raise ValueError("the prompt has a document placeholder but CritiqueRequest.document is None; pass one")
        return request.document
    return request.text


def _expected(style: Style) -> str:
    fields = FIELDS[style]
    named = " ".join("{" + name + "}" for name in fields)
    return f"{' '.join(['{}'] * len(fields))} for {', '.join(fields)} in this order, or by name {named}"


def _placeholder_problem(names: list[str], fields: tuple[str, ...]) -> str | None:
    """What is wrong with the placeholders found in a file, or None."""
    if not names:
        return "has no placeholder"
    positional = names.count("")
    if 0 < positional < len(names):
        named = ", ".join("{" + name + "}" for name in names if name)
        return f"mixes {{}} with {named}"
    if positional:
        if positional < len(fields):
            return f"has {positional} of {len(fields)} placeholders; missing: {', '.join(fields[positional:])}"
        if positional > len(fields):
            return f"has too many placeholders: {positional} times {{}}, {len(fields)} argument(s)"
        return None
    foreign = [name for name in names if name not in fields]
    if foreign:
        return f"has a placeholder {{{foreign[0]}}} that this style does not fill"
    missing = [name for name in fields if name not in names]
    if missing:
        return f"is missing {', '.join('{' + name + '}' for name in missing)}"
    if len(names) > len(fields):
        return "has too many placeholders: each name may stand once"
    return None
