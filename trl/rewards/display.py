"""What ``python -m trl.rewards validate`` shows to people."""

from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from trl.rewards.composite import ComponentResult, SampleResult
from trl.rewards.scoring import HIGHEST, LOWEST
from trl.rewards.validate import Report, RewardReport

_BINS = 11
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = ".:-=+*#@"
_COLOURS = {"OK": "green", "partial": "yellow", "error": "red"}
_MEANING = {
    "too_hard": "too hard: (almost) every response is wrong, so there is nothing to learn from. Easier prompts, a more "
    "able model, or partial credit would help",
    "too_easy": "too easy: (almost) every response is right, so there is nothing left to learn",
    "constant": "(almost) always the same reward, so there is nothing to learn from",
    "clipped": "clipped: rewards outside of [-1, 1] are cut, and differences beyond are lost",
}
_LONGEST = 4000


def histogram(rewards: Sequence[float], blocks: str = _BLOCKS) -> str:
    """How often rewards fall into each of 11 equal parts of [-1, 1], as bars; a blank part has none."""
    counts = [0] * _BINS
    for reward in rewards:
        counts[min(_BINS - 1, int((reward - LOWEST) / (HIGHEST - LOWEST) * _BINS))] += 1
    most = max(counts, default=0) or 1
    return "".join(" " if not count else blocks[-(-count * len(blocks) // most) - 1] for count in counts)


def show_report(console: Console, report: Report, title: str) -> None:
    """The table of all rewards, their errors and warnings, and the verdict."""
    blocks = _BLOCKS if console.encoding.lower().startswith("utf") else _ASCII
    console.print(Text(title), soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("reward", overflow="fold")
    table.add_column("verdict")
    for name in ("mean", "min", "max", "scored"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("-1    0   +1", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    for name, each in report.rewards.items():
        verdict = Text(each.verdict, style=_COLOURS[each.verdict])
        scored, seconds = f"{len(each.rewards)}/{each.n}", f"{each.seconds:.1f}"
        bars = Text(f"|{histogram(each.rewards, blocks)}|")
        table.add_row(Text(printable(name)), verdict, *_figures(each.rewards), scored, bars, seconds)
    if len(report.rewards) > 1:
        n = next(iter(report.rewards.values())).n
        bars = Text(f"|{histogram(report.totals, blocks)}|")
        table.add_row("total", "", *_figures(report.totals), f"{len(report.totals)}/{n}", bars, "")
    console.print(table)
    _show_problems(console, report.rewards)
    count = sum(len(each.warnings) for each in report.rewards.values())
    warned = f" ({count} warning{'s' if count > 1 else ''})" if count else ""
    console.print(Text.assemble("\nverdict: ", (report.verdict, f"bold {_COLOURS[report.verdict]}"), warned))


def _figures(rewards: Sequence[float]) -> list[str]:
    if not rewards:
        return ["–"] * 3
    return [f"{value:+.2f}" for value in (sum(rewards) / len(rewards), min(rewards), max(rewards))]


def _show_problems(console: Console, rewards: Mapping[str, RewardReport]) -> None:
    for name, each in rewards.items():
        for reason, count in each.errors.items():
            console.print(Text(f"error: {printable(name)}: {count} x {printable(reason)}", style="red"), soft_wrap=True)
        for warning in each.warnings:
            text = f"warning: {printable(name)}: {_MEANING[warning]}"
            if warning == "clipped" and each.unclipped is not None:
                text += f" (they range from {each.unclipped[0]:g} to {each.unclipped[1]:g})"
            console.print(Text(text, style="yellow"), soft_wrap=True)


def show_example(console: Console, result: SampleResult, prompt: str, response: str) -> None:
    """One sample, with every stage of each of its rewards."""
    _section(console, "prompt", prompt)
    _section(console, "response", response)
    for each in result.components:
        _show_component(console, each, response)
    console.print(Text(f"reward: {result.reward:g}", style="bold"))
    if result.error is not None:
        console.print(Text(f"error: {printable(result.error)}", style="red"), soft_wrap=True)


def _show_component(console: Console, each: ComponentResult, response: str) -> None:
    console.print(Text(f"=== {printable(each.name)} (weight {each.weight:g})", style="bold"))
    if each.response != response:
        _section(console, "parsed response", each.response)
    for stage, text in each.stages.items():
        _section(console, stage, text)
    clipped = "" if each.reward == each.unclipped or each.error else f" (clipped from {each.unclipped:g})"
    console.print(Text(f"reward: {each.reward:g}{clipped}, {each.seconds:.2f} s", style="bold"))
    if each.error is not None:
        console.print(Text(f"error: {printable(each.error)}", style="red"), soft_wrap=True)
    console.print()


def _section(console: Console, title: str, body: str) -> None:
    cut = f"\n… {len(body) - _LONGEST:,} more characters" if len(body) > _LONGEST else ""
    console.print(Text(f"--- {title}", style="dim"))
    console.print(Text(printable(body[:_LONGEST]) + cut), soft_wrap=True)


def printable(text: str) -> str:
    """Control characters shown as such: a response must not steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)
