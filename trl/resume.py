"""A run's checkpoints: OUTPUT_DIR/checkpoint-N, each a model folder as others load it and the state to go on from.

    checkpoint-N/                plain `transformers` files with value head and tokenizer; value_model/
    checkpoint-N/state/          see `trl.trainer.state`
    checkpoint-N/trainer.json    the step, the settings, how long the run's files were, how long the checkpoint's are

What was logged after a checkpoint is cut off by the run that goes on from it, which logs it again. Critiques that were
paid for are kept, in ``critiques.lost.jsonl``, so that a budget counts them.
"""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trl.critic.log import FILE as CRITIQUES_FILE
from trl.jsonl import DataFileError, cut_torn_line, read_jsonl
from trl.report.runlog import METRICS_FILE, SAMPLES_FILE
from trl.run import RunArgs
from trl.trainer import PPOTrainer
from trl.trainer.checkpoint_folders import (
    checkpoints,
    find_checkpoint,
    make_working_folder,
    put_in_place,
    read_marker,
    remove_oldest,
    step_of,
    sync,
    working_path,
    write_marker,
    writing,
)
from trl.trainer.state import check_can_save, check_same, snapshot, write_model, write_state
from trl.trainer.supervised_config import LATEST

logger = logging.getLogger(__name__)

LOGS = (METRICS_FILE, SAMPLES_FILE, CRITIQUES_FILE)
LOST_FILE = "critiques.lost.jsonl"
MAY_CHANGE = {
    # how far the run goes, where it is kept, how it is watched
    *("preset", "steps", "epochs", "output_dir", "overwrite", "dry_run", "save_freq", "keep_checkpoints", "resume"),
    *("eval_every", "eval_prompts", "merge", "exp_name", "log_with", "tracker_project_name"),
    *("tracker_kwargs", "project_kwargs", "accelerator_kwargs"),
    # where and how fast something is asked that answers the same; keys are among these, and in no checkpoint
    *("critic_base_url", "critic_timeout", "critic_deadline", "critic_concurrency", "critic_cache", "critic_rpm"),
    *("critic_tpm", "critic_budget_requests", "critic_budget_usd", "critic_prices", "critic_fuse_seconds"),
    *("perspective_api", "perspective_qps", "toxicity_endpoint", "toxicity_cache"),
    *("judge_base_url", "judge_cache", "reward_timeout", "allow_http", "reward_model_device"),
}
"""Flags that may be other ones when a run is resumed."""


class Checkpoints:
    """Saves a run of ``trainer`` in ``folder`` and takes it up. Every process calls every method."""

    def __init__(self, args: RunArgs, trainer: PPOTrainer, folder: Path):
        self._args, self._trainer, self._folder = args, trainer, folder
        self._is_main = trainer.accelerator.is_main_process
        if args.save_freq or args.resume:
            check_can_save(trainer)
        self.note()

    def take_up(self) -> None:
        """With ``--resume``, go on from a checkpoint, and cut the run's files back to it.

        Without any, the run starts from the beginning. Raises ``DataFileError`` where the checkpoint is of a run with
        other settings, or further than this one is to go.
        """
        if self._args.resume is None:
            return
        checkpoint = find_checkpoint(self._folder, self._args.resume, LATEST)
        sizes: Mapping[str, int] = {}
        if checkpoint is None:
            self._check_unfinished()
            logger.warning("%s holds no checkpoint: starting from the beginning", self._folder)
        else:
            sizes = self._load(checkpoint)
        self._trainer.accelerator.wait_for_everyone()  # others may still be reading what is cut now
        if self._is_main and (checkpoint is None or checkpoint.resolve().parent == self._folder.resolve()):
            self._cut_logs(sizes)
        self._trainer.accelerator.wait_for_everyone()
        self.note()

    def _load(self, checkpoint: Path) -> Mapping[str, int]:
        marker = read_marker(checkpoint)
        if marker is None or "settings" not in marker:
            raise DataFileError(f"{checkpoint} is no whole checkpoint of a PPO run")
        check_same(marker["settings"], _settings(self._args), checkpoint, "--")
        newer = [path for path in checkpoints(self._folder) if step_of(path) > marker["step"]]
        if newer:
            raise DataFileError(
                f"{self._folder} holds a later checkpoint than {checkpoint.name}, {newer[-1].name}, which would not "
                "belong to the run any more; move it away, or give another --output_dir"
            )
        self._trainer.load_state(checkpoint / "state")
        logger.info("resumed from %s", checkpoint)
        return dict(marker["logs"])

    def _check_unfinished(self) -> None:
        if (self._folder / "value_head.safetensors").exists():
            raise DataFileError(
                f"{self._folder} holds a finished run and no checkpoint to go on from (--save_freq saves them); give "
                "another --output_dir, or --overwrite instead of --resume"
            )

    def _cut_logs(self, sizes: Mapping[str, int]) -> None:
        for name in LOGS:
            path, size = self._folder / name, sizes.get(name, 0)
            if not path.exists() or path.stat().st_size == size:
                continue
            if path.stat().st_size < size:
                logger.warning("%s is shorter than it was at the checkpoint: rows are missing", path)
                continue
            if name == CRITIQUES_FILE:
                _keep_paid(path, size)
            os.truncate(path, size)

    def note(self) -> None:
        """Remember this moment, the end of a step, in which no process writes to the run's files."""
        self._moment, self._updates = snapshot(self._trainer), self._trainer.updater.steps_taken
        paths = (self._folder / name for name in LOGS)
        self._sizes = {path.name: path.stat().st_size for path in paths if path.exists()}

    @property
    def step(self) -> int:
        """The step at whose end `note` was called, 0 before the first."""
        return int(self._moment["step"])

    @property
    def is_between_steps(self) -> bool:
        """Whether the weights are still those of the last `note`, so that it can be saved."""
        return self._updates == self._trainer.updater.steps_taken

    def save(self) -> Path:
        """Write checkpoint-N as of the last `note`, and remove those that are too many. OSError on a full disk."""
        check_can_save(self._trainer)
        accelerator = self._trainer.accelerator
        target = self._folder / f"checkpoint-{self.step}"
        working = working_path(target)
        if self._is_main:
            (make_working_folder(target) / "state").mkdir()
        accelerator.wait_for_everyone()
        with writing(working):
            write_model(self._trainer, working)
            write_state(self._trainer, working / "state", self._moment)
        accelerator.wait_for_everyone()
        if self._is_main:
            with writing(working):
                for name in self._sizes:
                    sync(self._folder / name)
                marker = {"step": self.step, "settings": _settings(self._args), "logs": self._sizes}
                write_marker(working, marker)
                put_in_place(working, target)
            remove_oldest(self._folder, self._args.keep_checkpoints)
        accelerator.wait_for_everyone()
        return target


def _settings(args: RunArgs) -> dict[str, Any]:
    """The flags that a resumed run must repeat, as JSON has them."""
    flags = asdict(args)
    flags |= flags.pop("ppo_config")
    kept: dict[str, Any] = json.loads(json.dumps({k: v for k, v in flags.items() if k not in MAY_CHANGE}))
    return kept


# ------------------------------------------------------------------ what the critic cost


def budget_left(args: RunArgs) -> dict[str, Any]:
    """With ``--resume``, the limits of `RunArgs.critic_endpoint` that a budget sets, less what the run has spent.

    Every critique that is on file counts, also of steps that were lost and are made again.
    """
    if args.resume is None:
        return {}
    folder = Path(args.output_dir if args.resume == LATEST else Path(args.resume).parent)
    requests, usd = 0, 0.0
    for path in (folder / CRITIQUES_FILE, folder / LOST_FILE):
        for row in read_jsonl(path) if path.exists() else []:
            call = row.get("call") or {}
            requests, usd = requests + call.get("requests", 0), usd + (call.get("usd") or 0.0)
    left: dict[str, Any] = {}
    if args.critic_budget_requests is not None:
        left["budget_requests"] = max(0, args.critic_budget_requests - requests)
    if args.critic_budget_usd is not None:
        left["budget_usd"] = max(0.0, args.critic_budget_usd - usd)
    if left:
        logger.info("the critic has taken %d requests and %.4g dollars so far", requests, usd)
    return left


def _keep_paid(path: Path, size: int) -> None:
    """Append what was paid for, of the rows of critiques.jsonl after ``size`` bytes, to the file of lost ones."""
    lost = path.with_name(LOST_FILE)
    cut_torn_line(lost)
    lines = path.read_bytes()[size:].split(b"\n")[:-1]
    paid = [line + b"\n" for line in lines if (json.loads(line)["call"] or {}).get("requests")]
    if paid:
        with lost.open("ab") as file:
            file.writelines(paid)
        sync(lost)
