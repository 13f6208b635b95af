"""SIGTERM and Ctrl-C as requests: the step in progress ends, the run is saved, then the program stops."""

import logging
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

logger = logging.getLogger(__name__)


class StopRequest:
    """Inside of the ``with`` block, the first SIGTERM or SIGINT only sets ``received``; a second one acts as ever.

    In a thread other than the main one, where Python allows no handlers, signals act as ever.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        """Name of the signal that came."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._restore()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        self._restore()
        logger.warning(
            "%s: the run ends after this step and is saved; the same signal again ends it now", self.received
        )

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
