"""Mean environment reward on held-out prompts while a run goes on."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trl.generation import added_text
from trl.trainer import PPOTrainer

Score = Callable[[dict[str, list[Any]], list[str]], Sequence[float]]
"""From a batch's columns (with completion_ids, the responses) and the responses' texts to one score per response, NaN
for "no verdict"."""


class HeldOut:
    """Samples one response per held-out prompt, always with the same random numbers, and scores it.

    Training is left as it was: the random generator is put back. Every process takes its share of the prompts.

    Args:
        trainer: the policy is sampled through it.
        rows: held-out prompts, with ``input_ids`` and whatever columns ``score`` reads.
        lengths: draws response lengths, as in training.
        score: the environment.
        every: steps between evaluations.
    """

    def __init__(
        self,
        trainer: PPOTrainer,
        rows: Sequence[dict[str, Any]],
        lengths: Callable[[], int],
        score: Score,
        every: int,
    ):
        self._trainer, self._lengths, self._score, self.every = trainer, lengths, score, every
        accelerator = trainer.accelerator
        self._rows = list(rows)[accelerator.process_index :: accelerator.num_processes]

    def __call__(self) -> dict[str, float]:
        """``eval/score`` (mean over verdicts), ``eval/length`` (response tokens), ``eval/no_verdict`` (share)."""
        batch = {key: [row[key] for row in self._rows] for key in (self._rows[0] if self._rows else ())}
        batch["input_ids"] = [torch.as_tensor(ids, dtype=torch.long) for ids in batch.get("input_ids", [])]
        with torch.random.fork_rng():
            torch.manual_seed(self._trainer.config.seed)
            responses = self._trainer.generate(batch["input_ids"], self._lengths, return_prompt=False)
        batch["completion_ids"] = [response.tolist() for response in responses]
        pairs = zip(batch["input_ids"], responses, strict=True)
        texts = [added_text(self._trainer.tokenizer, query.tolist(), new.tolist()) for query, new in pairs]
        scores = self._score(batch, texts) if texts else []
        return {
            "eval/score": self._trainer.global_mean(scores),
            "eval/length": self._trainer.global_mean([float(len(response)) for response in responses]),
            "eval/no_verdict": self._trainer.global_mean([float(score != score) for score in scores]),
        }
