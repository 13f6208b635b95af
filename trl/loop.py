"""The training loop's surroundings, the same in every task script: critic, merged rewards, records, progress."""

import importlib.util
import itertools
import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from peft import PeftModel
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from torch import Tensor
from transformers import BitsAndBytesConfig

from trl.clients import EndpointAuthError
from trl.core import merge_rewards
from trl.critic.align import span_rewards
from trl.critic.choose import make_critic
from trl.critic.intrinsic import IntrinsicReward, PendingIntrinsic
from trl.critic.random_spans import RandomSpanCritic
from trl.critic.self_critique import SelfCritic
from trl.critic.types import Critic, Style
from trl.evaluation import HeldOut
from trl.failures import FailureWindow, GoneError
from trl.generation import added_text
from trl.jsonl import DataFileError
from trl.models import AutoModelForCausalLMWithValueHead
from trl.report.runlog import RunLog
from trl.resume import Checkpoints, budget_left
from trl.rewards import ModerationReward, PerspectiveClient, PerspectiveReward, ToxicityReward
from trl.run import RunArgs, ToxicityArgs
from trl.sample_rows import sample_rows
from trl.trainer import PPOTrainer
from trl.trainer.collectives import sums_of_all, values_of_all
from trl.trainer.stop_signal import StopRequest
from trl.trainer.zero import check_can_ask_own_weights, num_weights

logger = logging.getLogger(__name__)

Reward = Callable[..., Sequence[float | None]]
"""An environment reward: keyword lists in, one number per sample out, None for "no verdict"."""

SAMPLES_KEPT = 16
"""Responses per step that samples.jsonl shows token by token."""


def critic_of(
    args: RunArgs,
    style: Style,
    lm: Any,
    tokenizer: Any,
    half_precision: bool,
    reward: Reward | None = None,
    policy: PeftModel | None = None,
) -> Critic:
    """The critic that the flags describe; exits with one line where its prompt, limits, key or model are wrong.

    ``lm`` and ``tokenizer`` serve the critics in this process that have no model of their own, ``reward``, the
    environment's, the attribution critic. ``policy`` is the PEFT model that ``lm`` is the base of, if it is.
    """
    is_control = args.critic_kind == "random"
    try:
        critic = make_critic(
            args.quoting_critic,
            style,
            prompt_file=args.prompt_file,
            model=args.critic_model,
            base_url=args.critic_base_url,
            lm=lm,
            tokenizer=tokenizer,
            half_precision=half_precision,
            endpoint=args.critic_endpoint | budget_left(args),
            reward=reward,
            recording=args.critic_replay,
        )
    except (EndpointAuthError, ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None
    if policy is not None:
        critic = SelfCritic(policy, critic)
    return RandomSpanCritic(critic, args.ppo_config.seed) if is_control else critic


def make_intrinsic(
    args: RunArgs,
    style: Style,
    trainer: PPOTrainer,
    lm: Any,
    reward: Reward,
    score_bounds: tuple[float, float] | None = None,
) -> IntrinsicReward | None:
    """The critic's token rewards as the flags describe them; None without ``--use_intrinsic_reward``.

    ``score_bounds``: the scores that a critic of summaries is shown as 0 and 10.

    ``lm`` answers where the critic has no model of its own (``args.asks_own_weights``). A PEFT policy's base model
    answers with the adapters off, and the trainer must not run meanwhile.
    """
    if not args.use_intrinsic_reward:
        return None
    if args.asks_own_weights:
        check_can_ask_own_weights(trainer.accelerator)
    is_self = trainer.policy.is_peft and args.asks_own_weights
    half_precision = trainer.accelerator.mixed_precision == "bf16" and not is_self  # no copy of the shared weights
    policy = trainer.policy.pretrained_model if is_self else None
    return IntrinsicReward(
        critic_of(args, style, lm, trainer.tokenizer, half_precision, reward, policy),
        trainer.tokenizer,
        style,
        threshold=args.intrinsic_reward_threshold,
        positive_value=args.positive_reward_value,
        negative_value=args.negative_reward_value,
        mode=args.reward_mode,
        score_bounds=score_bounds,
        log_path=Path(args.output_dir) / "critiques.jsonl",
        step=lambda: trainer.current_step + 1,
    )


def toxicity_environment(args: ToxicityArgs) -> Reward:
    """The environment of the detoxification scripts; exits with one line where its model, key or limits are wrong."""
    try:
        match args.scorer_kind:
            case "classifier":
                return ToxicityReward(args.environment_name)
            case "moderation":
                return ModerationReward(base_url=args.toxicity_endpoint, cache=args.toxicity_cache)
            case "perspective":
                settings: dict[str, Any] = {"qps": args.perspective_qps, "cache": args.toxicity_cache}
                if args.toxicity_endpoint:
                    settings["endpoint"] = args.toxicity_endpoint
                return PerspectiveReward(PerspectiveClient(args.perspective_api, **settings))
    except (EndpointAuthError, ValueError) as error:
        raise SystemExit(f"error: {error}") from None


def quantization(in_8bit: bool, in_4bit: bool) -> dict[str, Any]:
    """Keyword arguments of ``from_pretrained`` that load a base model in 8 or 4 bits; exits without bitsandbytes."""
    if not in_8bit and not in_4bit:
        return {}
    if in_8bit and in_4bit:
        raise SystemExit("error: --load_in_8bit and --load_in_4bit exclude each other")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise SystemExit("error: 8- and 4-bit loading need bitsandbytes: pip install bitsandbytes")
    return {"quantization_config": BitsAndBytesConfig(load_in_8bit=in_8bit, load_in_4bit=in_4bit)}


def judge(environment: Reward, **columns: Any) -> list[float]:
    """The environment's scores, with NaN for "no verdict", as `PPOTrainer.step` takes them.

    Exits with one line where an endpoint refuses the key.
    """
    try:
        scores = environment(**columns)
    except EndpointAuthError as error:
        raise SystemExit(f"error: {error}") from None
    return [math.nan if score is None else float(score) for score in scores]


def dry_run(
    args: RunArgs,
    model: AutoModelForCausalLMWithValueHead,
    queries: int,
    steps: int,
    environment: Reward,
    intrinsic: IntrinsicReward | None,
    sample: tuple[str, str] = ("The cast", " is wonderful, but the plot is a boring mess."),
) -> None:
    """Print what a run would do and cost, and ask environment and critic once, about ``sample``.

    ``sample``: prompt and response; in the summary tasks a document of the data and a summary of it.
    """
    config = args.ppo_config
    samples = steps * config.batch_size
    trained = num_weights(p for p in model.parameters() if p.requires_grad)
    total = num_weights(model.parameters())
    print(f"policy          {config.model_name}: {trained:,} of {total:,} parameters are trained")
    print(f"queries         {queries:,} from {config.query_dataset}")
    print(f"steps           {steps:,} of up to {config.batch_size} samples per process ({samples:,} samples)")
    prompt, response = sample
    [score] = judge(environment, prompts=[prompt], completions=[response])
    print(f"environment     {args.environment_name} (a test text scores {score:.3f})")
    print(f"run folder      {args.output_dir}")
    if math.isnan(score):
        raise SystemExit("error: the environment gave the test text no score")
    if intrinsic is None:
        print("critic          none (--use_intrinsic_reward adds one)")
        return
    print(f"critic          {args.critic_kind}: at most {samples:,} requests per process")
    if args.critic_replay is not None:  # it knows the texts of its recording, not one to test with
        print(f"recording       {args.critic_replay}")
        return
    [answer] = intrinsic.critic.critique([intrinsic.request(prompt, response, score)])
    spans = ", ".join(f"{span.polarity}: {span.text!r}" for span in answer.spans) or "no spans"
    print(f"test request    {answer.status} ({spans}){' ' + answer.error if answer.error else ''}")
    if answer.status == "failed":
        raise SystemExit("error: the critic did not answer")


class RunRecord:
    """A run as it goes: its batches, metrics.jsonl, samples.jsonl, checkpoints, and progress for people.

    A rich bar on a terminal, one line per step elsewhere; only the main process writes and shows anything.
    ``held_out`` is evaluated before the first step, as often as it says, and after the last step. With ``--resume`` the
    run goes on from a checkpoint. SIGTERM and Ctrl-C end it after the step in progress, with a checkpoint; so does the
    loss of critic or reward for good (`GoneError`), and in a run of one process any failure.
    """

    def __init__(self, args: RunArgs, trainer: PPOTrainer, folder: Path, total: int, held_out: HeldOut | None = None):
        self.args, self.trainer, self.folder, self.total = args, trainer, folder, total
        self.held_out = held_out
        self._checkpoints = Checkpoints(args, trainer, folder)
        self._stop = StopRequest()
        self._started = 0.0
        self._verdicts = FailureWindow()
        self._log: RunLog | None = None
        self._progress: Progress | None = None
        self._task: TaskID | None = None

    @property
    def done(self) -> int:
        """Steps so far, those before a resume counted."""
        return self.trainer.current_step

    def __enter__(self) -> Self:
        self._checkpoints.take_up()
        if self.done > self.total:
            raise DataFileError(f"the checkpoint is of step {self.done} already, and this run ends at {self.total}")
        self._stop.__enter__()
        if self.trainer.accelerator.is_main_process:
            self._log = RunLog(self.folder)
            if sys.stderr.isatty():
                columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
                self._progress = Progress(*columns, console=Console(stderr=True))
                self._progress.start()
                self._task = self._progress.add_task("first step", total=self.total, completed=self.done)
        if self.held_out is not None and self.done == 0:
            before = self.held_out()
            if self._log is not None:
                self._log.log_metrics(0, before)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._log is not None:
            self._log.close()
        self._stop.__exit__(kind, error, trace)
        # several processes save together, and the others would wait for one that failed alone
        alone = self.trainer.accelerator.num_processes == 1
        if isinstance(error, GoneError | EndpointAuthError):
            saved = self._save_what_there_is()
            self.trainer.accelerator.end_training()
            raise SystemExit(f"error: {error}{saved}")
        # of weights that have become NaN there is nothing to keep; the checkpoint before is what --resume is for
        is_worth_saving = isinstance(error, Exception) and not isinstance(error, OSError | FloatingPointError)
        if is_worth_saving and alone:
            logger.error("the run failed in step %d%s", self._checkpoints.step + 1, self._save_what_there_is())

    def _save_what_there_is(self) -> str:
        """Save what a failed run has and say where: a checkpoint, or, where an update broke off, the model."""
        step = self._checkpoints.step
        if self._checkpoints.is_between_steps:
            so_far = ". The model so far is in {}, and --resume goes on from there"
            return so_far.format(self._checkpoints.save()) if step else ""
        saved = self.folder / f"failed-{step + 1}"
        self.trainer.save_pretrained(saved)
        return f". The model, as it was when step {step + 1} failed, is in {saved}"

    def batches(self) -> Iterator[dict[str, Any]]:
        """What is left of the data, ``--epochs`` times over, until ``--steps``."""
        if self.trainer.dataloader is None:
            raise ValueError("the trainer has no data: pass dataset= to PPOTrainer")
        passes = itertools.chain.from_iterable(itertools.repeat(self.trainer.dataloader))
        for batch in itertools.islice(passes, self.total - self.done):
            self._started = time.perf_counter()
            yield batch

    def decode(self, queries: Sequence[Tensor], responses: Sequence[Tensor]) -> list[str]:
        """The responses' texts as they continue their queries, without special tokens."""
        pairs = zip(queries, responses, strict=True)
        return [added_text(self.trainer.tokenizer, query.tolist(), response.tolist()) for query, response in pairs]

    def merged(
        self, scores: Sequence[float] | Callable[[], Sequence[float]], pending: PendingIntrinsic | None
    ) -> Callable[[], list[Tensor] | list[float]]:
        """What `PPOTrainer.step` calls after its passes: the scaled scores, joined by the critic's rewards.

        ``scores`` that are still on their way are given as the callable that waits for them. When the critic or the
        reward is gone for one process, or an endpoint refuses its key, that is raised in all of them.
        """

        def ready() -> list[Tensor] | list[float]:
            gone: GoneError | EndpointAuthError | None = None
            given: Sequence[float] = ()
            token_rewards: list[Tensor] | None = None
            try:
                given = scores() if callable(scores) else scores
                self._check_verdicts(given)
                token_rewards = pending.result() if pending is not None else None
            except (GoneError, EndpointAuthError) as error:
                gone = error
            if self.trainer.global_mean([float(gone is not None)]):
                raise gone or GoneError("the critic or reward of another process is gone; its message says why")
            scaled = self.trainer.score_scaler.numbers(given)
            return scaled if token_rewards is None else merge_rewards(scaled, token_rewards)

        return ready

    def _check_verdicts(self, scores: Sequence[float]) -> None:
        """Raise GoneError where nearly all of the last samples got no score: a run should not train on the rest."""
        for score in scores:
            self._verdicts.record("no score" if math.isnan(score) else None)
        if self._verdicts.mostly_failed:
            raise GoneError(
                f"of the last {len(self._verdicts)} samples {self._verdicts.failed} got no score from "
                f"{self.args.environment_name}; are the responses empty, or does an earlier message say why?"
            )

    def step(
        self,
        stats: dict[str, float],
        batch: dict[str, Any],
        responses: Sequence[Tensor],
        texts: Sequence[str],
        scores: Sequence[float],
        pending: PendingIntrinsic | None,
    ) -> None:
        """Keep and show one finished step; save a checkpoint where ``--save_freq`` or a signal says so."""
        intrinsic = pending.result() if pending else []
        stats = {
            **stats,
            "objective/score": self.trainer.global_mean(scores),
            "objective/intrinsic": self.trainer.global_mean([float(r.sum()) for r in intrinsic] or [0.0]),
            "time/iteration": time.perf_counter() - self._started,
            **(self._critic_stats(pending) if pending else {}),
        }
        if self.held_out is not None and (self.done % self.held_out.every == 0 or self.done == self.total):
            stats |= self.held_out()
        self.trainer.log_stats(stats, batch, scores)
        if self._log is not None:
            pairs = list(zip(batch["input_ids"], responses, strict=True))[:SAMPLES_KEPT]
            tokens = [
                span_rewards([], q, r, self.trainer.tokenizer, positive_value=0, negative_value=0).token_texts
                for q, r in pairs
            ]
            critiques = pending.critiques if pending else []
            rollout = self.trainer.last_rollout
            self._log.log_metrics(self.done, stats)
            self._log.log_samples(
                self.done, sample_rows(batch["query"], texts, scores, tokens, rollout, intrinsic, critiques)
            )
            self._show(stats)
        self._checkpoints.note()
        stopping = self.trainer.global_mean([float(self._stop.received is not None)]) > 0
        is_due = self.args.save_freq and (self.done == self.total or self.done % self.args.save_freq == 0)
        if is_due or stopping:
            self._checkpoints.save()
        if stopping and self.done < self.total:
            self.trainer.accelerator.end_training()
            message = f"stopped after step {self.done} of {self.total}; --resume goes on from there"
            raise SystemExit(message if self.trainer.accelerator.is_main_process else 1)

    def _critic_stats(self, pending: PendingIntrinsic) -> dict[str, float]:
        """``critic/*`` of all processes."""
        add, collect = (partial(function, self.trainer.accelerator) for function in (sums_of_all, values_of_all))
        return pending.tally.over_processes(add, collect, self.trainer.config.batch_size).stats()

    def _show(self, stats: dict[str, float]) -> None:
        text = f"reward {stats['objective/score']:+.2f}  KL {stats['objective/kl']:.2f}"
        if "critic/hit_rate" in stats:
            text += f"  critic hits {stats['critic/hit_rate']:.0%}"
        if "eval/score" in stats:
            text += f"  held-out reward {stats['eval/score']:+.2f}"
        text += f"  {stats['time/iteration']:.1f} s/step"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=self.done, description=text)
        else:
            print(f"step {self.done}/{self.total}  {text}", file=sys.stderr, flush=True)
