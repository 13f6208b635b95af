"""``python -m trl.report RUN [RUN …] -o report.html``: a page, figures and tables from run folders."""

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
    """Run folders with metrics.jsonl and samples.jsonl. Runs whose settings differ only in the seed are one arm."""
    output: Annotated[Path, arg(aliases=("-o",))] = Path("report.html")
    """The page to write: one file, opens without a network."""
    table: Path | None = None
    """An evaluation.json to show above the table of final values, in the page and here."""
    figures: Path | None = None
    """Also write curves, steps to the baseline's reward and a heat map as PNG and PDF to this folder."""
    live: bool = False
    """Write no page but serve it on this machine while training goes on; runs that have not begun are waited for."""
    port: int = 8765
    """Port of --live; 0 takes a free one."""


def main(args: Args) -> None:
    if not args.runs:
        sys.exit("error: name at least one run folder")
    if args.live:
        serve(args)
    else:
        write(args)


def write(args: Args) -> None:
    from rich.console import Console

    from trl.report.arms import group_runs
    from trl.report.figures import save_figures
    from trl.report.html import write_report
    from trl.report.runlog import load_runs
    from trl.report.table import EvaluationTable, rich_table
    from trl.report.totals import final_table

    console = Console()
    runs = load_runs(args.runs)
    table = EvaluationTable.from_file(args.table) if args.table else None
    write_report(runs, args.output, table)
    for shown in (table, final_table(group_runs(runs))):
        if shown:
            console.print(rich_table(shown))
    console.print(f"report: {args.output} ({args.output.stat().st_size / 1e6:.1f} MB)", soft_wrap=True)
    if args.figures:
        paths = ", ".join(str(path) for path in save_figures(runs, args.figures))
        console.print(f"figures: {paths}", soft_wrap=True)


def serve(args: Args) -> None:
    from trl.report.serve import HOST, LivePage, make_server

    with make_server(LivePage(args.runs, args.table), args.port) as server:
        print(f"http://{HOST}:{server.server_port}/ shows the runs as they go; Ctrl+C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print("ended", flush=True)


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, description=__doc__))
    except (DataFileError, OSError) as error:
        sys.exit(f"error: {error}")
