"""SIGTERM and Ctrl-C as requests: the step in progress ends, the run is saved, then the program stops."""

import logging
import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any, Self

logger = logging.getLogger(__name__)

_ECHO = 1.0
"""Seconds in which a signal is the same request: launchers pass on the Ctrl-C that the terminal sent to all."""


class StopRequest:
    """Inside of the ``with`` block, the first SIGTERM or SIGINT only sets ``received``; a later one acts as ever.

    In a thread other than the main one, where Python allows no handlers, signals act as ever.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        """Name of the signal that came."""
        self._received_at = 0.0
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
        if self.received is None:
            self.received, self._received_at = signal.Signals(number).name, time.monotonic()
            logger.warning("%s: the run ends after this step and is saved; once more ends it now", self.received)
        elif time.monotonic() - self._received_at > _ECHO:
            self._restore()
            os.kill(os.getpid(), number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
