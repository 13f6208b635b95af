"""The PPO epochs over one rollout: mini-batches, accumulation, early stopping, dropped optimizer steps."""

import logging
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from trl.core import ppo_loss
from trl.cpu_memory import release_freed_memory
from trl.trainer.collectives import most_of_all
from trl.trainer.config import PPOConfig
from trl.trainer.gradients import Gradients
from trl.trainer.pretraining import PretrainingMix
from trl.trainer.rollout import GraphPass, Sequences

logger = logging.getLogger(__name__)


@dataclass
class Targets:
    """What the update aims at; all (B, N). ``mask`` marks the tokens that are trained on."""

    mask: Tensor
    logprobs: Tensor
    values: Tensor
    advantages: Tensor
    returns: Tensor


class Updater:
    """Runs `PPOConfig.ppo_epochs` over a rollout.

    ``networks`` are the prepared models with their optimizers: the policy, and the value model if there is one.
    They share every decision: a dropped or stopped step leaves both as they were.
    """

    def __init__(
        self,
        networks: Sequence[tuple[nn.Module, Optimizer]],
        accelerator: Accelerator,
        config: PPOConfig,
        pretraining: PretrainingMix | None = None,
    ):
        self.networks, self.accelerator, self.config, self.pretraining = networks, accelerator, config, pretraining
        self.model = networks[0][0]
        self.value_model = networks[1][0] if len(networks) > 1 else None
        # under DeepSpeed a pass is a collective where weights are partitioned: the same number on every process
        self._may_group = accelerator.distributed_type != DistributedType.DEEPSPEED
        self.gradients = Gradients(networks, accelerator)
        self.steps_taken = 0
        """Optimizer steps of all calls of `run`."""
        self._drops_out = any(isinstance(module, nn.Dropout) and module.p > 0 for module in self.model.modules())

    def whole_batch(self) -> list[nn.Module]:
        """The networks, in train mode, if one optimizer step is one pass over the whole batch; else none.

        Dropout would make the rollout's numbers those of a thinned network.
        """
        if self.config.mini_batch_size != self.config.batch_size or self._drops_out or not self._may_group:
            return []
        self.set_train_mode()
        return [model for model, _ in self.networks]

    def set_train_mode(self) -> None:
        """Gradient checkpointing and LoRA dropout act in train mode only; other dropout is off."""
        for model, _ in self.networks:
            model.train()

    def run(
        self, sequences: Sequences, targets: Targets, trunk: list[Tensor] | None, first_pass: GraphPass | None = None
    ) -> dict[str, float]:
        """Update the policy; returns token-weighted means of `ppo_loss`'s statistics and the counts.

        ``first_pass``, the rollout's own, stands for the first epoch's.

        A mini-batch whose mean ratio is above the threshold, or whose ratio or loss is not finite, drops its whole
        optimizer step, on every process: gradients are discarded, and neither parameters nor moments are touched.
        """
        self.set_train_mode()
        totals: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
        tokens, skipped, steps, stopped = 0.0, 0, 0, False
        self.gradients.drop()  # what the caller left there is no part of this update
        for epoch in range(self.config.ppo_epochs):
            for number, slices in enumerate(self._optimizer_steps(len(sequences))):
                count = sum(float(targets.mask[rows].sum()) for rows in slices)
                num_tokens = float(self._sum(torch.tensor([count]))[0])
                if num_tokens == 0:
                    continue
                outcome, stats = self._accumulate(
                    sequences, targets, trunk, slices, num_tokens, first_pass, first=epoch == number == 0
                )
                first_pass = None
                if outcome == "stop":
                    stopped = True
                    break
                if outcome == "skip":
                    skipped += 1
                    continue
                if self.config.max_grad_norm is not None:
                    self.gradients.clip(self.config.max_grad_norm)
                self.steps_taken += 1  # before: one that breaks off counts
                self.gradients.apply()
                if self.accelerator.device.type == "cpu":
                    release_freed_memory()
                steps += 1
                tokens += num_tokens
                for name, value in stats.items():
                    totals[name] += value * num_tokens
            if stopped:
                break
        names = sorted(totals)
        summed = self._sum(torch.stack([totals[n] for n in names])).tolist() if names else []
        means = {f"ppo/{n}": total / tokens for n, total in zip(names, summed, strict=True)}
        return {
            **means,
            "ppo/skipped_minibatches": float(skipped),
            "ppo/optimizer_steps": float(steps),
            "ppo/early_stopped": float(stopped),
        }

    def _optimizer_steps(self, batch_size: int) -> Iterator[list[list[int]]]:
        """Shuffled rows of one epoch: per optimizer step, one list of rows per mini-batch.

        Every process makes as many passes as the one with the most samples; missing slices are empty.
        """
        mini, accumulation = self.config.mini_batch_size, self.config.gradient_accumulation_steps
        order = torch.randperm(batch_size).tolist()
        local = -(-batch_size // (mini * accumulation))
        for step in range(most_of_all(self.accelerator, local)):
            start = step * mini * accumulation
            yield [order[start + k * mini : start + (k + 1) * mini] for k in range(accumulation)]

    def _accumulate(
        self,
        sequences: Sequences,
        targets: Targets,
        trunk: list[Tensor] | None,
        slices: list[list[int]],
        num_tokens: float,
        first_pass: GraphPass | None,
        first: bool,
    ) -> tuple[str, dict[str, Tensor]]:
        """Gradients of one optimizer step: ``("ok", stats)``, or ``("skip" | "stop", {})`` with none left."""
        total: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
        is_decided = not self.gradients.can_be_dropped and (len(slices) > 1 or self.pretraining is not None)
        if is_decided:
            verdict = self._foresee(sequences, targets, trunk, slices, num_tokens, first)
            if verdict != "ok":
                return verdict, {}
        if self.pretraining is not None:
            with self.gradients.accumulating(last=False):  # its gradients travel with those of the last slice
                loss = self.pretraining.loss(self.model) / self.accelerator.num_processes
                self.gradients.backward(self.pretraining.coef * loss)
            total["loss/pretraining"] += loss.detach().double().cpu()
        for k, rows in enumerate(slices):
            with self.gradients.accumulating(last=k == len(slices) - 1):
                loss, stats, count = self._loss(sequences, targets, trunk, rows, num_tokens, first_pass)
                if not is_decided:
                    verdict = self._judge(stats, count, num_tokens, check_first=first and k == 0)
                    if verdict != "ok":
                        self.gradients.drop()
                        return verdict, {}
                self.gradients.backward(loss)
            for name, value in stats.items():
                total[name] += value.double().cpu()
        return "ok", total

    @torch.no_grad()
    def _foresee(
        self,
        sequences: Sequences,
        targets: Targets,
        trunk: list[Tensor] | None,
        slices: list[list[int]],
        num_tokens: float,
        first: bool,
    ) -> str:
        """The fate of an optimizer step, by passes without gradients, where gradients could not be taken back."""
        for k, rows in enumerate(slices):
            _, stats, count = self._loss(sequences, targets, trunk, rows, num_tokens, None)
            verdict = self._judge(stats, count, num_tokens, check_first=first and k == 0)
            if verdict != "ok":
                return verdict
        return "ok"

    def _loss(
        self,
        sequences: Sequences,
        targets: Targets,
        trunk: list[Tensor] | None,
        rows: list[int],
        num_tokens: float,
        first_pass: GraphPass | None,
    ) -> tuple[Tensor, dict[str, Tensor], float]:
        """Loss of one mini-batch as its share of the optimizer step, statistics likewise, its token count."""
        chosen = targets.mask if rows else torch.zeros_like(targets.mask)
        # with nothing left here, other processes still expect this one to take part
        done = first_pass or self._forward(sequences, chosen, trunk, rows or [0])
        rows = done.rows
        mask = chosen[rows]
        if first_pass is None:
            logprobs, values = done.logprobs, done.values
        else:  # of all tokens that exist
            trained = mask[sequences.exists[rows]]
            logprobs, values = done.logprobs[trained], done.values[trained]
        loss, stats = ppo_loss(
            logprobs,
            targets.logprobs[rows][mask],
            values,
            targets.values[rows][mask],
            targets.advantages[rows][mask],
            targets.returns[rows][mask],
            torch.ones_like(logprobs),
            cliprange=self.config.cliprange,
            cliprange_value=self.config.cliprange_value,
            # a separate network shares no gradient that its loss would have to be weighed against
            vf_coef=self.config.vf_coef if self.value_model is None else 1.0,
            num_tokens=num_tokens,
        )
        return loss, stats, float(mask.sum())

    def _forward(self, sequences: Sequences, trained: Tensor, trunk: list[Tensor] | None, rows: list[int]) -> GraphPass:
        """The policy's pass over these rows, for the tokens that ``trained`` (B, N) marks."""
        groups = sequences.groups(rows) if self._may_group else [rows]
        return GraphPass.joined([self._pass(sequences, trained, trunk, group) for group in groups])

    def _pass(self, sequences: Sequences, trained: Tensor, trunk: list[Tensor] | None, rows: list[int]) -> GraphPass:
        ids, positions, labels = sequences.layout(rows, trained[rows])
        if trunk is None:
            inputs = {"input_ids": ids}
        else:
            inputs = {"trunk_states": pad_sequence([trunk[i] for i in rows], batch_first=True)}
        logprobs, _, values = self.model(positions=positions, next_ids=labels, **inputs)
        if self.value_model is not None:
            values = self.value_model(ids, positions=positions)
        return GraphPass(rows, logprobs, values)

    def _judge(self, stats: dict[str, Tensor], count: float, num_tokens: float, check_first: bool) -> str:
        """The fate of a mini-batch, "ok", "skip" or "stop", from means over all processes: the same on each."""
        local = [
            float(stats["policy/ratio"]) * num_tokens,
            float(stats["policy/policykl"]) * num_tokens,
            float(stats["loss/total"]),
            count,
        ]
        ratio, policy_kl, loss, tokens = self._sum(torch.tensor(local)).tolist()
        if tokens == 0:
            return "ok"
        ratio, policy_kl = ratio / tokens, policy_kl / tokens
        if check_first and not self._drops_out:
            tolerance = 1e-2 if self.accelerator.mixed_precision == "no" else 0.1
            if abs(ratio - 1) > tolerance:
                logger.warning(
                    "the first mini-batch's mean ratio is %.4f, not 1: the update pass differs from the rollout "
                    "pass (weights changed in between?)",
                    ratio,
                )
        if not ratio <= self.config.ratio_threshold:  # also true for NaN
            logger.warning("mean ratio %.3g: this optimizer step is dropped", ratio)
            return "skip"
        if not math.isfinite(loss):  # its gradients would ruin parameters or the optimizer's moments for good
            logger.warning("the loss is %s: this optimizer step is dropped; are the scores of a sane size?", loss)
            return "skip"
        if self.config.early_stopping and policy_kl > 1.5 * self.config.target_kl:
            return "stop"
        return "ok"

    def _sum(self, values: Tensor) -> Tensor:
        return self.accelerator.reduce(values.double().to(self.accelerator.device), reduction="sum")
