"""The last calls to something that may be gone: which failed, and why; and the error that stops a run."""

from collections import Counter, deque

WINDOW = 100
"""Calls remembered."""
LEAST = 20
"""Fewer calls than this say nothing."""
SHARE = 0.8
"""More failures than this are too many."""


class SettingError(ValueError):
    """A setting does not fit the model or the other settings; the message says what was expected."""


class GoneError(RuntimeError):
    """What a run depends on (its critic, its reward) is gone for good: the run saves its model and stops."""


SHOWN = 10
"""Reasons that a message names; each call may have failed for one of its own."""


class FailureWindow:
    """Outcomes of the last 100 calls. Not thread-safe."""

    def __init__(self) -> None:
        self._outcomes: deque[str | None] = deque(maxlen=WINDOW)

    def __len__(self) -> int:
        return len(self._outcomes)

    @property
    def failed(self) -> int:
        """How many failed."""
        return sum(outcome is not None for outcome in self._outcomes)

    @property
    def mostly_failed(self) -> bool:
        """Whether more than 80 % of them, at least 20, failed."""
        return len(self) >= LEAST and self.failed > SHARE * len(self)

    @property
    def reasons(self) -> str:
        """The most frequent reasons with their counts."""
        counts = Counter(outcome for outcome in self._outcomes if outcome is not None)
        shown = [f"{count} x {reason}" for reason, count in counts.most_common(SHOWN)]
        rest = counts.total() - sum(count for _, count in counts.most_common(SHOWN))
        return ", ".join([*shown, f"{rest} x other reasons"] if rest else shown)

    def record(self, failure: str | None) -> None:
        """One call's outcome: None, or why it failed."""
        self._outcomes.append(failure)

    def clear(self) -> None:
        """Forget everything."""
        self._outcomes.clear()
