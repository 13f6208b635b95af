"""A paired comparison of runs as Markdown."""

from collections.abc import Sequence

from trl.jsonl import Row


def markdown(baseline: str, unit: str, comparisons: Sequence[Row]) -> str:
    """One table per run; a difference whose interval leaves 0 out is bold.

    Args:
        baseline: its name.
        unit: what is paired, in the plural ("prompts").
        comparisons: ``{"run": name, "metrics": {name: fields of Difference}, "judge": {...}}``, as compare.py makes
            them; the last is optional.
    """
    lines = [f"# Compared with {cell(baseline)}", ""]
    for comparison in comparisons:
        lines += [f"## {cell(comparison['run'])}", ""]
        lines += [f"| metric | {unit} | {cell(baseline)} | {cell(comparison['run'])} | difference [95 %] | effect |"]
        lines += ["|---|---|---|---|---|---|"]
        for name, found in comparison["metrics"].items():
            shown = f"{found['difference']:+.4g} [{found['low']:+.4g}, {found['high']:+.4g}]"
            is_clear = found["low"] > 0 or found["high"] < 0
            effect = "–" if found["effect"] is None else f"{found['effect']:+.2f}"
            columns = [cell(name), str(found["units"]), f"{found['baseline']:.4g}", f"{found['run']:.4g}"]
            lines.append("| " + " | ".join([*columns, f"**{shown}**" if is_clear else shown, effect]) + " |")
        lines += ["", *judge_lines(comparison), ""] if "judge" in comparison else [""]
    lines += [
        f"Means over the {unit} that both have. Difference: run − baseline, paired, with its bootstrap interval; bold "
        "where that leaves 0 out (of 20 metrics without any difference, about one is bold). Effect: the difference in "
        "standard deviations of the paired differences.",
    ]
    if unit == "steps":
        lines += ["One training each: what another seed would have given is not in these intervals."]
    return "\n".join(lines) + "\n"


def judge_lines(comparison: Row) -> list[str]:
    """The judge's verdict in two sentences."""
    judge, won = comparison["judge"], comparison["judge"]["win_rate"]
    if won is None:
        return [f"Judge {cell(judge['model'])}: no pair has two readable replies ({judge['problems']})."]
    rate = "{mean:.1%} [{low:.1%}, {high:.1%}]".format(**won)
    cost = "" if judge["usd"] is None else f", ${judge['usd']:.4f}"
    problems = "".join(f"; {count} replies: {reason}" for reason, count in judge["problems"].items())
    first = "–" if judge["first_preferred"] is None else f"{judge['first_preferred']:.0%}"
    return [
        f"Win rate of {cell(comparison['run'])}: {rate} of {judge['judged']} pairs, judged by {cell(judge['model'])} "
        f"in both orders{cost} ({judge['same_in_both_orders']} pairs with the same verdict; of the preferred texts, "
        f"{first} were the one shown first{problems})."
    ]


def cell(text: str) -> str:
    """A name that can't break the table."""
    return " ".join(text.split()).replace("|", "\\|")
