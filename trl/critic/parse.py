"""The critic's reply → quoted spans.

A reply goes on where the prompt ends, which is right under the first section header. Only marked lines are
spans; prose never is, so a refusal gives none. Every line is read once, with patterns whose repetitions are
bounded or cannot overlap: the time is linear in the length of the reply.
"""

import re
from typing import Literal, NamedTuple

from trl.critic.template import STOP
from trl.critic.types import Critique, Span, Style

_Section = Literal["positive", "negative", "ignored"]

_SEPARATOR = "#####"
_EXAMPLE = re.compile(r"example\s{1,4}\d", re.IGNORECASE)
_DECORATION = "#*_>`~ \t"
_BULLET = re.compile(r"[•‣▪◦·]\s*|[-*+–—]\s+|[(\[]?\d{1,3}[.):\]](?=[\s\"“'‘])\s*")
_MARKER = re.compile(
    r"[\[({<]?\s{0,4}(?:identified\s{1,4})?(?:(?P<kind>positive|negative|toxic)\s{1,4})?(?:text\s{1,4})?"
    r"span[\s#_-]{0,4}\d{1,9}(?!\w)[\])}>]{0,4}(?:\*\*|__)?\s{0,9}(?:[:.=–—-](?:\*\*|__)?)?\s*",
    re.IGNORECASE,
)
_NONE = re.compile(
    r"none(?:\s{1,4}(?:was\s|were\s)?(?:identified|found|detected)\b|[\s.!)\]]*$)|n/a[\s.]*$", re.IGNORECASE
)
_LABEL = re.compile(r"label\s*[:=]", re.IGNORECASE)
_WORD = re.compile(r"[\w-]+")

_LONGEST_HEADER = 80
_NOUNS = {"text", "span", "spans", "phrase", "phrases", "word", "words", "part", "parts", "section", "sections"}
_NO_FLAW = {"positive", "non-toxic", "nontoxic", "neutral"}
_KINDS = {"negative", "toxic", *_NO_FLAW}

_CLOSING = {'"': '"”“', "“": '”"“', "„": '“”"', "«": "»", "'": "'’", "‘": "’'", "`": "`'"}
_DOUBLE_QUOTES = '"“”„«»'
_BRACKETS = {"(": ")", "[": "]", "{": "}"}


class _Header(NamedTuple):
    kind: str | None
    rest: str
    """What stands after the colon on the same line."""
    opens_items: bool
    """Whether plain numbered or bulleted lines under it are spans."""


def parse_critique(reply: str, style: Style) -> Critique:
    """Read the spans out of a reply; never raises, whatever the string.

    Lines are spans when they have a ``Span n`` or ``Toxic Span n`` marker, or when they are numbered or
    bulleted items directly under a section header. In the sentiment style the headers split positive from
    negative; in the others every span is a flaw, and sections that don't name flaws are left out.

    Returns:
        status ``ok`` with spans, ``none`` where the critic said so ("None identified"), else ``unparsable``.
    """
    section: _Section = "positive" if style == "sentiment" else "negative"
    under_header = True
    said_none = False
    spans: list[Span] = []
    lines = _answer(reply, style)
    for number, line in enumerate(lines):
        bullet = _BULLET.match(line)
        content = line[bullet.end() :] if bullet else line
        lead = content.lstrip(_DECORATION)
        if not lead:
            continue
        marker = _MARKER.match(lead)
        header = None if marker else _header(lead, is_item=bullet is not None)
        if header:
            section = _section(header.kind, section, style)
            under_header = header.opens_items
            lead, bullet = header.rest, None
            marker = _MARKER.match(lead)
            if not lead:
                continue
        if marker:
            section = _section(marker["kind"], section, style)
            quoted = lead[marker.end() :]
        elif bullet and under_header:
            quoted = content
        else:
            said_none = said_none or _says_none(lead)
            under_header = False
            continue
        under_header = under_header and not marker
        text, label = _quotation(quoted, may_be_cut=number == len(lines) - 1)
        if _says_none(text):
            said_none = True
        elif text and section != "ignored":
            spans.append(Span(text, section, label))
    if spans:
        return Critique(tuple(spans), "ok", reply)
    return Critique((), "none" if said_none else "unparsable", reply)


def _answer(reply: str, style: Style) -> list[str]:
    """The lines of the answer itself: no reasoning before it, no further example after it."""
    if "</think>" in reply:
        reply = reply.rpartition("</think>")[2]
    elif reply.lstrip().startswith("<think>"):
        return []
    next_example = tuple(stop.strip().casefold() for stop in STOP[style] if stop != _SEPARATOR)
    lines: list[str] = []
    for raw in re.split(r"\r\n|\r|\n", reply):
        line = raw.strip()
        before, separator, _ = line.partition(_SEPARATOR)
        lead = line.lstrip(_DECORATION)
        if separator and (before or not _header(lead, is_item=False)):
            lines.append(before.rstrip())
            break
        if lead[:100].casefold().startswith(next_example) or _EXAMPLE.match(lead):
            break
        lines.append(line)
    return lines


def _header(lead: str, *, is_item: bool) -> _Header | None:
    """Recognise a section header such as "Identified Negative Text Span(s):", also one cut short.

    A line that starts with the polarity and ends in a colon switches the section too ("Negative remarks I
    found:"), but does not turn the list below it into spans.
    """
    title, colon, rest = lead.partition(":")
    if len(title) > _LONGEST_HEADER:
        return None
    words = [word for word in _WORD.findall(title.casefold()) if word not in ("the", "s")]
    identified = words[:1] == ["identified"]
    words = words[identified:]
    rest = rest.strip(_DECORATION)
    kind = words[0] if words and words[0] not in _NOUNS else None
    nouns = words[1:] if kind else words
    if set(nouns) <= _NOUNS and (kind in _KINDS or (identified and nouns)):
        return _Header(kind, rest, True) if identified or colon or not is_item else None
    if not kind and set(nouns) <= _NOUNS and nouns[-1:] in (["span"], ["spans"]) and colon:
        return _Header(None, rest, True)
    if kind in ("positive", "negative") and colon and (identified or not rest) and not is_item:
        return _Header(kind, rest, False)
    return None


def _section(kind: str | None, current: _Section, style: Style) -> _Section:
    if kind is None:
        return current
    kind = kind.lower()
    if style != "sentiment":
        return "ignored" if kind in _NO_FLAW else "negative"
    if kind == "positive":
        return "positive"
    return "negative" if kind in ("negative", "toxic") else "ignored"


def _says_none(text: str) -> bool:
    return bool(_NONE.match(text.lstrip("[(\"“'‘*_ ")))


def _quotation(raw: str, *, may_be_cut: bool) -> tuple[str, str | None]:
    """The quoted text and its label; an empty text if nothing is quoted, or only a part of it arrived.

    Marks at either end may go even where they belong to the quote: what remains is still in the text.
    """
    text, label = _split_label(raw.strip())
    for mark in ("**", "__", "*", "_"):
        if len(text) > 2 * len(mark) and text.startswith(mark) and text.endswith(mark):
            text = text[len(mark) : -len(mark)].strip()
            break
    opening = text[:1]
    if opening in _CLOSING:
        end = max(text.rfind(mark) for mark in _CLOSING[opening])
        after = text[end + 1 :].strip(" \t.,;:!?*_")
        if end > 0 and not after:
            return text[1:end].strip(), label
        if end > 0 and after[0] in _BRACKETS and after.endswith(_BRACKETS[after[0]]):
            return text[1:end].strip(), label or after[1:-1].strip()
        if end <= 0 and opening in _DOUBLE_QUOTES and may_be_cut:
            return "", None
    return text.strip(_DOUBLE_QUOTES).strip(), label


def _split_label(raw: str) -> tuple[str, str | None]:
    """Take a trailing "(Label: …)" off; the brackets may be others, or a dash or comma instead."""
    candidates = list(_LABEL.finditer(raw))
    if not candidates:
        return raw, None
    found = candidates[-1]
    before = raw[: found.start()].rstrip()
    lead = before[-1:]
    if lead and lead not in "([{,;|/-–—" + _DOUBLE_QUOTES + "'’`":
        return raw, None  # "the record label: …" is part of the quote
    label = raw[found.end() :].strip(" \t.*_")
    if lead in _BRACKETS and label.endswith(_BRACKETS[lead]):
        label = label[:-1]
    return before.rstrip(" \t([{,;|/-–—"), label.strip(" \t.*_\"“”'") or None
