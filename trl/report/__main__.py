"""``python -m trl.report RUN [RUN …] -o report.html``: a page, figures and a table from run folders."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

import trl

if vars(trl).get("DISTRIBUTION") != "relc":
    sys.exit(f"'trl' from {trl.__path__[0]} is not relc's: pip uninstall trl, then pip install -e . here")

from trl.jsonl import DataFileError


@dataclass
class Args:
    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN [RUN …]")]
    """Run folders with metrics.jsonl and samples.jsonl."""
    output: Annotated[Path, arg(aliases=("-o",))] = Path("report.html")
    """The page to write: one file, opens without a network."""
    table: Path | None = None
    """An evaluation.json to show as the final table, in the page and here."""
    figures: bool = False
    """Also write curves.png beside the page."""


def main(args: Args) -> None:
    from rich.console import Console

    from trl.report.curves import save_figure
    from trl.report.html import load_runs, write_report
    from trl.report.table import EvaluationTable, rich_table

    if not args.runs:
        sys.exit("error: name at least one run folder")
    console = Console()
    runs = load_runs(args.runs)
    table = EvaluationTable.from_file(args.table) if args.table else None
    write_report(runs, args.output, table)
    if table:
        console.print(rich_table(table))
    console.print(f"report: {args.output} ({args.output.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)
    if args.figures:
        console.print(f"curves: {save_figure(runs, args.output.with_name('curves.png'))}", soft_wrap=True)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except (DataFileError, OSError) as error:
        sys.exit(f"error: {error}")
