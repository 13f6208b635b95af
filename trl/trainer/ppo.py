"""PPO with token-level rewards (Schulman et al. 2017; Ouyang et al. 2022; Ziegler et al. 2019)."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl.core import gae, set_seed
from trl.failures import SettingError
from trl.models import AutoModelForCausalLMWithValueHead, RewardModel, create_reference_model
from trl.models.value_head import switch_dropout_off
from trl.trainer import state, statistics, zero
from trl.trainer.accelerator import make_accelerator
from trl.trainer.batches import ShardedBatches
from trl.trainer.checks import check_batch
from trl.trainer.collectives import most_of_all
from trl.trainer.config import PPOConfig
from trl.trainer.generation import HalfPrecisionCopy, biasing_kwargs, context_length, merged_adapters, sample
from trl.trainer.kl import AdaptiveKLController, FixedKLController
from trl.trainer.pretraining import PretrainingMix
from trl.trainer.rollout import Rollout, RolloutPasses, Sequences, reference_weights
from trl.trainer.scores import Score, ScoreScaler, score_vectors
from trl.trainer.trackers import start_tracker
from trl.trainer.update import Targets, Updater

logger = logging.getLogger(__name__)

Scores = Sequence[Score] | Callable[[], Sequence[Score]]


class PPOTrainer:
    """Proximal policy optimisation of a language model from one score per response or one reward per token.

    The loop is the caller's: ``generate`` responses, score them any way, ``step``, ``log_stats``.

    Args:
        config: see `PPOConfig`.
        model: the policy with its value head.
        ref_model: frozen reference of the KL penalty. None: made here (a copy; sharing ``num_shared_layers``
            blocks if given), or, for a PEFT policy, the policy with its adapters disabled.
        tokenizer: gives pad and end-of-sequence ids for generation, and is saved with the model.
        dataset, data_collator: optional; give ``trainer.dataloader``: shuffled batches of this process's shard.
        optimizer, lr_scheduler: default Adam over the trainable parameters, constant rate. The scheduler steps
            once per PPO step.
        value_model: a separate value network over the policy's token ids (Ouyang et al. 2022: started from the
            reward model), trained with the clipped value loss; the policy's own value head is then frozen.
            Default: the value head.
        value_optimizer: default Adam over the value model at the policy's rate.
        pretraining: language-model loss on unsupervised text, added to every optimizer step.
    """

    def __init__(
        self,
        config: PPOConfig,
        model: AutoModelForCausalLMWithValueHead,
        ref_model: AutoModelForCausalLMWithValueHead | PreTrainedModel | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        dataset: Dataset | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        data_collator: Callable[[list[dict[str, Any]]], Any] | None = None,
        num_shared_layers: int | None = None,
        lr_scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        value_model: RewardModel | None = None,
        *,
        value_optimizer: torch.optim.Optimizer | None = None,
        pretraining: PretrainingMix | None = None,
    ):
        if tokenizer is None:
            raise ValueError("PPOTrainer needs tokenizer=…: generation ends at its EOS token, and it is saved too")
        self.config, self.tokenizer = config, tokenizer
        self.accelerator = make_accelerator(config.log_with, config.accelerator_kwargs, config.project_kwargs)
        # different samples on every process, the same on every run
        set_seed(config.seed + self.accelerator.process_index)
        if isinstance(ref_model, PreTrainedModel):
            ref_model = AutoModelForCausalLMWithValueHead(ref_model)
        if ref_model is None and not model.is_peft:
            ref_model = create_reference_model(model, num_shared_layers)
        elif num_shared_layers is not None:
            raise ValueError(
                "num_shared_layers is for a reference model that the trainer makes; with your own ref_model use "
                "create_reference_model(model, num_shared_layers), and leave it unset for a PEFT policy"
            )
        zero.check_can_share(model.num_shared_layers, self.accelerator)
        self.policy = model
        self.ref_model = None if ref_model is None else ref_model.to(self.accelerator.device).eval()
        if value_model is not None:
            _check_value_model(value_model, model)
            switch_dropout_off(value_model)
            model.v_head.requires_grad_(False)  # nothing reads its values: without a gradient DDP would wait for one
        self.value_model = value_model
        self._warn_of_half_precision()
        if optimizer is None:
            trainable = [p for p in model.parameters() if p.requires_grad]
            optimizer = torch.optim.Adam(trainable, lr=config.learning_rate, fused=True)
        self.whole_models = zero.WholeModels(self.accelerator, [m for m in (model, self.ref_model) if m is not None])
        zero.configure(self.accelerator, config.mini_batch_size, config.max_grad_norm)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        if self.ref_model is not None:
            self._reference_engine = zero.prepare_frozen(self.ref_model, self.accelerator)
        networks = [(self.model, self.optimizer)]
        if value_model is not None:
            trainable = [p for p in value_model.parameters() if p.requires_grad]
            value_optimizer = value_optimizer or torch.optim.Adam(trainable, lr=config.learning_rate, fused=True)
            networks.append(self.accelerator.prepare(value_model, value_optimizer))
        self.lr_scheduler = lr_scheduler  # not prepared: accelerate would step it once per process
        self.dataloader = None if dataset is None else self._make_dataloader(dataset, data_collator)

        self.kl_ctl: AdaptiveKLController | FixedKLController = (
            AdaptiveKLController(config.init_kl_coef, config.target, config.horizon)
            if config.adap_kl_ctrl
            else FixedKLController(config.init_kl_coef)
        )
        self.score_scaler = ScoreScaler(
            config.use_score_scaling, config.use_score_norm, config.score_clip, self._reduce
        )
        most = partial(most_of_all, self.accelerator) if zero.stage_of(self.accelerator) == 3 else int
        self.passes = RolloutPasses(model, self.ref_model, config.kl_penalty, config.mini_batch_size, value_model, most)
        self.updater = Updater(networks, self.accelerator, config, pretraining)
        lms = [model.base_lm, *([value_model.backbone] if value_model is not None else [])]
        self._context = min((n for n in map(context_length, lms) if n is not None), default=None)
        self.current_step = 0
        self.last_rollout: list[dict[str, Tensor]] = []
        """Of the last step, per sample: logprob, ref_logprob, kl, value, token_reward, advantage; CPU (N_i,)."""
        self._half_copy: HalfPrecisionCopy | None = None
        self._biasing: list[str] = []
        self._generation_seconds = 0.0
        self._warned_of_negative_kl = False
        start_tracker(self.accelerator, config)

    # ------------------------------------------------------------------ generation

    def generate(
        self,
        queries: Tensor | Sequence[Tensor],
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 32,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        **generation_kwargs: Any,
    ) -> Any:
        """Sample responses, by default purely (temperature 1, no top-k, no top-p).

        A list of 1-D queries gives a list of 1-D tensors, one 1-D query a tensor (1, n). Each response ends at
        its first end-of-sequence token, which is kept, or at its own length drawn from ``length_sampler``
        (else by ``max_new_tokens``). With ``generate_ref_response`` a pair is returned: (responses, reference
        responses). Under bf16 or fp16 mixed precision, sampling uses a half-precision copy of the weights.
        """
        started = time.perf_counter()
        single = isinstance(queries, Tensor)
        prompts = [queries] if isinstance(queries, Tensor) else [q.cpu() for q in queries]
        lengths = [length_sampler() if length_sampler else None for _ in prompts]
        self._biasing = biasing_kwargs(generation_kwargs)
        self.policy.eval()

        def responses_of(model: AutoModelForCausalLMWithValueHead, trained: bool) -> Any:
            lm = self._sampling_weights(model) if trained else model.base_lm
            with self.accelerator.autocast(), merged_adapters(lm):
                new = sample(lm, self.tokenizer, prompts, lengths, batch_size, generation_kwargs)
            if return_prompt:
                new = [torch.cat([q.cpu(), r]) for q, r in zip(prompts, new, strict=True)]
            new = [r.to(self.accelerator.device) for r in new]
            return new[0].unsqueeze(0) if single else new

        with self.whole_models.of(self.policy) as policy:
            responses = responses_of(policy, trained=True)
        self._generation_seconds = time.perf_counter() - started
        if not generate_ref_response:
            return responses
        with (
            self.whole_models.of(self.policy if self.ref_model is None else self.ref_model) as source,
            reference_weights(source, None if self.ref_model is None else source) as reference,
        ):
            return responses, responses_of(reference, trained=False)

    def _sampling_weights(self, model: AutoModelForCausalLMWithValueHead) -> PreTrainedModel:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.accelerator.mixed_precision)
        if dtype is None or model.is_peft or model.base_lm.dtype == dtype:
            return model.base_lm
        if self._half_copy is None:
            self._half_copy = HalfPrecisionCopy(model.base_lm, dtype)
        return self._half_copy.current()

    # ------------------------------------------------------------------ one PPO step

    def step(
        self,
        queries: Sequence[Tensor],
        responses: Sequence[Tensor],
        scores: Scores,
        response_masks: Sequence[Tensor] | None = None,
        *,
        scores_are_scaled: bool = False,
    ) -> dict[str, float]:
        """One PPO optimisation step over a batch; returns its statistics.

        queries, responses: 1-D id tensors (Q_i,) and (N_i,). scores: per sample a number, or one reward per
        response token (N_i,), or a vector aligned with the log-probs (Q_i + N_i - 1,); kinds may be mixed, NaN
        means "no verdict". Instead of the list, a callable that returns it is called after the log-prob
        passes, so that remote critics work meanwhile. response_masks: (N_i,), 1 = train on this token.
        scores_are_scaled: the environment's scores already went through ``score_scaler.numbers``, so that
        token rewards added to them keep their size.
        """
        started = time.perf_counter()
        masks = check_batch(queries, responses, scores, response_masks, self.config.batch_size, self._context)
        sequences = Sequences(queries, responses, self.accelerator.device)
        self.policy.eval()
        if self.value_model is not None:
            self.value_model.eval()
        with self.accelerator.autocast():
            rollout = self.passes.run(sequences, self.updater.whole_batch())
        passed = time.perf_counter()
        given = scores() if callable(scores) else scores
        if len(given) != len(queries):
            raise ValueError(f"scores has {len(given)} entries but queries has {len(queries)}")
        waited = time.perf_counter()

        raw, verdicts = score_vectors(given, sequences.query_lengths, masks)
        counted = [ok and bool(mask.any()) for ok, mask in zip(verdicts, masks, strict=True)]
        vectors = raw if scores_are_scaled else self.score_scaler(raw, counted, masks)
        mask = self._trained_tokens(sequences, masks, counted)
        kl_coef = self.kl_ctl.value
        rewards = statistics.padded(vectors, mask) - kl_coef * rollout.kl
        if self.config.whiten_rewards:
            rewards = statistics.whiten(rewards, mask, self._reduce, shift_mean=False)
        advantages, returns = gae(rewards, rollout.values, mask, self.config.gamma, self.config.lam)
        advantages = statistics.whiten(advantages, mask, self._reduce)
        targets = Targets(mask, rollout.logprobs, rollout.values, advantages, returns)

        updated = time.perf_counter()
        stats = self.updater.run(sequences, targets, rollout.trunk, rollout.first_pass)
        ended = time.perf_counter()
        if self.lr_scheduler is not None:
            self.lr_scheduler.step()

        stats |= statistics.of_rollout(
            rollout, rewards, returns, mask, raw, vectors, counted, kl_coef, sequences, self._reduce
        )
        stats["reward/no_verdict"] = self._total(verdicts.count(False))
        stats["tokens/empty_responses"] = self._total(sequences.response_lengths.count(0))
        stats["ppo/learning_rate"] = float(self.optimizer.param_groups[0]["lr"])
        stats |= {
            "time/generate": self._generation_seconds,
            "time/passes": passed - started,
            "time/scores_wait": waited - passed,
            "time/update": ended - updated,
            "time/step": ended - started,
        }
        if stats["tokens/trained"]:  # otherwise no KL was measured
            self._update_kl_coef(stats["objective/kl"], self._total(len(queries)))
        self.last_rollout = _per_sample(rollout, rewards, advantages, sequences)
        self.current_step += 1
        return stats

    def _trained_tokens(self, sequences: Sequences, masks: list[Tensor], counted: list[bool]) -> Tensor:
        """(B, N) bool: tokens that exist, are not masked out, and belong to a sample with a verdict."""
        trained = torch.zeros_like(sequences.exists)
        for i, mask in enumerate(masks):
            if counted[i]:
                trained[i, : len(mask)] = mask.to(trained.device)
        return trained

    def _update_kl_coef(self, kl: float, samples: float) -> None:
        if self.config.kl_penalty == "kl" and kl < -1 and not self._warned_of_negative_kl:
            self._warned_of_negative_kl = True
            cause = ", ".join(self._biasing) or "none of the last generate call; are these its responses?"
            logger.warning(
                "mean sequence KL is %.2f, but a divergence can't be negative: the responses were not sampled "
                "from the policy's own distribution. Generation settings that change it: %s",
                kl,
                cause,
            )
        self.kl_ctl.update(kl, int(samples))

    def global_mean(self, values: Sequence[float]) -> float:
        """Mean over the values of all processes, NaN left out; NaN if nothing is left."""
        real = [v for v in values if not math.isnan(v)]
        total, count = self._reduce(torch.tensor([sum(real), len(real)], dtype=torch.float64)).tolist()
        return total / count if count else math.nan

    # ------------------------------------------------------------------ logging and saving

    def log_stats(self, stats: dict[str, float], batch: dict[str, Sequence[Any]], rewards: Sequence[Score]) -> None:
        """Send a step's statistics and the batch's rewards (mean and deviation over all processes) to the trackers.

        ``batch`` may hold ``query`` and ``response`` texts; the scripts keep those in samples.jsonl.
        """
        totals = [float(torch.as_tensor(r).sum()) for r in rewards]
        mean = self.global_mean(totals)
        logged = dict(stats)
        if not math.isnan(mean):
            variance = self.global_mean([(total - mean) ** 2 for total in totals])
            logged |= {"env/reward_mean": mean, "env/reward_std": math.sqrt(variance)}
        self.accelerator.log(logged, step=self.current_step)

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Save policy, value head and tokenizer as ordinary `transformers` files, from the main process.

        A separate value model goes to ``save_directory/value_model``. Files that were there are replaced as the new
        ones are whole; OSError where the disk is full. README.md is a model card.
        """
        state.save_model(self, Path(save_directory))

    def save_state(self, folder: str | Path) -> None:
        """Save all that a run needs to go on as if it had never stopped; called in every process.

        That is what is trained (of a LoRA policy the adapters), optimizers, scheduler, KL coefficient, running
        moments of the scores, random generators, the position in ``dataloader``, counters. ``folder`` is whole or not
        there, whatever happens meanwhile; OSError where the disk is full.
        """
        state.save_state(self, Path(folder))

    def load_state(self, folder: str | Path) -> None:
        """Go on from `save_state`; called in every process, of a trainer that was made in the same way.

        The next pass over ``dataloader`` is the rest of the one that was broken off. Raises ``DataFileError``, before
        anything is changed, for a state of other settings, models, data or another number of processes.
        """
        state.load_state(self, Path(folder))

    # ------------------------------------------------------------------ helpers

    def _make_dataloader(
        self, dataset: Dataset, data_collator: Callable[[list[dict[str, Any]]], Any] | None
    ) -> DataLoader:
        if self.config.remove_unused_columns:
            known = {"query", "response", "label", "input_ids", "attention_mask", "position_ids", "labels"}
            dataset = dataset.remove_columns([c for c in dataset.column_names if c not in known])
        batches = ShardedBatches(
            len(dataset),
            self.config.batch_size,
            rank=self.accelerator.process_index,
            world=self.accelerator.num_processes,
            seed=self.config.seed,
        )
        # with a generator of its own, a pass leaves the global one as it is, also where it is taken up halfway
        own = torch.Generator()
        return DataLoader(dataset, batch_sampler=batches, collate_fn=data_collator or _as_lists, generator=own)

    def _warn_of_half_precision(self) -> None:
        half = [n for n, p in self.policy.named_parameters() if p.requires_grad and p.element_size() == 2]
        if half:
            logger.warning(
                "%d trainable parameters (first: %s) are in half precision, which rounds small updates away; load "
                "with dtype=torch.float32 and use mixed precision instead",
                len(half),
                half[0],
            )

    def _reduce(self, values: Tensor) -> Tensor:
        """Sum over processes, in float64, back on the CPU."""
        return self.accelerator.reduce(values.double().to(self.accelerator.device), reduction="sum").cpu()

    def _total(self, count: int) -> float:
        return float(self._reduce(torch.tensor([count]))[0])


def _check_value_model(value_model: RewardModel, policy: AutoModelForCausalLMWithValueHead) -> None:
    """A value model reads the policy's ids, so its vocabulary must hold them all."""
    has, needs = (m.get_input_embeddings().weight.shape[0] for m in (value_model.backbone, policy.base_lm))
    if has < needs:
        raise SettingError(
            f"the value model knows {has} token ids and the policy {needs}: they need one tokenizer; start it from a "
            "reward model trained on the policy's model family, or leave value_model out (the policy's value head)"
        )


def _as_lists(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Columns of a batch as lists; token ids as 1-D tensors."""
    batch = {key: [row[key] for row in rows] for key in rows[0]}
    if "input_ids" in batch:
        batch["input_ids"] = [torch.as_tensor(ids, dtype=torch.long) for ids in batch["input_ids"]]
    return batch


def _per_sample(rollout: Rollout, rewards: Tensor, advantages: Tensor, sequences: Sequences) -> list[dict[str, Tensor]]:
    columns = {
        "logprob": rollout.logprobs,
        "ref_logprob": rollout.ref_logprobs,
        "kl": rollout.kl,
        "value": rollout.values,
        "token_reward": rewards,
        "advantage": advantages,
    }
    on_cpu = {name: tensor.detach().float().cpu() for name, tensor in columns.items()}
    return [{k: t[i, :n] for k, t in on_cpu.items()} for i, n in enumerate(sequences.response_lengths)]
