"""What every task script shares before it starts: settings, the command line, logging, the run folder."""

import fcntl
import itertools
import json
import logging
import math
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Protocol, Self, TypeVar

import tyro

from trl.builtin import BuiltinError
from trl.failures import SettingError
from trl.jsonl import DataFileError
from trl.trainer.config import PPOConfig
from trl.trainer.supervised_config import LATEST
from trl.trainer.world import LaunchError

logger = logging.getLogger(__name__)

OutputDir = Annotated[str, tyro.conf.arg(aliases=("--model_save_path",))]
CriticKind = Literal["openai", "local", "score", "lexicon", "attribution", "random", "replay"]
ToxicityScorerKind = Literal["classifier", "moderation", "perspective"]


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
    replay (a recording). Default: openai; when the policy is a builtin: model score, for summaries attribution;
    replay with --critic_replay."""
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
    """Save OUTPUT_DIR/checkpoint-N every this many steps and after the last: a model folder like the final one, and in
    it the state to resume from."""
    keep_checkpoints: int = 2
    """How many checkpoints stay on disk."""
    resume: str | None = None
    """Go on from a checkpoint folder, or from the newest in output_dir (--resume alone; without any, the run starts
    from the beginning)."""
    eval_every: int | None = None
    """Mean environment reward on held-out prompts every this many steps, before the first and after the last."""
    eval_prompts: int = 64
    """How many held-out prompts --eval_every takes."""
    overwrite: bool = False
    """Replace an earlier run in output_dir."""
    dry_run: bool = False
    """Check everything, print the plan, ask the critic once, train nothing."""

    def __post_init__(self) -> None:
        counts = ("epochs", "steps", "num_shared_layers", "save_freq", "keep_checkpoints", "eval_every", "eval_prompts")
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} must be at least 1, got {value}; leave it out for the default")
        if self.resume is not None and self.overwrite:
            raise ValueError("--resume goes on with the run that --overwrite would remove; give one of them")
        for name in ("positive_reward_value", "negative_reward_value", "intrinsic_reward_threshold"):
            if math.isnan(getattr(self, name)):
                raise ValueError(f"--{name} must be a number, got NaN")
        if self.ppo_config.log_with == "tensorboard":
            self.ppo_config.project_kwargs = {"logging_dir": self.output_dir, **self.ppo_config.project_kwargs}

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
    def quoting_critic(self) -> CriticKind:
        """Whose spans are used: the critic's, or those of the one that ``--critic random`` is the control of."""
        return self.default_critic_kind if self.critic_kind == "random" else self.critic_kind

    @property
    def asks_own_weights(self) -> bool:
        """Whether the critic that quotes has no model of its own."""
        return self.quoting_critic in ("local", "score") and self.critic_model is None

    @property
    def environment_name(self) -> str:
        """What gives the environment's scores."""
        return str(self.ppo_config.reward_model)

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


def check_lengths(shortest: int, longest: int) -> None:
    """Raise ValueError where no response can have a length from ``shortest`` to ``longest`` tokens."""
    if not 1 <= shortest <= longest:
        raise ValueError(f"output_min_length is {shortest} and output_max_length {longest}; expected 1 <= min <= max")


@dataclass
class ToxicityArgs(RunArgs):
    """Settings that the detoxification scripts have besides `RunArgs`."""

    prompt_file: str = "prompts/prompt_toxicity_3shot_v2.txt"
    """Few-shot prompt of the critic (openai, local)."""
    prompt_toxicity_level: float = 0.3
    """Train on prompts whose toxicity is above this."""
    output_min_length: int = 10
    """Shortest response in tokens, unless the model ends earlier."""
    output_max_length: int = 20
    """Longest response in tokens."""
    toxicity_scorer: ToxicityScorerKind | None = None
    """The environment: classifier (reward_model's harmless logit), moderation (1 - score of an OpenAI-compatible
    /v1/moderations endpoint), perspective (1 - TOXICITY; Google ends this service on 2026-12-31 and gives no new
    keys: use classifier or moderation). Default: classifier; perspective where there is a key, unless the key comes
    from the environment and reward_model is a builtin: name."""
    perspective_api: str | None = None
    """Key of the Perspective API (or set PERSPECTIVE_API_KEY). The service ends on 2026-12-31."""
    perspective_qps: float = 1.0
    """Perspective requests per second, over all processes."""
    toxicity_endpoint: str | None = None
    """Another server for the moderation or perspective scorer."""
    toxicity_cache: str | None = None
    """Folder that keeps scores of the moderation or perspective scorer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.prompt_toxicity_level < 1:
            raise ValueError(
                f"prompt_toxicity_level is {self.prompt_toxicity_level}; expected at least 0 and less than 1"
            )
        check_lengths(self.output_min_length, self.output_max_length)

    @property
    def scorer_kind(self) -> ToxicityScorerKind:
        """The scorer that was chosen, or the default."""
        if self.toxicity_scorer is not None:
            return self.toxicity_scorer
        is_offline = super().environment_name.startswith("builtin:")
        has_key = self.perspective_api or (os.environ.get("PERSPECTIVE_API_KEY") and not is_offline)
        return "perspective" if has_key else "classifier"

    @property
    def environment_name(self) -> str:
        """What gives the environment's scores."""
        return super().environment_name if self.scorer_kind == "classifier" else self.scorer_kind


class ScriptArgs(Protocol):
    """What every script's settings are, of PPO and of supervised training: a dataclass with these."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    output_dir: OutputDir
    overwrite: bool
    resume: str | None

    @classmethod
    def builtin(cls) -> Self:
        """The settings of ``--preset builtin``."""
        ...


T = TypeVar("T", bound=ScriptArgs)


def parse_args(cls: type[T], argv: Sequence[str] | None = None) -> T:
    """Read the command line into ``cls``; exits with one clear line on values that can't be right.

    PPOConfig's fields are written ``--ppo_config.X`` or ``--X``; dashes and underscores are the same. ``--resume``
    without a path is the newest checkpoint. What is secret in ``sys.argv`` is gone from it afterwards: trackers record
    the command line.
    """
    if argv is None:
        argv, sys.argv = sys.argv[1:], [_without_passwords(word) for word in _without_keys(sys.argv)]
    argv = list(argv)
    argv = _with_latest([_without_prefix(word) for word in argv])
    try:
        default = cls.builtin() if _wants_builtin(argv) else cls()
        args = tyro.cli(cls, args=argv, default=default, use_underscores=True, description=cls.__doc__)
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    if isinstance(args, RunArgs) and isinstance(default, RunArgs) and args.prompt_file != default.prompt_file:
        _warn_of_unread_prompt(args)
    return args


def _warn_of_unread_prompt(args: RunArgs) -> None:
    kind = args.quoting_critic
    if args.use_intrinsic_reward and kind not in ("openai", "local"):
        logger.warning("--prompt_file %s is not read: the critic is %s, not openai or local", args.prompt_file, kind)


def _without_prefix(word: str) -> str:
    for prefix in ("--ppo_config.", "--ppo-config."):
        if word.startswith(prefix):
            return "--" + word.removeprefix(prefix)
    return word


def _with_latest(argv: Sequence[str]) -> list[str]:
    words = []
    for word, following in itertools.zip_longest(argv, argv[1:]):
        words.append(word)
        if word == "--resume" and (following is None or following.startswith("--")):
            words.append(LATEST)
    return words


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


def start_logging() -> None:
    """Messages of every process's warnings, and of the main process's information, to stderr."""
    logging.basicConfig(
        level=logging.INFO if os.environ.get("RANK", "0") == "0" else logging.WARNING,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        datefmt="%H:%M:%S",
    )
    # peft asks transformers by a name that it has given up
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
    for chatty in ("httpx", "httpx2", "accelerate", "datasets", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


def prepare_output_dir(args: ScriptArgs, is_main: bool = True) -> Path:
    """Create the run folder and write run.json (command and settings, which hold no key).

    An earlier run there is an error unless it is resumed or ``--overwrite`` was given: results are not lost by
    repeating a command. So is one that still goes on.
    """
    folder = Path(args.output_dir)
    if not is_main:
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    _lock(folder)
    if (folder / "metrics.jsonl").exists() and not _is_resumed(args, folder):
        if not args.overwrite:
            raise SystemExit(
                f"error: {folder} already holds a run; give another --output_dir, --resume to go on with it, or "
                "--overwrite to replace it"
            )
        for stale in ("metrics.jsonl", "samples.jsonl", "critiques.jsonl", "critiques.lost.jsonl"):
            (folder / stale).unlink(missing_ok=True)
        for checkpoint in (*folder.glob("checkpoint-*/"), *folder.glob("failed-*/")):
            shutil.rmtree(checkpoint)
    recorded = {name: value for name, value in asdict(args).items() if name != "perspective_api"}
    settings = {"command": ["python", *_without_keys(sys.argv)], "args": recorded}
    (folder / "run.json").write_text(_without_passwords(json.dumps(settings, indent=2)) + "\n")
    return folder


def _lock(folder: Path) -> None:
    """Exit with one line where another process writes this run; until this one ends, no other will.

    Killing a launcher does not always end its script, and the next one would write the same files.
    """
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT)  # stays open: closing it would give up the lock
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        raise SystemExit(
            f"error: another process is writing the run in {folder}; wait for it or end it (a script may outlive its "
            "launcher), or give another --output_dir"
        ) from None
    except OSError as error:
        logger.warning("%s can't be locked (%s); see to it that no other run writes there", folder, error.strerror)


def _is_resumed(args: ScriptArgs, folder: Path) -> bool:
    return args.resume is not None and (args.resume == LATEST or Path(args.resume).resolve().parent == folder.resolve())


def _without_passwords(text: str) -> str:
    """``text`` with the user and password of URLs (https://user:password@host) left out."""
    return re.sub(r"//[^/\s\"@]+@", "//***@", text)


def _without_keys(argv: Sequence[str]) -> list[str]:
    """The command line with what ``--perspective_api`` was given left out."""
    kept: list[str] = []
    hide = False
    for word in argv:
        flag, equals, _ = word.partition("=")
        is_key = flag.replace("-", "_") == "__perspective_api"
        kept.append("***" if hide else f"{flag}=***" if is_key and equals else word)
        hide = is_key and not equals
    return kept


def run_script(main: Callable[[], None]) -> None:
    """Run a task script; what the user can mend (names, files, rates) ends it in one line instead of a traceback."""
    try:
        main()
    except (BuiltinError, DataFileError, LaunchError, SettingError, FloatingPointError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
