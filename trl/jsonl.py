"""Strict JSON Lines that survive a kill: append, repair, read, and resume a long job where it stopped.

Strict means that NaN and infinities become ``null`` (Python's ``json`` writes ``NaN``, which no other reader
accepts). A process killed while writing leaves at most one line without its newline at the end of the file;
readers ignore that line and writers cut it off before they append.
"""

import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from numbers import Integral
from pathlib import Path
from typing import Any, SupportsFloat

from tqdm import tqdm

Row = dict[str, Any]


class DataFileError(ValueError):
    """A file does not hold what was expected; the message says what it is and what to do."""


def strict(value: Any) -> Any:
    """``value`` as plain JSON types: numpy and torch scalars as numbers, non-finite numbers as None."""
    if value is None or isinstance(value, bool | str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [strict(item) for item in value]
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, SupportsFloat):
        number = float(value)
        return number if math.isfinite(number) else None
    raise TypeError(f"cannot write a {type(value).__name__} as JSON; give numbers, strings, lists or dicts")


def dump_line(row: Any) -> str:
    """One line of strict JSON, without the newline."""
    return json.dumps(strict(row), ensure_ascii=False, allow_nan=False)


def read_jsonl(path: str | Path) -> list[Row]:
    """Every complete row of a file; a last line that was cut off by a kill is ignored.

    Raises DataFileError with file and line number when a complete line is not a JSON object.
    """
    return [row for _, row in read_numbered(path)]


def read_numbered(path: str | Path) -> list[tuple[int, Row]]:
    """`read_jsonl` with the number of each row's line (blank lines count), for messages about the row."""
    content = Path(path).read_bytes()
    *lines, rest = content.split(b"\n")
    rows: list[tuple[int, Row]] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            rows.append((number, _parse(line, f"{path}, line {number}")))
    if rest.strip():
        # Hand-made files often lack the last newline: keep the line if it is whole.
        try:
            rows.append((len(lines) + 1, _parse(rest, f"{path}, last line")))
        except DataFileError:
            if not rest.lstrip().startswith(b"{"):
                raise
    return rows


def _parse(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataFileError(f"{where}: expected one JSON object per line, got {line[:60]!r} ({error})") from error
    if not isinstance(row, dict):
        raise DataFileError(f"{where}: expected a JSON object, got {type(row).__name__}")
    return row


def read_prompts(path: str | Path, *, with_generations: bool = False) -> list[Row]:
    """Rows of a prompt file (``prompt.text``) or generation file (also ``generations[].text``), checked."""
    rows = read_jsonl(path)
    if not rows:
        raise DataFileError(f"{path}: expected at least one row, the file is empty")
    for number, row in enumerate(rows, start=1):
        items = row.get("generations") if with_generations else []
        if _has_text(row.get("prompt")) and isinstance(items, list) and all(map(_has_text, items)):
            continue
        wanted = '{"prompt": {"text": "…"}' + (', "generations": [{"text": "…"}, …]}' if with_generations else "}")
        got = dump_line(row)[:120].encode(errors="backslashreplace").decode()
        raise DataFileError(f"{path}, row {number}: expected {wanted} of whole characters, got {got}")
    return rows


def _has_text(item: Any) -> bool:
    return isinstance(item, dict) and is_text(item.get("text"))


def is_text(value: Any) -> bool:
    """Whether ``value`` is a string of whole characters; JSON can hold halves of some (lone surrogates)."""
    if not isinstance(value, str):
        return False
    return not any("\ud800" <= character <= "\udfff" for character in value)


def append_rows(file: FileIO, rows: Iterable[Any]) -> None:
    """Append rows in whole lines, or none of them: where the disk is full, the file stays as it was.

    ``file`` is open for unbuffered appending; where several processes append to it, their rows do not mix. A lone
    surrogate (in a critic's reply, say) is written as the JSON escape it came from. Raises OSError with the file's
    name.
    """
    content = "".join(dump_line(row) + "\n" for row in rows).encode(errors="backslashreplace")
    written = 0
    try:
        while written < len(content):
            written += file.write(content[written:])
    except OSError as error:
        if written and file.tell() == os.fstat(file.fileno()).st_size:  # nobody has written after it
            file.truncate(file.tell() - written)
        raise OSError(error.errno, error.strerror, str(file.name)) from error


@contextmanager
def sole_writer(path: Path) -> Iterator[FileIO]:
    """``path`` open for `append_rows`, its torn last line cut off, and locked against other processes until the end.

    Raises DataFileError where another process holds it: two runs of one command would mix their lines.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with FileIO(path, "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataFileError(f"{path} is being written by another process; wait for its end or stop it") from None
        cut_torn_line(path)
        yield file


def replace_file(path: Path, content: str) -> None:
    """Write a file all or nothing: an older one stays until the new one is on disk. Line ends are kept as they are."""
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8", newline="", errors="backslashreplace") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def cut_torn_line(path: Path) -> None:
    """Remove what follows the last newline, so that the next append starts a line of its own."""
    if not path.exists():
        return
    with path.open("r+b") as file:
        content = file.read()
        file.truncate(content.rfind(b"\n") + 1)


def run_resumable(
    rows: Sequence[Row],
    output_file: Path,
    process: Callable[[int, list[Row]], list[Row]],
    *,
    settings: Mapping[str, Any],
    chunk_size: int,
    unit: str = "prompt",
) -> list[Row]:
    """Apply ``process(chunk_index, chunk)`` to ``rows`` chunk by chunk, appending each result to a file.

    A second call takes up after the last complete chunk. Chunks always start at multiples of
    ``chunk_size``, so a process that depends only on its arguments (a seed per chunk index) leaves the same
    file whether or not it was interrupted. ``settings`` is everything the results depend on; it is kept
    beside the output in ``<output_file>.settings.json``.

    Returns all output rows, one per input row. Raises DataFileError when the file on disk belongs to other
    settings or to other input rows, or when another process is writing it.
    """
    digest = hashlib.sha256("".join(map(dump_line, rows)).encode(errors="backslashreplace")).hexdigest()
    wanted = strict({**settings, "input_sha256": digest})
    with sole_writer(output_file) as file:
        done = _finished_rows(len(rows), output_file, wanted, chunk_size)
        with tqdm(total=len(rows), initial=done, unit=unit, desc=output_file.name) as progress:
            for start in range(done, len(rows), chunk_size):
                chunk = list(rows[start : start + chunk_size])
                results = process(start // chunk_size, chunk)
                append_rows(file, results)
                progress.update(len(chunk))
    return read_jsonl(output_file)


def _finished_rows(total: int, output_file: Path, settings: Mapping[str, Any], chunk_size: int) -> int:
    """How many rows of earlier runs count, with the file cut back to whole chunks."""
    settings_file = output_file.with_name(output_file.name + ".settings.json")
    lines = output_file.read_bytes().splitlines(keepends=True) if output_file.exists() else []
    if lines:
        if not settings_file.exists():
            raise DataFileError(
                f"{output_file} exists and {settings_file.name} does not, so it cannot be continued safely; "
                "choose another output file or remove it"
            )
        found = json.loads(settings_file.read_text(encoding="utf-8"))
        changed = [key for key in {**settings, **found} if settings.get(key) != found.get(key)]
        if changed:
            differences = ", ".join(f"{key}: {found.get(key)!r} → {settings.get(key)!r}" for key in changed)
            raise DataFileError(
                f"{output_file} was made with other settings ({differences}); "
                "choose another output file, remove it, or repeat the old settings"
            )
    if not lines:
        replace_file(settings_file, json.dumps(settings, indent=1, ensure_ascii=False) + "\n")
    whole = min(len(lines), total) if len(lines) >= total else len(lines) // chunk_size * chunk_size
    with output_file.open("ab") as file:
        file.truncate(sum(map(len, lines[:whole])))
    return whole
