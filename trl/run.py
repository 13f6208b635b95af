"""What every task script shares: common settings, the command line, logging, progress, and the run folder."""

import itertools
import json
import logging
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Self, TypeVar

import tyro

from trl.report.runlog import RunLog
from trl.trainer.config import PPOConfig

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from torch import Tensor

    from trl.critic.intrinsic import PendingIntrinsic
    from trl.critic.types import Critic, CriticGoneError, Critique, Style
    from trl.trainer.ppo import PPOTrainer

logger = logging.getLogger(__name__)

OutputDir = Annotated[str, tyro.conf.arg(aliases=("--model_save_path",))]
CriticKind = Literal["openai", "local", "score", "lexicon", "attribution", "random", "replay"]


@dataclass
class RunArgs:
    """Settings that every task script has. Task scripts set the defaults that differ."""

    ppo_config: tyro.conf.OmitArgPrefixes[PPOConfig] = field(default_factory=PPOConfig)
    preset: Literal["builtin"] | None = None
    """builtin: offline models, data and sizes for everything not given; a builtin: policy implies it."""
    epochs: int = 1
    """Passes over the queries."""
    steps: int | None = None
    """Stop after this many PPO steps."""
    num_shared_layers: int | None = None
    """Freeze this many lower blocks and share them with the reference; their states are computed once."""
    bf16: bool = False
    """bf16 mixed precision; log-probs, rewards, advantages and losses stay in fp32."""

    use_intrinsic_reward: Annotated[bool, tyro.conf.arg(aliases=("--use_instric_reward", "--use_intrinsic_rewad"))] = (
        False
    )
    """Add the critic's token-level rewards."""
    critic: CriticKind | None = None
    """Who quotes the spans: openai (any OpenAI-compatible endpoint), local (a causal LM that writes), score (a
    causal LM that rates word windows), lexicon (a word list, a cheap stand-in for an LLM), attribution (the words
    that the environment's own reward depends on), random (the default critic's spans in random places, the control),
    replay (a recording). Default: openai; score when the policy is a builtin: model; replay with --critic_replay."""
    critic_replay: str | None = None
    """Recorded critiques to answer from: the critiques.jsonl of an earlier run, or a file made by hand."""
    critic_model: str | None = None
    """The critic's model; default gpt-3.5-turbo for openai, the policy's own initial weights for local and score."""
    critic_base_url: str | None = None
    """OpenAI-compatible endpoint of the critic; default OPENAI_BASE_URL, else OpenAI's."""
    critic_timeout: float = 30.0
    """Seconds that one request to the endpoint may take."""
    critic_deadline: float = 120.0
    """Seconds after which a step's critiques are given up, retries and waiting counted."""
    critic_concurrency: int = 16
    """Requests on the wire at one time, all processes together."""
    critic_cache: str | None = None
    """Folder that keeps the endpoint's replies, for all processes and later runs."""
    critic_rpm: int | None = None
    """Requests per minute to the endpoint, all processes together."""
    critic_tpm: int | None = None
    """Prompt and reply tokens per minute, all processes together."""
    critic_budget_requests: int | None = None
    """Most requests to the endpoint; when it is spent, samples go without a critique."""
    critic_budget_usd: float | None = None
    """Most dollars to spend at the endpoint; needs --critic_prices."""
    critic_prices: tuple[float, float] | None = None
    """Dollars per million prompt tokens and per million reply tokens."""
    critic_fuse_seconds: float = 300.0
    """Save the model and stop when more than 80 % of the calls fail and none has succeeded for this long."""
    prompt_file: str = ""
    """Few-shot prompt of the critic (openai, local)."""
    positive_reward_value: float = 0.0
    """Reward of each token in a span that the critic called positive."""
    negative_reward_value: float = -1.0
    """Reward of each token in a span that the critic called negative."""
    intrinsic_reward_threshold: float = 1.0
    """The critic is asked where the environment's raw score is at or below this."""
    reward_mode: Literal["each", "spread"] = "each"
    """each: every token of a span gets the value; spread: the value is divided over the span's tokens."""

    output_dir: OutputDir = "outputs/run"
    """Run folder: the final model, metrics.jsonl, samples.jsonl, critiques.jsonl, run.json."""
    save_freq: int | None = None
    """Save the model every this many steps, to OUTPUT_DIR/step-N."""
    overwrite: bool = False
    """Replace an earlier run in output_dir."""
    dry_run: bool = False
    """Check everything, print the plan, ask the critic once, train nothing."""

    @classmethod
    def builtin(cls) -> Self:
        """The settings of ``--preset builtin``."""
        raise TypeError(f"{cls.__name__} has no built-in preset")

    @property
    def critic_kind(self) -> CriticKind:
        """The critic that was chosen, or the default for this policy."""
        return self.critic or self.default_critic_kind

    @property
    def default_critic_kind(self) -> CriticKind:
        """The critic where ``--critic`` names none, and the one that ``--critic random`` is the control of."""
        if self.critic_replay is not None:
            return "replay"
        return "score" if (self.ppo_config.model_name or "").startswith("builtin:") else "openai"

    @property
    def critic_endpoint(self) -> dict[str, Any]:
        """Keywords of OpenAICritic that the flags set."""
        return {
            "timeout": self.critic_timeout,
            "deadline": self.critic_deadline,
            "max_concurrency": self.critic_concurrency,
            "cache": self.critic_cache,
            "requests_per_minute": self.critic_rpm,
            "tokens_per_minute": self.critic_tpm,
            "budget_requests": self.critic_budget_requests,
            "budget_usd": self.critic_budget_usd,
            "prices": self.critic_prices,
            "fuse_seconds": self.critic_fuse_seconds,
        }


T = TypeVar("T", bound=RunArgs)


def parse_args(cls: type[T], argv: Sequence[str] | None = None) -> T:
    """Read the command line into ``cls``; exits with one clear line on values that can't be right.

    PPOConfig's fields are written ``--ppo_config.X`` or ``--X``; dashes and underscores are the same.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    argv = [_without_prefix(word) for word in argv]
    try:
        default = cls.builtin() if _wants_builtin(argv) else cls()
        return tyro.cli(cls, args=argv, default=default, use_underscores=True, description=cls.__doc__)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None


def _without_prefix(word: str) -> str:
    for prefix in ("--ppo_config.", "--ppo-config."):
        if word.startswith(prefix):
            return "--" + word.removeprefix(prefix)
    return word


def _wants_builtin(argv: Sequence[str]) -> bool:
    """Whether ``--preset builtin`` or a ``builtin:`` policy is on the command line, as one word or two."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for flag, value in itertools.pairwise(words):
        name = flag.replace("-", "_")
        if name == "__preset" and value == "builtin":
            return True
        if name == "__model_name" and value.startswith("builtin:"):
            return True
    return False


def start_logging(is_main: bool = True) -> None:
    """Messages of every process's warnings, and of the main process's information, to stderr."""
    logging.basicConfig(
        level=logging.INFO if is_main else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    for chatty in ("httpx", "httpx2", "accelerate", "datasets", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def prepare_output_dir(args: RunArgs, is_main: bool = True) -> Path:
    """Create the run folder and write run.json (command and settings, which hold no key).

    An earlier run there is an error unless ``--overwrite`` was given: results are not lost by repeating a
    command.
    """
    folder = Path(args.output_dir)
    if not is_main:
        return folder
    if (folder / "metrics.jsonl").exists():
        if not args.overwrite:
            raise SystemExit(
                f"error: {folder} already holds a run; give another --output_dir, or --overwrite to replace it"
            )
        for stale in ("metrics.jsonl", "samples.jsonl", "critiques.jsonl"):
            (folder / stale).unlink(missing_ok=True)
        for checkpoint in folder.glob("step-*/"):
            shutil.rmtree(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"command": ["python", *sys.argv], "args": asdict(args)}
    (folder / "run.json").write_text(json.dumps(settings, indent=2) + "\n")
    return folder


def dry_run(args: RunArgs, queries: int, steps: int, parameters: tuple[int, int], critic: "Critic | None") -> None:
    """Print what a run would do and cost, and ask the critic once. ``parameters``: (trainable, all)."""
    config = args.ppo_config
    samples = steps * config.batch_size
    print(f"policy          {config.model_name}: {parameters[0]:,} of {parameters[1]:,} parameters are trained")
    print(f"queries         {queries:,} from {config.query_dataset}")
    print(f"steps           {steps:,} of up to {config.batch_size} samples per process ({samples:,} samples)")
    print(f"environment     {config.reward_model}")
    print(f"run folder      {args.output_dir}")
    if critic is None:
        print("critic          none (--use_intrinsic_reward adds one)")
        return
    from trl.critic.types import CritiqueRequest

    print(f"critic          {args.critic_kind}: at most {samples:,} requests per process")
    if args.critic_replay is not None:  # it knows the texts of its recording, not one to test with
        print(f"recording       {args.critic_replay}")
        return
    [answer] = critic.critique([CritiqueRequest("The cast is wonderful, but the plot is a boring mess.")])
    spans = ", ".join(f"{span.polarity}: {span.text!r}" for span in answer.spans) or "no spans"
    print(f"test request    {answer.status} ({spans}){' ' + answer.error if answer.error else ''}")
    if answer.status == "failed":
        raise SystemExit("error: the critic did not answer")


class RunRecord:
    """A run as it goes: metrics.jsonl and samples.jsonl, a rich bar on a terminal, one line per step elsewhere.

    Only the main process writes and shows anything.
    """

    def __init__(self, folder: Path, total: int, is_main: bool = True):
        self.folder, self.total, self.is_main = folder, total, is_main
        self._log: RunLog | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        if not self.is_main:
            return self
        self._log = RunLog(self.folder)
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._progress = Progress(*columns, console=Console(stderr=True))
            self._progress.start()
            self._task = self._progress.add_task("first step", total=self.total)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._log is not None:
            self._log.close()

    def step(self, step: int, stats: dict[str, float], samples: Sequence[dict[str, Any]]) -> None:
        """Keep and show one finished step."""
        if self._log is None:
            return
        self._log.log_metrics(step, stats)
        self._log.log_samples(step, samples)
        text = f"reward {stats['objective/score']:+.2f}  KL {stats['objective/kl']:.2f}"
        if "critic/hit_rate" in stats:
            text += f"  critic hits {stats['critic/hit_rate']:.0%}"
        text += f"  {stats['time/iteration']:.1f} s/step"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=step, description=text)
        else:
            print(f"step {step}/{self.total}  {text}", file=sys.stderr, flush=True)


def critic_of(
    args: RunArgs,
    style: "Style",
    lm: Any,
    tokenizer: Any,
    half_precision: bool,
    reward: Callable[..., Sequence[float | None]] | None = None,
) -> "Critic":
    """The critic that the flags describe; exits with one line where its prompt, limits, key or model are wrong.

    ``lm`` and ``tokenizer`` serve the critics in this process that have no model of their own, ``reward``, the
    environment's, the attribution critic.
    """
    from trl.clients import EndpointAuthError
    from trl.critic.choose import make_critic
    from trl.critic.random_spans import RandomSpanCritic

    is_control = args.critic_kind == "random"
    try:
        critic = make_critic(
            args.default_critic_kind if is_control else args.critic_kind,
            style,
            prompt_file=args.prompt_file,
            model=args.critic_model,
            base_url=args.critic_base_url,
            lm=lm,
            tokenizer=tokenizer,
            half_precision=half_precision,
            endpoint=args.critic_endpoint,
            reward=reward,
            recording=args.critic_replay,
        )
    except (EndpointAuthError, ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    return RandomSpanCritic(critic, args.ppo_config.seed) if is_control else critic


def with_token_rewards(
    scores: Sequence[float], pending: "PendingIntrinsic | None", global_mean: Callable[[Sequence[float]], float]
) -> Sequence[float] | Callable[[], list["Tensor"]]:
    """Scores for ``PPOTrainer.step``: as they are, or to be merged with the critic's rewards once needed.

    When the critic is gone for one process, the callable raises CriticGoneError in all of them; ``global_mean`` is
    the trainer's.
    """
    if pending is None:
        return scores

    def merged() -> list["Tensor"]:
        from trl.core import merge_rewards
        from trl.critic.types import CriticGoneError

        gone: CriticGoneError | None = None
        try:
            token_rewards = pending.result()
        except CriticGoneError as error:
            gone = error
        if global_mean([float(gone is not None)]):
            raise gone or CriticGoneError("the critic of another process is gone; its message says why")
        return merge_rewards(scores, token_rewards)

    return merged


def save_and_stop(trainer: "PPOTrainer", folder: Path, error: "CriticGoneError") -> NoReturn:
    """Save the model as it is and end the run with an error, in every process."""
    trainer.save_pretrained(folder)
    trainer.accelerator.end_training()
    raise SystemExit(f"error: {error}. The model so far is in {folder}")


def sample_rows(
    queries: Sequence[str],
    responses: Sequence[str],
    scores: Sequence[float | None],
    token_texts: Sequence[Sequence[str]],
    rollout: Sequence[dict[str, Any]],
    intrinsic: Sequence[Any] = (),
    critiques: Sequence["Critique"] = (),
) -> list[dict[str, Any]]:
    """Rows of samples.jsonl, one per response of ``token_texts``, token by token.

    ``rollout`` is ``PPOTrainer.last_rollout``; ``intrinsic`` (N_i,) and ``critiques`` come from the critic and
    are empty without one.
    """
    rows = []
    for i, texts in enumerate(token_texts):
        columns = {name: rollout[i][name].tolist() for name in ("kl", "value", "advantage")}
        columns["intrinsic"] = intrinsic[i].tolist() if intrinsic else [0.0] * len(texts)
        tokens = [
            {"text": text, **{name: round(values[j], 5) for name, values in columns.items()}}
            for j, text in enumerate(texts)
        ]
        critique = critiques[i] if critiques else None
        rows.append(
            {
                "query": queries[i],
                "response": responses[i],
                "score": scores[i],
                "tokens": tokens,
                "spans": [asdict(span) for span in critique.spans] if critique else [],
                "reply": critique.reply if critique else None,
                "status": critique.status if critique else None,
            }
        )
    return rows
