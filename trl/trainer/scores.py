"""From scores of mixed kinds to one reward vector per response, with running normalisation of the totals."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

Score = float | np.generic | Tensor


@dataclass
class RunningMoments:
    """Mean and standard deviation of everything seen so far, merged batch by batch (Welford / Chan et al.)."""

    mean: float = 0.0
    std: float = 1.0
    """Unbiased; 1 until two values have been seen."""
    count: int = 0
    squares: float = 0.0
    """Sum of squared deviations from the mean."""

    def update(self, total: float, total_of_squares: float, count: int) -> None:
        """Merge a batch given by its sum, its sum of squared deviations from its own mean, and its size."""
        if count == 0:
            return
        batch_mean = total / count
        delta = batch_mean - self.mean
        merged = self.count + count
        self.squares += total_of_squares + delta**2 * self.count * count / merged
        self.mean += delta * count / merged
        self.count = merged
        if merged > 1 and self.squares > 0:
            self.std = math.sqrt(self.squares / (merged - 1))


class ScoreScaler:
    """Scaling, norm and clip of sequence totals, as `PPOConfig`'s use_score_* fields say.

    One factor multiplies a sample's whole vector; the mean is subtracted on the last trainable token, and so is
    what exceeds the clip. ``reduce`` sums a float64 tensor over all processes, so that the moments are global.
    """

    def __init__(self, scale: bool, norm: bool, clip: float | None, reduce: Callable[[Tensor], Tensor] = lambda x: x):
        self.scale, self.norm, self.clip, self.reduce = scale, norm, clip, reduce
        self.moments = RunningMoments()

    def __call__(self, vectors: Sequence[Tensor], counted: Sequence[bool], masks: Sequence[Tensor]) -> list[Tensor]:
        """Scale reward vectors (N_i,); samples not ``counted`` (no verdict, empty) stay out of the moments.

        ``masks[i]`` (N_i,) bool marks the trainable tokens, at least one where the sample is counted.
        """
        if self.scale:
            self._update([v.double().sum() for v, real in zip(vectors, counted, strict=True) if real])
        return [
            self._apply(v, int(mask.nonzero()[-1])) if real else v
            for v, real, mask in zip(vectors, counted, masks, strict=True)
        ]

    def numbers(self, scores: Sequence[Score]) -> list[float]:
        """Scale sequence scores on their own, before token rewards join them; NaN stays NaN."""
        vectors = [torch.as_tensor(score, dtype=torch.float32).reshape(1).cpu() for score in scores]
        whole = [torch.ones(1, dtype=torch.bool)] * len(vectors)
        return [float(v[0]) for v in self(vectors, [not bool(v.isnan()) for v in vectors], whole)]

    def _update(self, totals: list[Tensor]) -> None:
        values = torch.stack(totals) if totals else torch.zeros(0, dtype=torch.float64)
        total, count = self.reduce(torch.tensor([values.sum(), len(values)], dtype=torch.float64)).tolist()
        mean = total / max(count, 1)
        squares = self.reduce((values - mean).square().sum().view(1)).item()
        self.moments.update(total, squares, int(count))

    def _apply(self, vector: Tensor, last: int) -> Tensor:
        vector = vector.clone()
        if self.scale:
            vector /= self.moments.std
            if self.norm:
                vector[last] -= self.moments.mean / self.moments.std
        if self.clip is not None:
            total = float(vector.sum())
            vector[last] -= total - max(-self.clip, min(self.clip, total))
        return vector


def score_vectors(
    scores: Sequence[Score], query_lengths: Sequence[int], masks: Sequence[Tensor]
) -> tuple[list[Tensor], list[bool]]:
    """One fp32 CPU vector (N_i,) per sample, and whether the sample has a verdict.

    ``masks[i]`` (N_i,) bool marks the trainable tokens. A sequence score goes on the last trainable token; a
    vector of length N_i, or of length Q_i + N_i - 1 (aligned with next-token log-probs), is taken as it is.
    NaN anywhere means no verdict. Raises ValueError for any other length and for infinite values, TypeError for
    what holds no numbers.
    """
    vectors, verdicts = [], []
    for i, (score, query_length, mask) in enumerate(zip(scores, query_lengths, masks, strict=True)):
        try:
            given = torch.as_tensor(score, dtype=torch.float32).detach().cpu()
        except (TypeError, RuntimeError) as error:
            raise TypeError(
                f"scores[{i}] is a {type(score).__name__}: expected a number or a vector of numbers; use NaN for "
                "'no verdict'"
            ) from error
        length = len(mask)
        if given.dim() == 0 or (given.shape == (1,) and length != 1):
            rewards = given.reshape(1)
            vector = torch.zeros(length)
            trainable = mask.nonzero()
            if len(trainable):
                vector[trainable[-1]] = rewards
            elif rewards.isnan():
                vector.fill_(math.nan)
        elif given.dim() == 1 and len(given) in (length, query_length + length - 1):
            rewards = given[len(given) - length :]
            vector = rewards.clone()
        else:
            raise ValueError(
                f"scores[{i}] has shape {tuple(given.shape)}: expected a number, or a vector of length {length} "
                f"(one reward per response token), or of length {query_length + length - 1} (aligned with the "
                f"log-probs of query and response)"
            )
        if rewards.isinf().any():
            raise ValueError(f"scores[{i}] is infinite; use NaN for 'no verdict'")
        vectors.append(vector)
        verdicts.append(not bool(rewards.isnan().any()))
    return vectors, verdicts
