"""Regular expressions in Python's syntax that can't hang, in any thread.

The engine is the ``regex`` library's, which has a time limit and lets other threads run meanwhile. A linear-time
engine (RE2) would need no limit, but has no look-around or back-references, which files in use may have.
"""

from collections import deque

import regex

SECONDS = 1.0
"""What one search may take."""


class SlowPatternError(RuntimeError):
    """A search was given up at its time limit."""

    def __init__(self) -> None:
        super().__init__(f"the regular expression took more than {SECONDS:g} s")


def contains(pattern: str, text: str) -> bool:
    """Whether the pattern matches anywhere. Raises SlowPatternError."""
    try:
        return regex.search(pattern, text, timeout=SECONDS, concurrent=True) is not None
    except TimeoutError:
        raise SlowPatternError from None


def last_match(pattern: str, text: str) -> str | None:
    """The first group, or all if there is none, of the pattern's last match; None without one.

    A group that took no part in the match is no match. Raises SlowPatternError.
    """
    try:
        found = deque(regex.finditer(pattern, text, timeout=SECONDS, concurrent=True), maxlen=1)
    except TimeoutError:
        raise SlowPatternError from None
    if not found:
        return None
    match = found.pop()
    return match[1 if match.re.groups else 0]
