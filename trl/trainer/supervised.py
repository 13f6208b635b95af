"""The loop of supervised training: batches, accumulation, schedule, evaluation, checkpoints that resume exactly.

A trainer of this kind says what one row's loss is; everything else is here. See `SupervisedTrainer`.
"""

import hashlib
import logging
import math
import sys
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel, get_scheduler

from trl.core import set_seed
from trl.jsonl import DataFileError, dump_line, read_jsonl
from trl.report.runlog import METRICS_FILE, RunLog
from trl.trainer import zero
from trl.trainer.accelerator import make_accelerator
from trl.trainer.checkpoint_folders import (
    find_checkpoint,
    make_working_folder,
    move_files_into,
    put_in_place,
    read_marker,
    remove_oldest,
    working_path,
    write_marker,
    writing,
)
from trl.trainer.gradients import Gradients
from trl.trainer.statistics import flat
from trl.trainer.stop_signal import StopRequest
from trl.trainer.supervised_config import LATEST, SupervisedConfig

logger = logging.getLogger(__name__)

R = TypeVar("R")
"""A prepared (tokenized) training row."""


class SupervisedTrainer(ABC, Generic[R]):
    """Trains a model on rows with AdamW; a subclass gives `units`, `loss`, `save_model` and `evaluate`.

    Args:
        config: see `SupervisedConfig`.
        model: the module to train, on the CPU or its device; frozen parameters stay frozen.
        rows: prepared training rows, all of them in every process.
        groups: lists of row numbers that must share a batch; default: every row by itself. A batch has at most
            ``batch_size`` rows per process, unless one group has more.

    A step's loss is the sum over its rows, all passes and processes together, divided by the sum of their `units`:
    it doesn't depend on how the rows are divided over passes or processes. After `train`, the model is in
    ``config.output_dir``, and ``accelerator``, ``model`` (prepared) and ``unwrapped`` are there to use.
    """

    def __init__(
        self,
        config: SupervisedConfig,
        model: nn.Module,
        rows: Sequence[R],
        groups: Sequence[Sequence[int]] | None = None,
    ):
        if not rows:
            raise ValueError("the data set is empty: there is nothing to train on")
        self.config, self.rows, self.unwrapped = config, rows, model
        self.folder = Path(config.output_dir)
        precision = {"mixed_precision": "bf16"} if config.bf16 else None
        self.accelerator = make_accelerator(config.log_with, precision, {"logging_dir": config.output_dir})
        set_seed(config.seed + self.accelerator.process_index)
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trainable, lr=config.learning_rate, weight_decay=config.weight_decay, fused=True)
        self.whole_models = zero.WholeModels(self.accelerator, [model])
        zero.configure(self.accelerator, config.batch_size // config.gradient_accumulation_steps, config.max_grad_norm)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.gradients = Gradients([(self.model, self.optimizer)], self.accelerator)
        size = config.batch_size * self.accelerator.num_processes
        epochs = (pack(groups or [[i] for i in range(len(rows))], size, config.seed + e) for e in range(config.epochs))
        self.batches = [(epoch, batch) for epoch, batches in enumerate(epochs) for batch in batches][: config.steps]
        """Epoch and row numbers of every step's global batch."""
        self._schedule = schedule_of(config, len(self.batches))
        self.done = 0

    # ------------------------------------------------------------------ what a subclass gives

    @abstractmethod
    def units(self, row: R) -> int:
        """How many terms the row's loss sums (1 pair, or n target tokens); at least 1."""

    @abstractmethod
    def loss(self, model: nn.Module, rows: Sequence[R]) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum of the loss over ``rows`` (), and sums over their units of what is to be logged, each ().

        ``model`` is the prepared model: call it, so that gradients are synchronised.
        """

    @abstractmethod
    def save_model(self, folder: Path, state_dict: dict[str, Tensor]) -> None:
        """Write the model with these weights (of ``unwrapped``) and its tokenizer; called in the main process."""

    def evaluate(self) -> dict[str, float]:
        """Measures on held-out rows, the same in every process; called in all of them, in eval mode, without grad."""
        return {}

    # ------------------------------------------------------------------ the loop

    def train(self) -> dict[str, float]:
        """Run (or resume) all steps and save the model; returns the last step's metrics and the last evaluation.

        Raises ``FloatingPointError`` where the loss is not finite, before the weights are touched, and
        ``DataFileError`` where a checkpoint belongs to other data or settings. SIGTERM or Ctrl-C end the run after the
        step in progress, with a checkpoint and ``SystemExit``.
        """
        metrics: dict[str, float] = {}
        self._start()
        total = len(self.batches)
        with (
            RunLog(self.folder) if self.accelerator.is_main_process else nullcontext() as log,
            self._progress_bar() as bar,
            StopRequest() as stop,
        ):
            if self.done == 0:
                metrics |= self._evaluate(log)
            elif self.done == total:  # nothing is left to do; these measures were logged before its last checkpoint
                metrics |= self._evaluate(None)
            for epoch, batch in self.batches[self.done :]:
                metrics |= self._step(epoch, batch)
                self.done += 1
                self._log(log, {k: v for k, v in metrics.items() if not k.startswith("eval/")})
                bar.update()
                bar.set_postfix(loss=f"{metrics['loss']:.4f}", refresh=False)
                if self.done == total or (self.config.eval_every and self.done % self.config.eval_every == 0):
                    metrics |= self._evaluate(log)
                stopping = self._anywhere(stop.received is not None)
                is_due = self.config.save_steps and (self.done == total or self.done % self.config.save_steps == 0)
                if is_due or stopping:
                    self._save_checkpoint()
                if stopping and self.done < total:
                    raise SystemExit(f"stopped after step {self.done} of {total}; --resume goes on from there")
        self.save_pretrained()
        if self.config.log_with:
            self.accelerator.end_training()
        return metrics

    def _step(self, epoch: int, batch: list[int]) -> dict[str, float]:
        """One optimizer step on a global batch; returns metrics per unit."""
        started = time.perf_counter()
        self.model.train()
        rate = self.config.learning_rate * self._schedule(self.done)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        units = sum(self.units(self.rows[i]) for i in batch)
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
        passes = list(self._passes(batch))
        for number, (mine, weight) in enumerate(passes):
            with self.gradients.accumulating(last=number == len(passes) - 1):
                loss, logged = self.loss(self.model, [self.rows[i] for i in mine])
                self.gradients.backward(loss * (weight / units))
            for name, value in {"loss": loss, **logged}.items():
                sums[name] += value.detach().double().cpu() * weight
        metrics = {name: value / units for name, value in self._summed(sums).items()}
        # without a limit, the norm is only measured
        self._check(metrics, self.gradients.clip(self.config.max_grad_norm or math.inf))
        self._check(metrics, self.gradients.apply())
        return {
            **metrics,
            "learning_rate": rate,
            "epoch": epoch + 1,
            "units": float(units),
            "time/step": time.perf_counter() - started,
        }

    def _check(self, metrics: dict[str, float], norms: list[float]) -> None:
        """Log the gradient's norm where it is known; an error where it or the loss is not finite."""
        if norms:
            metrics["grad_norm"] = norms[0]
        for name in ("loss", "grad_norm"):
            if not math.isfinite(metrics.get(name, 0.0)):
                raise FloatingPointError(
                    f"{name} of step {self.done + 1} is {metrics[name]}; nothing was updated. Lower the learning rate "
                    "or resume from the last checkpoint"
                )

    def _passes(self, batch: list[int]) -> Iterator[tuple[list[int], float]]:
        """This process's rows of a global batch, per forward-backward pass, and their weight.

        Every process makes as many passes as the others, since some ways to train talk in each of them; one that has
        no row left repeats one with weight 0.
        """
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        size = self.config.batch_size // self.config.gradient_accumulation_steps
        mine = batch[rank::world]
        for start in range(0, -(-len(batch) // world), size):
            piece = mine[start : start + size]
            yield (piece, 1.0) if piece else (batch[:1], 0.0)

    def _evaluate(self, log: RunLog | None) -> dict[str, float]:
        self.model.eval()
        with torch.no_grad():
            measures = {f"eval/{name}": value for name, value in self.evaluate().items()}
        if measures:
            self._log(log, measures)
        return measures

    def _log(self, log: RunLog | None, metrics: dict[str, float]) -> None:
        if log is not None:
            log.log_metrics(self.done, metrics)
        if self.config.log_with:
            self.accelerator.log(metrics, step=self.done)

    def _anywhere(self, is_true: bool) -> bool:
        """Whether something is so in any process."""
        return self._summed({"count": torch.tensor(float(is_true), dtype=torch.float64)})["count"] > 0

    def _summed(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Sums over all processes."""
        names = sorted(sums)
        values = torch.stack([sums[name] for name in names])
        if self.accelerator.num_processes > 1:
            values = self.accelerator.reduce(values.to(self.accelerator.device)).cpu()
        return dict(zip(names, values.tolist(), strict=True))

    # ------------------------------------------------------------------ files

    def save_pretrained(self, folder: str | Path | None = None) -> None:
        """Save model and tokenizer to ``folder`` (default: output_dir), whose files are replaced as they are whole."""
        target = Path(folder or self.folder)
        state = zero.whole_state(self.accelerator, self.model)
        if self.accelerator.is_main_process:
            target.mkdir(parents=True, exist_ok=True)
            working = make_working_folder(target / "model")
            with writing(working):
                self.save_model(working, state)
                move_files_into(working, target)
        self.accelerator.wait_for_everyone()

    @cached_property
    def _data_digest(self) -> str:
        """Of all prepared rows, in order."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(repr(row).encode(errors="backslashreplace"))
        return digest.hexdigest()[:16]

    @property
    def _identity(self) -> dict[str, Any]:
        """What a run must have in common with a checkpoint, for the continued run to be the same run."""
        names = ("seed", "batch_size", "learning_rate", "lr_scheduler", "warmup_ratio", "weight_decay")
        return {
            "rows": len(self.rows),
            "data": self._data_digest,
            "processes": self.accelerator.num_processes,
            **{name: getattr(self.config, name) for name in names},
        }

    def _save_checkpoint(self) -> None:
        """A folder with the model, as `save_pretrained` writes it, and the state to resume from in ``state/``."""
        target = self.folder / f"checkpoint-{self.done}"
        working = working_path(target)
        if self.accelerator.is_main_process:
            make_working_folder(target)
        self.accelerator.wait_for_everyone()
        with writing(working):
            self.accelerator.save_state(str(working / "state"))
        state = zero.whole_state(self.accelerator, self.model)
        if self.accelerator.is_main_process:
            with writing(working):
                self.save_model(working, state)
        self.accelerator.wait_for_everyone()
        if self.accelerator.is_main_process:
            with writing(working):
                marker = {"step": self.done, "total_steps": len(self.batches), "identity": self._identity}
                write_marker(working, marker)
                put_in_place(working, target)
            remove_oldest(self.folder, self.config.keep_checkpoints)
        self.accelerator.wait_for_everyone()

    def _start(self) -> None:
        """Take up a checkpoint if one is asked for, and cut the metrics file back to it."""
        if self.config.log_with:
            self.accelerator.init_trackers("trl", config=flat(asdict(self.config)))
        if self.config.resume is None:
            return
        checkpoint = find_checkpoint(self.folder, self.config.resume, LATEST)
        if checkpoint is None:
            logger.warning("%s holds no checkpoint: starting from the beginning", self.folder)
        else:
            self._load_checkpoint(checkpoint)
        if self.accelerator.is_main_process:
            _cut_metrics(self.folder / METRICS_FILE, -1 if checkpoint is None else self.done)
        self.accelerator.wait_for_everyone()

    def _load_checkpoint(self, checkpoint: Path) -> None:
        marker = read_marker(checkpoint)
        if marker is None:
            raise DataFileError(f"{checkpoint} is not whole any more")
        found = marker["identity"]
        changed = [f"{k}: {found.get(k)!r} → {v!r}" for k, v in self._identity.items() if found.get(k) != v]
        if changed:
            raise DataFileError(
                f"{checkpoint} belongs to a run with other settings ({', '.join(changed)}); repeat the old settings, "
                "or start a new run in another output_dir"
            )
        if marker["total_steps"] != len(self.batches):
            logger.warning(
                "the run now has %d steps instead of %d, and the learning rate follows the new length",
                len(self.batches),
                marker["total_steps"],
            )
        with zero.tensors_only() if zero.stage_of(self.accelerator) else nullcontext():
            self.accelerator.load_state(str(checkpoint / "state"))
        self.done = min(marker["step"], len(self.batches))
        logger.info("resumed from %s", checkpoint)

    def _progress_bar(self) -> tqdm:
        return tqdm(
            total=len(self.batches),
            initial=self.done,
            unit="step",
            disable=not self.accelerator.is_main_process,
            mininterval=0.1 if sys.stderr.isatty() else 10,
        )


def enable_gradient_checkpointing(transformer: PreTrainedModel) -> None:
    """Recompute a transformer's activations in the backward pass; works with frozen lower blocks and under DDP."""
    transformer.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})


def schedule_of(config: SupervisedConfig, total_steps: int) -> Callable[[int], float]:
    """The learning rate's factor as a function of the steps done, so that there is no state to save."""
    warmup = round(config.warmup_ratio * total_steps)
    name = "constant_with_warmup" if config.lr_scheduler == "constant" else config.lr_scheduler
    unused = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)  # only the schedule's formula is wanted
    formula = get_scheduler(name, unused, warmup, total_steps).lr_lambdas[0]
    # the formula starts a warm-up at 0, which would waste the first step
    return lambda done: float(formula(done + 1 if done < warmup else done))


def pack(groups: Sequence[Sequence[int]], size: int, seed: int) -> list[list[int]]:
    """Batches of about ``size`` rows: groups in a random order, each whole in one batch.

    A batch ends where the next group no longer fits; a group of more than ``size`` rows makes a batch of its own.
    """
    order = torch.randperm(len(groups), generator=torch.Generator().manual_seed(seed)).tolist()
    batches: list[list[int]] = []
    for number in order:
        group = list(groups[number])
        if batches and len(batches[-1]) + len(group) <= size:
            batches[-1] += group
        else:
            batches.append(group)
    return batches


def _cut_metrics(path: Path, step: int) -> None:
    """Drop the rows after ``step``, which are made again."""
    if not path.exists():
        return
    kept = [row for row in read_jsonl(path) if cast(int, row["step"]) <= step]
    working = path.with_suffix(".partial")
    working.write_text("".join(dump_line(row) + "\n" for row in kept), encoding="utf-8")
    working.replace(path)
