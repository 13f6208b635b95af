"""The fuse: stops a run whose critic has been gone for long, after having borne shorter outages."""

import time

from trl.critic.types import CriticGoneError
from trl.failures import FailureWindow


class CriticFuseError(CriticGoneError):
    """Nearly all calls failed and none has succeeded for a long time."""


class Fuse:
    """Watches the outcomes of calls, in one process.

    ``tripping``: more than 80 % of the last 100 calls (at least 20) failed. While that is so, one call at a time
    is enough to see whether the endpoint is back; its success clears the record.

    Args:
        seconds: how long no call may have succeeded, counted from the first call on.
    """

    def __init__(self, seconds: float = 300.0) -> None:
        if seconds < 0:
            raise ValueError(f"fuse_seconds is {seconds}; expected 0 or more")
        self._seconds = seconds
        self._window = FailureWindow()
        self._last_success: float | None = None

    @property
    def tripping(self) -> bool:
        return self._window.mostly_failed

    def record(self, failure: str | None) -> None:
        """One call's outcome: None, or why it failed."""
        if failure is None and self.tripping:
            self._window.clear()
        self._window.record(failure)
        if failure is None or self._last_success is None:
            self._last_success = time.monotonic()

    def check(self) -> None:
        """Raise CriticFuseError, with the number of calls per reason, when it is time to stop."""
        if not self.tripping or self._last_success is None:
            return
        silence = time.monotonic() - self._last_success
        if silence >= self._seconds:
            raise CriticFuseError(
                f"the critic has not answered for {silence:.0f} s; of its last {len(self._window)} calls "
                f"{self._window.failed} failed: {self._window.reasons}"
            )
