"""Making what is missing: the work behind ``python -m trl.builtin prepare``."""

import importlib
import time
from pathlib import Path

from trl.builtin.catalog import Item, Progress
from trl.builtin.store import Waiting, is_ready, locked, publish
from trl.builtin.wheels import locate


def prepare(item: Item, progress: Progress, on_wait: Waiting, *, deep: bool = False) -> bool:
    """Make ``item`` unless it is there and intact; returns whether anything was made.

    What it needs must be prepared already. Two processes may call this at once: the second waits for the
    first and finds the work done. ``deep`` hashes every file instead of trusting size and time. Raises
    ``BuiltinError`` if the wheel is missing.
    """
    if is_ready(item, deep=deep):
        return False
    with locked(item, on_wait):
        if is_ready(item, deep=deep):
            return False
        began = time.perf_counter()
        source = locate(item.source) if item.source else None
        module, function = item.builder.split(":")
        builder = vars(importlib.import_module(module))[function]

        def build(target: Path) -> dict[str, float]:
            return builder(target, source, progress)

        publish(item, build, lambda: time.perf_counter() - began)
    return True
