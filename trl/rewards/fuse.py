"""The fuse of configured rewards: a run whose rewards are nearly all missing should stop, not train on the rest."""

import threading
from collections.abc import Sequence

from trl.failures import FailureWindow, GoneError
from trl.rewards.composite import SampleResult


class RewardGoneError(GoneError):
    """More than 80 % of the last samples (100, at least 20) got no reward; the message counts the reasons."""


class RewardFuse:
    """Watches whether samples get their reward, in one process; calls may come from several threads."""

    def __init__(self) -> None:
        self._window = FailureWindow()
        self._lock = threading.Lock()

    def record(self, results: Sequence[SampleResult]) -> None:
        """Count a batch. Raises RewardGoneError when it is time to stop."""
        with self._lock:
            for result in results:
                self._window.record(result.error)
            if self._window.mostly_failed:
                raise RewardGoneError(
                    f"of the last {len(self._window)} samples {self._window.failed} got no reward: "
                    f"{self._window.reasons}. `python -m trl.rewards validate` shows what each reward does"
                )
