"""Training a reward model on pairs of texts (Stiennon et al. 2020; Ouyang et al. 2022, section 3.5)."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from trl.models.reward_model import RewardModel, last_positions
from trl.models.reward_text import RewardText, longest_text
from trl.report.calibration import calibration_bins, calibration_error, save_calibration
from trl.trainer.pairwise import pair_loss
from trl.trainer.reward_config import RewardConfig
from trl.trainer.supervised import SupervisedTrainer, enable_gradient_checkpointing

__all__ = ["RewardConfig", "RewardTrainer"]

logger = logging.getLogger(__name__)

CALIBRATION_FILE = "calibration.png"


@dataclass(frozen=True)
class Pair:
    """Token ids of two texts with one prompt, and that prompt's number."""

    chosen: list[int]
    rejected: list[int]
    prompt: int


class RewardTrainer(SupervisedTrainer[Pair]):
    """Trains a `RewardModel` so that the preferred text of each pair scores higher.

    Args:
        config: see `RewardConfig`.
        model: the model; its weights are changed in place.
        tokenizer: of the model, saved with it.
        pairs: rows with ``prompt``, ``chosen`` and ``rejected`` (texts). Pairs of one prompt share a batch: apart,
            they would show the model the same prompt many times per epoch, and it overfits (Ouyang et al. 2022).
        eval_pairs: held-out rows; their pairwise accuracy, with a 95 % bootstrap interval over prompts, mean margin,
            loss and calibration are measured, and drawn in ``calibration.png``.

    Pairs of equal texts are dropped and counted in the log, as are those that are equal once cut to ``max_length``.
    Raises ``ValueError`` naming the row where a field is missing or empty.
    """

    def __init__(
        self,
        config: RewardConfig,
        model: RewardModel,
        tokenizer: PreTrainedTokenizerBase,
        pairs: Sequence[dict[str, str]],
        eval_pairs: Sequence[dict[str, str]] = (),
    ):
        self.pair_loss = partial(pair_loss, mode=config.loss_mode, margin=config.margin, center_coef=config.center_coef)
        self.tokenizer = tokenizer
        self.text = RewardText(tokenizer, longest_text(model, tokenizer, config.max_length))
        rows = encode_pairs(self.text, pairs, "training")
        self.eval_rows = encode_pairs(self.text, eval_pairs, "held-out")
        if config.num_frozen_layers is not None:
            model.freeze_lower_blocks(config.num_frozen_layers)
        if config.gradient_checkpointing:
            enable_gradient_checkpointing(model.backbone)
        groups: dict[int, list[int]] = defaultdict(list)
        for number, row in enumerate(rows):
            groups[row.prompt].append(number)
        self.reward_model = model
        super().__init__(config, model, rows, list(groups.values()))

    def units(self, row: Pair) -> int:
        return 1

    def loss(self, model: nn.Module, rows: Sequence[Pair]) -> tuple[Tensor, dict[str, Tensor]]:
        """Summed pair loss, pairwise accuracy, margin and the two scores."""
        ids, mask, chosen, rejected = self._texts(rows)
        # without a mask, attention takes its fastest path, and right padding can't be seen from the left
        values = model(ids, positions=torch.ones_like(mask, dtype=torch.bool)).view(ids.shape)
        result = self.pair_loss(
            values[chosen], values[rejected], ids[chosen], ids[rejected], mask[chosen], mask[rejected]
        )
        logged = {
            "accuracy": result.accuracy,
            "margin": result.margin,
            "score/chosen": result.chosen,
            "score/rejected": result.rejected,
        }
        return result.loss.sum(), {name: value.detach().sum() for name, value in logged.items()}

    def evaluate(self) -> dict[str, float]:
        """Accuracy and margins on the held-out pairs, by the end scores."""
        if not self.eval_rows:
            return {}
        margins = self.margins(self.eval_rows)
        hits = (np.sign(margins) + 1) / 2
        low, high = prompt_bootstrap(hits, np.array([row.prompt for row in self.eval_rows]))
        if self.accelerator.is_main_process:
            self.folder.mkdir(parents=True, exist_ok=True)
            save_calibration(margins, self.folder / CALIBRATION_FILE)
        return {
            "accuracy": float(hits.mean()),
            "accuracy_low": low,
            "accuracy_high": high,
            "margin": float(margins.mean()),
            "loss": float(-logsigmoid(torch.from_numpy(margins)).mean()),
            "calibration_error": calibration_error(calibration_bins(margins)),
            "pairs": float(len(margins)),
        }

    @torch.no_grad()
    def margins(self, rows: Sequence[Pair]) -> np.ndarray:
        """End score of the chosen text minus that of the rejected one, (len(rows),); the processes share the work."""
        result = torch.zeros(len(rows), dtype=torch.float64, device=self.accelerator.device)
        by_length = sorted(range(len(rows)), key=lambda i: max(len(rows[i].chosen), len(rows[i].rejected)))
        for numbers, weight in self._passes(by_length):
            ids, mask, chosen, rejected = self._texts([rows[i] for i in numbers])
            ends = nn.functional.one_hot(last_positions(mask), mask.shape[1]).bool()
            scores = self.model(ids, positions=ends).double()
            result[numbers] += (scores[chosen] - scores[rejected]) * weight
        if self.accelerator.num_processes > 1:
            result = self.accelerator.reduce(result)
        return result.cpu().numpy()

    def save_model(self, folder: Path, state_dict: dict[str, Tensor]) -> None:
        """The reward model and its tokenizer, as `RewardModel.from_pretrained` reads them."""
        self.reward_model.save_pretrained(folder, state_dict=state_dict)
        self.tokenizer.save_pretrained(str(folder))

    def _texts(self, rows: Sequence[Pair]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The different texts of N pairs, and which of them each pair compares.

        Right-padded ids and mask (T, L); row numbers of the chosen and the rejected texts (N,). The pairs of one
        prompt often share a text, which is then read once.
        """
        numbers: dict[tuple[int, ...], int] = {}
        chosen, rejected = (
            torch.tensor([numbers.setdefault(tuple(text), len(numbers)) for text in texts])
            for texts in ([row.chosen for row in rows], [row.rejected for row in rows])
        )
        ids = pad_sequence([torch.tensor(s) for s in numbers], batch_first=True, padding_value=self.text.pad_id)
        mask = pad_sequence([torch.ones(len(s), dtype=torch.long) for s in numbers], batch_first=True)
        device = self.accelerator.device
        return ids.to(device), mask.to(device), chosen.to(device), rejected.to(device)


def encode_pairs(text: RewardText, pairs: Sequence[dict[str, str]], what: str) -> list[Pair]:
    """Token ids of the pairs, without those of equal texts, which are counted in the log."""
    for number, pair in enumerate(pairs):
        for column in ("prompt", "chosen", "rejected"):
            value = pair.get(column)
            if not isinstance(value, str) or not value.strip():
                raise ValueError(f"{what} pair {number}: expected a text called {column}, got {value!r:.80}")
    different = [pair for pair in pairs if pair["chosen"] != pair["rejected"]]
    chosen, rejected = (
        text.tokenize([pair["prompt"] + pair[column] for pair in different]) for column in ("chosen", "rejected")
    )
    prompts: dict[str, int] = {}
    rows, shortened = [], 0
    for pair, better, worse in zip(different, chosen, rejected, strict=True):
        (better, worse), is_cut = text.fit(better, worse)
        shortened += is_cut
        if better != worse:
            rows.append(Pair(better, worse, prompts.setdefault(pair["prompt"], len(prompts))))
    if len(rows) < len(pairs):
        logger.info("dropped %d of %d %s pairs: their texts are equal", len(pairs) - len(rows), len(pairs), what)
    if shortened:
        logger.info("%d %s pairs are too long, and lost the beginning of their prompt", shortened, what)
    return rows


def prompt_bootstrap(values: np.ndarray, prompts: np.ndarray, resamples: int = 2000) -> tuple[float, float]:
    """95 % percentile-bootstrap interval of the mean of ``values`` (N,), drawing whole prompts (N,) at a time.

    Pairs of one prompt are alike, so that drawing single pairs would give too narrow an interval.
    """
    _, number = np.unique(prompts, return_inverse=True)
    sums, counts = np.bincount(number, values), np.bincount(number)
    draws = np.random.default_rng(0).integers(0, len(counts), (resamples, len(counts)))
    low, high = np.quantile(sums[draws].sum(1) / counts[draws].sum(1), [0.025, 0.975])
    return float(low), float(high)
