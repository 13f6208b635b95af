"""The process in which answers are checked: started by ``accuracy.py`` as a script, never imported.

It reads one JSON line per sample from stdin, ``[gold, answer, describe]``, and writes a JSON line as soon as each
of these is known: whether the gold parsed (if not, that is all); whether the answer is right; and if asked for,
``[gold, answer]`` as they were parsed. It ends when stdin does, so it does not outlive its parent for long.

What can go wrong here: math-verify's own time limits (signals: this is a main thread) end most overlong work, the
parent kills the process where they don't, and a limit on memory, where the system has one, turns a huge number
into a ``MemoryError``, which counts as a failed comparison.
"""

import contextlib
import json
import logging
import os
import resource
import sys
import time
from collections.abc import Iterable
from typing import Any

SECONDS = 3
"""For parsing one text and for one comparison (an answer has one or two forms to compare)."""
MEMORY = 2 * 2**30
"""Bytes of address space; the imports take 60 MB."""
CPU_SECONDS = 30
"""Per sample: ends a computation in C code whose parent is gone."""


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what a library prints must not mix with the replies
    logging.disable()
    try:
        from latex2sympy2_extended import NormalizationConfig
        from math_verify import LatexExtractionConfig, parse, verify
    except ImportError as error:
        _send(replies, f"checking answers needs math-verify: pip install 'math-verify>=0.9' ({error})")
        return
    _send(replies, "ready")
    with contextlib.suppress(ValueError, OSError):  # the limit in force is lower, or there is none here
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, resource.getrlimit(resource.RLIMIT_AS)[1]))
    # a plain number would too easily be right by chance; what is in a box counts before other formulas
    latex = LatexExtractionConfig(
        normalization_config=NormalizationConfig(units=True), boxed_match_priority=0, try_extract_without_anchor=False
    )
    for line in sys.stdin:
        gold_text, answer_text, describe = json.loads(line)
        _allow_cpu_time()
        gold = parse(gold_text, parsing_timeout=SECONDS)
        _send(replies, bool(gold))
        if not gold:
            continue
        answer = parse(answer_text, extraction_config=[latex], extraction_mode="first_match", parsing_timeout=SECONDS)
        _send(replies, bool(verify(gold, answer, timeout_seconds=SECONDS)))
        if describe:
            _send(replies, [_describe(gold), _describe(answer)])


def _send(replies: Any, message: object) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


def _allow_cpu_time() -> None:
    with contextlib.suppress(ValueError, OSError):
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + CPU_SECONDS, hard))


def _describe(parsed: Iterable[object]) -> str:
    """The list of what was found, in sympy's notation."""
    found = list(parsed)
    if not found:
        return "[unparseable]"
    try:
        return str(found)
    except (ValueError, RecursionError, MemoryError):  # Python does not print integers of over 4300 digits
        return "[too large to print]"


if __name__ == "__main__":
    main()
