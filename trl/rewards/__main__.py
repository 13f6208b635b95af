"""``python -m trl.rewards validate``: try a reward configuration before a run is spent on it."""

import json
import logging
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import tyro

import trl

if vars(trl).get("DISTRIBUTION") != "relc":
    sys.exit(f"'trl' from {trl.__path__[0]} is not relc's: pip uninstall trl, then pip install -e . here")

from trl.builtin import BuiltinError

if TYPE_CHECKING:
    from trl.data.tuning_rows import TuningRow
    from trl.rewards.reward_function import ConfiguredReward


class UsageError(ValueError):
    """Flags that don't fit together; the message says which to add or drop."""


@dataclass(kw_only=True)
class Validate:
    """Score some responses and show, per reward: distribution, errors with reasons, time, verdict and warnings.

    Give the responses with --responses, or sample them with --model. With --example and --response one response is
    scored instead, and every stage of it is shown. The exit code is 0 if nothing failed (OK), 1 if some rewards did
    (partial), all did (error), or the files can't be used. Warnings (too hard, too easy, constant, clipped) leave the
    verdict as it is.

    OPENAI_API_KEY is sent to judges, REWARD_SERVICE_TOKEN (if set) to reward services.
    """

    config: Path
    """The reward configuration, JSON (.json) or YAML."""
    data: Path | None = None
    """Prompts: JSONL rows {"contents": …, "systemInstruction"?: …, "references"?: …}."""
    responses: Path | None = None
    """Responses to them: JSONL rows {"response": "…"} in the order of --data."""
    model: str | None = None
    """Causal LM that answers instead: hub id, folder or builtin: name; its chat template is used if it has one."""
    limit: int = 20
    """Use this many rows: with --responses the first, with --model a random sample; 0: all."""
    max_new_tokens: int = 256
    """Longest response of --model in tokens."""
    seed: int = 0
    """Seeds the choice of rows and the sampling of --model."""
    example: Path | None = None
    """A JSON file with one row like those of --data."""
    response: str | None = None
    """The response to --example."""
    json: bool = False
    """Print {"verdict", "overall", "rewards": {name: {"verdict", "mean", "min", "max", "n", "errors": {reason: count},
    "seconds", "warnings"}}}, where overall is the mean total and n counts samples; with --example all stages."""
    nan_policy: Literal["strict", "renormalise"] = "strict"
    """What a missing reward does to a composite's sample: strict: no total; renormalise: the others make it up."""
    timeout: float | None = None
    """Seconds for one evaluation. Default: judges 60, snippets 100, services 300."""
    base_url: str | None = None
    """The judges' endpoint. Default: OPENAI_BASE_URL, else OpenAI's."""
    judge_cache: Path | None = None
    """Folder that keeps the judges' answers."""
    allow_http: bool = False
    """Ask reward services over plain http on other machines, too."""


def run_validate(args: Validate) -> bool:
    """Do what the command line says; whether the verdict is OK."""
    from trl.clients import EndpointAuthError
    from trl.rewards.autorater import JudgeSettings
    from trl.rewards.configured import load_reward

    _check_flags(args)
    try:
        reward = load_reward(
            args.config,
            nan_policy=args.nan_policy,
            timeout=args.timeout,
            base_url=args.base_url,
            judge=JudgeSettings(cache=args.judge_cache),
            allow_http=args.allow_http,
        )
    except EndpointAuthError as error:
        raise UsageError(str(error)) from None
    with reward:
        return _run_example(args, reward) if args.example is not None else _run_rows(args, reward)


def _check_flags(args: Validate) -> None:
    if args.example is not None or args.response is not None:
        if args.example is None or args.response is None:
            raise UsageError("--example and --response go together: give both")
        if args.data is not None or args.responses is not None or args.model is not None:
            raise UsageError("--example is one row with its --response: drop --data, --responses and --model")
        return
    if args.data is None:
        raise UsageError("nothing to score: give --data (or --example and --response)")
    if args.responses is None and args.model is None:
        raise UsageError("no responses: give --responses FILE, or --model NAME to sample them")
    if args.responses is not None and args.model is not None:
        raise UsageError("--responses and --model both give responses: drop one")
    if args.limit < 0:
        raise UsageError(f"--limit is {args.limit}; expected 1 or more, or 0 for all rows")


def _run_rows(args: Validate, reward: "ConfiguredReward") -> bool:
    from rich.console import Console

    from trl.data.tuning_rows import read_rows
    from trl.jsonl import strict
    from trl.rewards.display import show_report
    from trl.rewards.validate import read_responses, report_of, sample_responses

    rows = _chosen(read_rows(str(args.data)), args)
    reward.check([row.references for row in rows])  # before anything is sampled or asked
    with Console(stderr=True).status(f"scoring {len(rows)} responses"):
        if args.model is not None:
            texts = sample_responses(args.model, rows, max_new_tokens=args.max_new_tokens, seed=args.seed)
        else:
            texts = read_responses(str(args.responses), len(rows))
        report = report_of(reward.details(texts, **_columns(rows)), reward.scales)
    if args.json:
        print(json.dumps(strict(report.as_json())))
    else:
        source = f"responses of {args.model}" if args.model is not None else str(args.responses)
        show_report(Console(), report, f"{args.config}: {len(rows)} rows of {args.data}, {source}\n")
    return report.verdict == "OK"


def _chosen(rows: "list[TuningRow]", args: Validate) -> "list[TuningRow]":
    """At most ``--limit`` rows: the first where responses are given in their order, else a random sample in order."""
    if not args.limit or args.limit >= len(rows):
        return rows
    if args.model is None:
        return rows[: args.limit]
    # data are often sorted, and the first rows then all alike
    return [rows[index] for index in sorted(random.Random(args.seed).sample(range(len(rows)), args.limit))]


def _run_example(args: Validate, reward: "ConfiguredReward") -> bool:
    from rich.console import Console

    from trl.data.tuning_rows import parse_row
    from trl.jsonl import DataFileError, strict
    from trl.rewards.display import show_example
    from trl.rewards.samples import prompt_text

    try:
        row = json.loads(Path(str(args.example)).read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise DataFileError(f"{args.example}: expected one row as JSON ({error})") from None
    if not isinstance(row, dict):
        raise DataFileError(f"{args.example}: expected one row as a JSON object, got {type(row).__name__}")
    parsed, response = parse_row(row, str(args.example)), str(args.response)
    (result,) = reward.details([response], **_columns([parsed]))
    if args.json:
        print(json.dumps(strict(asdict(result))))  # in ASCII: a stage may hold half a character
    else:
        show_example(Console(), result, prompt_text(parsed.contents), response)
    failed = any(component.error is not None for component in result.components)
    return not failed and not math.isnan(result.reward)


def _columns(rows: "Sequence[TuningRow]") -> dict[str, Any]:
    return {"examples": [row.example for row in rows], "references": [row.references for row in rows]}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = tyro.extras.subcommand_cli_from_dict(
        {"validate": Validate}, args=argv, prog="python -m trl.rewards", use_underscores=True, description=__doc__
    )
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        ok = run_validate(args)
    except (ValueError, BuiltinError, OSError) as error:  # ValueErrors of ours: UsageError, DataFileError
        if args.json:
            print(json.dumps({"verdict": "error", "overall": None, "rewards": {}, "error": str(error)}))
        sys.exit(f"error: {error}")
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
