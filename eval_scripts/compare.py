"""Compare runs pair by pair: the first one with every other, on the same prompts or the same training steps.

    python eval_scripts/compare.py base.jsonl ppo.jsonl ppo_critic.jsonl --output_file comparison.md

RUN is a generation file with the scores that the evaluation scripts add (they pass each other's on, so that one file
can hold them all), the scores.csv of summ_eval.py, or the run folder of a training. All are of one kind, over the same
prompts. Every metric gets both means, their difference with a 95 % bootstrap interval, and the effect size.

With --judge_model, a chat model behind an OpenAI-compatible endpoint says which of two texts is better, in both orders;
its key comes from OPENAI_API_KEY. Replies are kept as they arrive: the same command continues an interrupted one.
"""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import Positional, arg

import trl

if vars(trl).get("DISTRIBUTION") != "relc":
    sys.exit(f"'trl' from {trl.__path__[0]} is not relc's: pip uninstall trl, then pip install -e . here")

from trl.jsonl import DataFileError, Row, dump_line, replace_file

if TYPE_CHECKING:
    from trl.comparison import Measured
    from trl.judge import PairwiseJudge


@dataclass
class Args:
    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN RUN [RUN …]")]
    """The baseline, and what is compared with it: generation files, summ_eval.py's CSV files, or run folders."""
    output_file: Path
    """The tables, in Markdown."""
    metrics: tuple[str, ...] = ()
    """Only these; default: all that two runs have, of trainings those called objective/* and eval/*."""
    last_steps: int | None = None
    """Of trainings: compare the last so many steps that both have; default: all."""
    seed: int = 0
    """Seeds the intervals and the choice of the judge's pairs."""
    judge_model: str | None = None
    """Chat model that judges pairs of texts; default: no judge."""
    judge_base_url: str | None = None
    """OpenAI-compatible endpoint of the judge; default OPENAI_BASE_URL, else OpenAI's."""
    judge_criterion: str | None = None
    """What is better, in words; default: sense, fluency and relevance."""
    judge_prompt: Path | None = None
    """A prompt of your own with {{first}} and {{second}}, and if wanted {{prompt}} and {{criterion}}; its replies must
    end in 1, 2 or tie."""
    judge_pairs: int = 200
    """Most pairs to judge of two runs, a seeded random sample; each is asked twice."""
    judge_cache: Path | None = None
    """Folder of the replies; default OUTPUT_FILE.judge."""
    judge_max_tokens: int = 512
    """Longest reply."""
    judge_concurrency: int = 16
    """Requests on the wire at one time."""
    judge_timeout: float = 60.0
    """Seconds that one request may take."""
    judge_rpm: int | None = None
    """Requests per minute."""
    judge_tpm: int | None = None
    """Prompt and reply tokens per minute."""
    judge_budget_requests: int | None = None
    """Most requests of this call; pairs beyond are left out and counted."""
    judge_budget_usd: float | None = None
    """Most dollars of this call; needs --judge_prices."""
    judge_prices: tuple[float, float] | None = None
    """Dollars per million prompt tokens and per million reply tokens."""


def main(args: Args) -> None:
    # 1. runs
    from trl.comparison import UNITS, differences, read_runs
    from trl.report.compared import markdown

    if len(args.runs) < 2:
        sys.exit("error: give two runs or more; the first is the baseline")
    baseline, *others = read_runs(args.runs)
    found = {
        run.name: differences(baseline, run, metrics=args.metrics, last=args.last_steps, seed=args.seed)
        for run in others
    }

    # 2. judge
    judged: dict[str, Row] = {}
    if args.judge_model is not None:
        judge = make_judge(args)
        judged = {run.name: win_rate(args, judge, baseline, run) for run in others}

    # 3. result
    comparisons = [
        {
            "run": name,
            "metrics": {metric: asdict(each) for metric, each in metrics.items()},
            **({"judge": judged[name]} if judged else {}),
        }
        for name, metrics in found.items()
    ]
    page = markdown(baseline.name, UNITS[baseline.kind], comparisons)
    args.output_file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(args.output_file, page)
    print(page)
    summary = {"baseline": baseline.name, "kind": baseline.kind, "comparisons": comparisons}
    print(dump_line({**summary, "output_file": str(args.output_file)}))


def make_judge(args: Args) -> "PairwiseJudge":
    """The judge that the flags describe; exits with one line where they or the key are wrong."""
    from trl.clients import ChatClient, EndpointAuthError
    from trl.judge import CRITERION, DEADLINE, PROMPT, PairwiseJudge
    from trl.limits import Budget, RateLimit

    if args.judge_pairs < 1:
        sys.exit(f"error: --judge_pairs is {args.judge_pairs}; expected at least 1")
    try:
        client = ChatClient(
            str(args.judge_model),
            base_url=args.judge_base_url,
            max_tokens=args.judge_max_tokens,
            max_concurrency=args.judge_concurrency,
            timeout=args.judge_timeout,
            deadline=DEADLINE,
            rate=RateLimit(args.judge_rpm, args.judge_tpm),
            budget=Budget(args.judge_budget_requests, args.judge_budget_usd, args.judge_prices),
        )
        return PairwiseJudge(
            client,
            args.judge_cache or args.output_file.with_name(args.output_file.name + ".judge"),
            PROMPT if args.judge_prompt is None else args.judge_prompt.read_text(encoding="utf-8"),
            args.judge_criterion or CRITERION,
        )
    except (EndpointAuthError, ValueError) as error:
        sys.exit(f"error: {error}")


def win_rate(args: Args, judge: "PairwiseJudge", baseline: "Measured", run: "Measured") -> Row:
    """How often the judge prefers the run's texts, ties and disagreement with itself counted as halves."""
    import numpy as np
    from tqdm import tqdm

    from trl.clients import EndpointAuthError
    from trl.comparison import paired_texts
    from trl.judge import JudgeGoneError
    from trl.limits import Budget
    from trl.metrics import bootstrap_interval

    pairs = paired_texts(baseline, run)
    if len(pairs) > args.judge_pairs:
        chosen = np.random.default_rng(args.seed).choice(len(pairs), args.judge_pairs, replace=False)
        pairs = [pairs[index] for index in sorted(chosen)]
    try:
        with tqdm(total=2 * len(pairs), unit="reply", desc=f"judge: {run.name}") as progress:
            verdicts = judge.compare(pairs, progress.update)
    except (EndpointAuthError, JudgeGoneError) as error:
        sys.exit(f"error: {error}")
    scores = [score for score in verdicts.scores if score is not None]
    won = bootstrap_interval(scores, seed=args.seed)._asdict() if scores else None
    return {
        "model": args.judge_model,
        "pairs": len(pairs),
        "judged": len(scores),
        "win_rate": won,
        "same_in_both_orders": verdicts.agreeing,
        "first_preferred": verdicts.first_preferred,
        "problems": verdicts.problems,
        "tokens_in": verdicts.tokens_in,
        "tokens_out": verdicts.tokens_out,
        "usd": Budget(prices=args.judge_prices).cost(verdicts.tokens_in, verdicts.tokens_out),
    }


if __name__ == "__main__":
    try:
        main(tyro.cli(Args, use_underscores=True, description=__doc__))
    except (DataFileError, OSError) as error:
        sys.exit(f"error: {error}")
