"""What the decoders of fast tokenizers do, token by token: byte-level BPE, SentencePiece with byte fallback,
Metaspace, WordPiece.

``tokenizers`` gives the text only. Its steps are repeated here so that every character keeps the tokens it
comes from, also where the bytes of one character are spread over several tokens.
"""

import json
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

Range = tuple[int, int]
REPLACEMENT = "\ufffd"
_JOINING = {"ByteLevel", "Fuse"}
_PER_TOKEN = {"Replace", "Metaspace", "WordPiece"}
_WORDPIECE_CLEANUP = (
    *((" " + mark, mark) for mark in (".", "?", "!", ",")),
    (" ' ", "'"),
    (" n't", "n't"),
    (" 'm", "'m"),
    (" do not", " don't"),
    *((" " + ending, ending) for ending in ("'s", "'ve", "'re")),
)


class _Piece(NamedTuple):
    """A stretch of text and the tokens it comes from; several only where a character was spread over them."""

    text: str
    first: int
    last: int


@lru_cache(maxsize=64)
def decoder_steps(state: bytes) -> tuple[dict[str, Any], ...] | None:
    """The steps of a ``tokenizers`` decoder, nested sequences opened.

    Args:
        state: the decoder's JSON, from its ``__getstate__``.

    Returns:
        None if one of the steps, or their order, is not followed here.
    """
    steps: list[dict[str, Any]] = []
    pending = [json.loads(state)]
    while pending:
        step = pending.pop()
        if step["type"] == "Sequence":
            pending.extend(reversed(step["decoders"]))
        else:
            steps.append(step)
    joined = fallback = False
    for step in steps:
        kind = step["type"]
        if kind in _PER_TOKEN:
            supported = not joined and not fallback and (kind != "Replace" or "String" in step["pattern"])
        elif kind == "ByteFallback":
            supported = not joined
            fallback = True
        elif kind in _JOINING:
            supported = not (kind == "ByteLevel" and (joined or fallback))
            joined = True
        else:
            supported = kind == "Strip" and joined
        if not supported:
            return None
    return tuple(steps)


def run_steps(steps: tuple[dict[str, Any], ...], tokens: list[str]) -> tuple[str, list[Range]]:
    """Text of the tokens (vocabulary entries, special tokens left out) and each token's character range."""
    pieces = [_Piece(token, n, n) for n, token in enumerate(tokens)]
    count = len(tokens)
    left = right = 0
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            pieces = list(_join_byte_level(pieces))
        elif kind == "ByteFallback":
            pieces = list(_join_byte_fallback(pieces))
        elif kind == "Replace":
            old, new = step["pattern"]["String"], step["content"]
            pieces = [piece._replace(text=piece.text.replace(old, new)) for piece in pieces]
        elif kind == "Metaspace":
            mark, drops_first = step["replacement"], step["prepend_scheme"] != "never"
            pieces = [
                piece._replace(text=piece.text.replace(mark, "" if n == 0 and drops_first else " "))
                for n, piece in enumerate(pieces)
            ]
        elif kind == "WordPiece":
            pieces = [piece._replace(text=_wordpiece(piece.text, n == 0, step)) for n, piece in enumerate(pieces)]
        elif kind == "Strip":
            text = "".join(piece.text for piece in pieces)[left:]
            kept = text[: len(text) - right]
            left += _run_length(kept, step["content"], step["start"])
            right += _run_length(kept[::-1], step["content"], step["stop"])

    text = "".join(piece.text for piece in pieces)
    stop = max(left, len(text) - right)
    starts: list[int | None] = [None] * count
    ends = [0] * count
    at = 0
    for piece in pieces:
        upto = at + len(piece.text)
        clipped = (min(max(at, left), stop) - left, min(max(upto, left), stop) - left)
        for n in range(piece.first, piece.last + 1):
            if starts[n] is None:
                starts[n] = clipped[0]
            ends[n] = clipped[1]
        at = upto
    return text[left:stop], [(start or 0, end) for start, end in zip(starts, ends, strict=True)]


def _run_length(text: str, content: str, most: int) -> int:
    length = 0
    while length < min(most, len(text)) and text[length] == content:
        length += 1
    return length


def _wordpiece(token: str, is_first: bool, step: dict[str, Any]) -> str:
    if not is_first:
        token = token[len(step["prefix"]) :] if token.startswith(step["prefix"]) else " " + token
    if step["cleanup"]:
        for old, new in _WORDPIECE_CLEANUP:
            token = token.replace(old, new)
    return token


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: Latin-1's visible characters are themselves, the rest follow."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    invisible = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + n): byte for n, byte in enumerate(invisible)}


_BYTE_OF = _byte_level_alphabet()


@lru_cache(maxsize=1 << 17)
def _byte_level_bytes(token: str) -> bytes:
    if all(char in _BYTE_OF for char in token):
        return bytes(_BYTE_OF[char] for char in token)
    return token.encode()  # an added token, written as it is


def _join_byte_level(pieces: list[_Piece]) -> Iterator[_Piece]:
    """A character can only go on in the next token if that one starts with a continuation byte (10xxxxxx)."""
    group: list[bytes] = []
    for n, piece in enumerate(pieces):
        data = _byte_level_bytes(piece.text)
        if group and not (data and 0x80 <= data[0] < 0xC0):
            yield from _characters(group, n - len(group))
            group = []
        group.append(data)
    if group:
        yield from _characters(group, len(pieces) - len(group))


def _characters(group: list[bytes], first: int) -> Iterator[_Piece]:
    if len(group) == 1:
        yield _Piece(group[0].decode("utf-8", "replace"), first, first)
        return
    owners = [first + n for n, data in enumerate(group) for _ in data]
    at = 0
    for char, width in _decode_lossy(b"".join(group)):
        yield _Piece(char, owners[at], owners[at + width - 1])
        at += width


def _decode_lossy(data: bytes) -> Iterator[tuple[str, int]]:
    """Characters with their width in bytes; an invalid sequence is one U+FFFD."""
    while data:
        try:
            good, bad = data.decode(), 0
        except UnicodeDecodeError as error:
            good, bad = data[: error.start].decode(), error.end - error.start
        for char in good:
            yield char, len(char.encode())
        if bad:
            yield REPLACEMENT, bad
        data = data[len(good.encode()) + bad :]


def _join_byte_fallback(pieces: list[_Piece]) -> Iterator[_Piece]:
    """A run of ``<0xE2>`` tokens is one string; if its bytes are invalid, every byte is one U+FFFD."""
    run: list[bytes] = []
    for n, piece in enumerate([*pieces, _Piece("", len(pieces), len(pieces))]):
        byte = _fallback_byte(piece.text)
        if byte is not None:
            run.append(byte)
            continue
        if run:
            first = n - len(run)
            try:
                b"".join(run).decode()
            except UnicodeDecodeError:
                yield from (_Piece(REPLACEMENT, first + k, first + k) for k in range(len(run)))
            else:
                yield from _characters(run, first)
            run = []
        if n < len(pieces):
            yield piece


@lru_cache(maxsize=1 << 17)
def _fallback_byte(token: str) -> bytes | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return None
    return None
