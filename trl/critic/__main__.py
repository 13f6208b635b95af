"""``python -m trl.critic try|check``: see what a critic makes of one text, or measure it on labelled texts."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import subcommand

import trl

if vars(trl).get("DISTRIBUTION") != "relc":
    sys.exit(f"'trl' from {trl.__path__[0]} is not relc's: pip uninstall trl, then pip install -e . here")

from trl.critic.template import PromptFileError, PromptTemplate
from trl.critic.types import Critic, Critique, CritiqueRequest, Span, Style

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from trl.critic.check import CheckResult, LabelledText

_BATCH = 8
"""Texts asked at once in ``check``: enough for an endpoint, few enough for the bar to move."""
_LOCAL_MODEL = "builtin:smollm2"
_COLOURS = {"positive": "bold white on #1f6fb2", "negative": "bold white on #b34700"}
_MARKS = {"positive": "+", "negative": "-"}


class UsageError(ValueError):
    """Flags that don't fit together; the message says which to add or drop."""


@dataclass(kw_only=True)
class CriticArgs:
    """Which critic, with which prompt."""

    prompt_file: Path | None = None
    """The prompt (see prompts/README.md). Without it, --critic score takes the style's own prompts/score_*.txt."""
    style: Style | None = None
    """What the prompt asks for. Not needed where the placeholders, or the labelled texts, show it."""
    critic: Literal["openai", "local", "score", "lexicon"] = "openai"
    """openai: any OpenAI-compatible endpoint; local: a causal LM that writes; score: one that rates words; lexicon: a
    word list, without a prompt."""
    critic_model: str | None = None
    """The model's name. Default: gpt-3.5-turbo for openai, builtin:smollm2 for local and score."""
    critic_base_url: str | None = None
    """The endpoint. Default: OPENAI_BASE_URL, else OpenAI's."""


@dataclass(kw_only=True)
class Try(CriticArgs):
    """Show one text to a critic: the filled prompt, the reply, its spans, and the text with the spans marked.

    With --reply or --reply_file nothing is asked: the reply that you paste is read as the critic's.
    """

    text: str
    """The text to critique; for the summary style the summary."""
    document: str | None = None
    """The text that was summarised (summary style)."""
    score: float | None = None
    """The summary's score, from 0 to 10 (summary style)."""
    reply: str | None = None
    """A reply to read instead of asking a critic."""
    reply_file: Path | None = None
    """The same, from a file."""


@dataclass(kw_only=True)
class Check(CriticArgs):
    """Measure a critic on labelled texts: precision, recall and F1 of its quotes, with 95 % intervals."""

    labelled: tuple[Path, ...]
    """Files with labelled texts, e.g. prompts/labelled/sentiment.jsonl (format: prompts/README.md)."""
    json: bool = False
    """Print one JSON object instead of tables."""


def run_try(args: Try) -> None:
    """``try``: ask (or read the pasted reply) and show every stage."""
    from rich.console import Console

    from trl.critic.parse import parse_critique

    console = Console(highlight=False)
    reply = _given_reply(args)
    style = args.style or _style_without_labels(args, reply is not None)
    request = CritiqueRequest(args.text, args.document, args.score)
    prompt = _filled(args, style, request)
    if prompt is not None:
        asked_by_words = reply is None and args.critic == "score"
        _section(console, "Prompt" + ", asked for each word and window of words" * asked_by_words, prompt)
    if reply is not None:
        critique = parse_critique(reply, style)
    else:
        with _endpoint_errors(args.critic):
            (critique,) = _make_critic(args, style).critique([request])
    _show(console, critique, args)


def run_check(args: Check) -> None:
    """``check``: ask about every labelled text and compare."""
    from trl.critic.check import check, read_labelled

    texts = read_labelled(args.labelled)
    results: dict[str, CheckResult] = {}
    for style in _styles_to_check(args, texts):
        chosen = [text for text in texts if text.style == style]
        critiques = _critiques(args, style, chosen)
        if all(critique.status == "failed" for critique in critiques):
            raise UsageError(f"all {len(critiques)} requests failed, the first with: {critiques[0].error}")
        results[style] = check(chosen, critiques)
    if args.json:
        print(json.dumps({**_described(args), "styles": {name: asdict(result) for name, result in results.items()}}))
        return
    from rich.console import Console

    console = Console(highlight=False)
    for name, result in results.items():
        _show_result(console, name, result)


# --- which style, which critic


def _style_without_labels(args: CriticArgs, reply_given: bool) -> Style:
    """The style where only the flags tell it."""
    if args.prompt_file is None:
        if args.critic == "lexicon" and not reply_given:
            return "sentiment"
        raise UsageError("neither --prompt_file nor --style is given; add --style sentiment, toxicity or summary")
    style = _style_of_file(args.prompt_file)
    if style is None:
        raise UsageError(
            f"the placeholders of {args.prompt_file} fit the sentiment style and the toxicity style; "
            "add --style sentiment or --style toxicity"
        )
    return style


def _style_of_file(path: Path) -> Style | None:
    """summary, or None where it is sentiment or toxicity; raises PromptFileError where it is none of these."""
    try:
        PromptTemplate.from_file(path, style="sentiment")
    except PromptFileError as no_text_prompt:
        try:
            PromptTemplate.from_file(path, style="summary")
        except PromptFileError as no_summary_prompt:
            if str(no_text_prompt) == str(no_summary_prompt):  # it can't be read
                raise
            raise PromptFileError(f"{no_text_prompt}; and as a summary prompt: {no_summary_prompt}") from None
        return "summary"
    return None


def _styles_to_check(args: Check, texts: Sequence["LabelledText"]) -> list[Style]:
    labelled = list(dict.fromkeys(text.style for text in texts))
    wanted = args.style
    if wanted is None and args.prompt_file is not None and _style_of_file(args.prompt_file) == "summary":
        wanted = "summary"
    if wanted is not None:
        if wanted not in labelled:
            raise UsageError(f"the labelled texts are of style {', '.join(labelled)}; expected some of style {wanted}")
        return [wanted]
    if args.prompt_file is not None and len(labelled) > 1:
        raise UsageError(
            f"the labelled texts are of styles {', '.join(labelled)}, and a prompt file has one; add --style, or give "
            "the labelled file of that style"
        )
    return labelled


def _prompt_path(args: CriticArgs, style: Style) -> Path:
    from trl.critic.choose import SCORE_PROMPTS

    if args.prompt_file is not None:
        return args.prompt_file
    if args.critic == "score" and style in SCORE_PROMPTS:
        return Path(SCORE_PROMPTS[style])
    raise UsageError(f"--critic {args.critic} needs a prompt in the {style} style; add --prompt_file")


def _make_critic(args: CriticArgs, style: Style) -> Critic:
    if args.critic == "score":
        from trl.critic.local import LocalCritic
        from trl.generation import load_causal_lm

        template = PromptTemplate.from_file(_prompt_path(args, style), style=style)
        return LocalCritic(template, *load_causal_lm(args.critic_model or _LOCAL_MODEL), "score")
    from trl.critic.choose import make_critic

    path = "" if args.critic == "lexicon" else str(_prompt_path(args, style))
    model = args.critic_model or (_LOCAL_MODEL if args.critic == "local" else None)
    return make_critic(args.critic, style, prompt_file=path, model=model, base_url=args.critic_base_url)


def _critiques(args: Check, style: Style, texts: Sequence["LabelledText"]) -> list[Critique]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    critiques: list[Critique] = []
    with (
        _endpoint_errors(args.critic),
        Progress(*columns, console=Console(stderr=True), transient=True) as progress,
    ):
        bar = progress.add_task(f"{style} texts", total=len(texts))
        critic = _make_critic(args, style)
        for start in range(0, len(texts), _BATCH):
            requests = [text.request for text in texts[start : start + _BATCH]]
            critiques += critic.critique(requests)
            progress.advance(bar, len(requests))
    return critiques


@contextmanager
def _endpoint_errors(kind: str) -> Iterator[None]:
    """What only a run can tell (a refused key, a model that is not there) as a UsageError."""
    expected: type[Exception]
    if kind == "openai":
        from trl.clients import EndpointAuthError as expected
    elif kind == "lexicon":
        expected = ImportError
    else:
        from trl.builtin import BuiltinError as expected
    try:
        yield
    except expected as error:
        raise UsageError(str(error)) from None


# --- try: what to show


def _given_reply(args: Try) -> str | None:
    if args.reply is not None and args.reply_file is not None:
        raise UsageError("both --reply and --reply_file are given; expected one of them")
    return args.reply if args.reply_file is None else args.reply_file.read_text(encoding="utf-8", errors="replace")


def _filled(args: Try, style: Style, request: CritiqueRequest) -> str | None:
    """The prompt as the critic gets it; None if there is none."""
    asked = args.reply is None and args.reply_file is None
    if args.prompt_file is None and (not asked or args.critic == "lexicon"):
        return None
    template = PromptTemplate.from_file(_prompt_path(args, style), style=style)
    missing = [name for name in template.fields if name in ("document", "score") and vars(args)[name] is None]
    if missing:
        raise UsageError(f"the {style} style needs {' and '.join(f'--{name}' for name in missing)}")
    if asked and args.critic == "score":
        from trl.critic.windows import ScorePrompt

        return ScorePrompt.from_template(template).fill(request.text, request)
    return template.fill(request)


def _show(console: "Console", critique: Critique, args: Try) -> None:
    if critique.reply is not None:
        _section(console, "Reply", critique.reply)
    _section(console, "Status", critique.status + (f": {critique.error}" if critique.error else ""))
    if critique.spans:
        from trl.critic.check import place

        unmatched = place(critique.spans, args.text, [])[1]
        lines = [_span_line(span, found=span not in unmatched) for span in critique.spans]
        _section(console, "Spans", "\n".join(lines))
    _section(console, "Text", _marked_text(args.text, critique.spans))


def _span_line(span: Span, *, found: bool) -> str:
    label = f" ({span.label})" if span.label else ""
    return f"{_MARKS[span.polarity]} {span.text}{label}" + ("" if found else "   <- not in the text, rewards nothing")


def _marked_text(text: str, spans: Sequence[Span]) -> "Text":
    """The text with [+good] and [-bad] spans, coloured where the terminal can."""
    from rich.text import Text

    from trl.critic.check import place
    from trl.critic.template import single_line

    shown = Text()
    characters = single_line(text)
    polarities = place(spans, text, [(i, i + 1) for i in range(len(text))])[0] if spans else [None] * len(text)
    start = 0
    for i in range(1, len(characters) + 1):
        if i < len(characters) and polarities[i] == polarities[start]:
            continue
        piece, polarity = _printable(characters[start:i]), polarities[start]
        if polarity is None:
            shown.append(piece)
        else:
            shown.append(f"[{_MARKS[polarity]}{piece}]", style=_COLOURS[polarity])
        start = i
    return shown


def _section(console: "Console", title: str, body: "str | Text") -> None:
    from rich.text import Text

    console.print(Text(f"--- {title}", style="bold"))
    console.print(Text(_printable(body)) if isinstance(body, str) else body, soft_wrap=True)
    console.print()


def _printable(text: str) -> str:
    """Control characters shown as such: a reply must not steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\N{REPLACEMENT CHARACTER}" for char in text)


# --- check: what to show


def _described(args: Check) -> dict[str, object]:
    return {
        "critic": args.critic,
        "critic_model": args.critic_model,
        "prompt_file": str(args.prompt_file) if args.prompt_file else None,
        "labelled": [str(path) for path in args.labelled],
    }


def _show_result(console: "Console", style: str, result: "CheckResult") -> None:
    from rich.table import Table

    from trl.critic.check import Estimate

    def cell(estimate: Estimate) -> str:
        if estimate.value is None:
            return "–"
        value, low, high = (f"{x:.2f}".removeprefix("0") for x in (estimate.value, estimate.low, estimate.high))
        return f"{value} [{low}–{high}]"

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in (f"{style}, {result.texts} texts", "precision", "recall", "F1", "r/w/m"):
        table.add_column(name, no_wrap=True)
    for level, rows in (("words", result.words), ("spans", result.spans)):
        for polarity, row in rows.items():
            scores = map(cell, (row.precision, row.recall, row.f1))
            table.add_row(f"{level}, {polarity}", *scores, f"{row.right}/{row.wrong}/{row.missed}")
    console.print(table)
    console.print("status: " + ", ".join(f"{name} {count}" for name, count in sorted(result.status.items())))
    if result.status.get("failed"):
        console.print(f"{result.status['failed']} failed requests are left out of the scores", style="bold")
    share = cell(result.hallucinated_share)
    console.print(f"quotes: {result.quoted}, not in the text: {result.hallucinated}, share {share}", markup=False)
    console.print("r/w/m: right, wrong, missed; in brackets 95 % intervals over texts\n", style="dim")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    commands = Annotated[Try, subcommand("try")] | Annotated[Check, subcommand("check")]
    args = tyro.cli(commands, args=argv, prog="python -m trl.critic", use_underscores=True, description=__doc__)
    try:
        if isinstance(args, Try):
            run_try(args)
        else:
            run_check(args)
    except (ValueError, OSError) as error:  # ours: UsageError, PromptFileError, DataFileError
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
