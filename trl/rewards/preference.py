"""The reward that people's preferences taught: a reward model's score of a prompt with its completion."""

import logging
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trl.builtin import resolve_model
from trl.models.reward_model import RewardModel
from trl.models.reward_text import RewardText, longest_text
from trl.rewards.sentiment import Text, as_text

logger = logging.getLogger(__name__)


class PreferenceReward:
    """End score of a `RewardModel` for each prompt with its completion.

    Text comes in and is tokenized by the reward model's own tokenizer, so that the policy's may be another one.

    An empty completion is scored like any other (its text is the prompt): to say nothing is something that the model
    can judge, and "no verdict" would let a policy out of the loss by it. Only where prompt and completion are both
    blank is there no verdict.

    Args:
        reward_model: a folder, hub repository or ``.bin`` file (see `RewardModel.from_pretrained`), or the model.
        tokenizer: default: the one saved beside the model; needed where there is none.
        batch_size: texts per forward pass, which are of similar length.
        device, dtype: where the model goes and what its body's weights become; default: the accelerator if there is
            one, and fp32. A model given as an object stays where and as it is unless they are given.
        max_length: most tokens of a text, default as many as the model can read; a longer one loses its beginning,
            the prompt's, and is counted in ``truncated``.
        config_name: model whose configuration and tokenizer a public checkpoint without a config.json has.
        prefix, append_eos: what the model was trained to read around a text (see `RewardText`). The public 6B TL;DR
            model: ``prefix="<|startoftext|>", append_eos=False``. Its texts end in EOS, but since EOS is also its
            padding, it was trained on, and is read at, the token before.

    Raises ``OSError`` where there is nothing to load, ``ValueError`` where the weights or the settings don't fit.
    """

    def __init__(
        self,
        reward_model: str | Path | RewardModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        batch_size: int = 16,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        max_length: int | None = None,
        config_name: str | None = None,
        prefix: str = "",
        append_eos: bool = True,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if isinstance(reward_model, RewardModel):
            if tokenizer is None:
                raise ValueError("a reward model given as an object needs tokenizer=…, its own")
            self.model = reward_model
            if device is not None:
                self.model.to(device)
            if dtype is not None:
                self.model.backbone.to(dtype)
        else:
            path = resolve_model(str(reward_model))
            self.model = RewardModel.from_pretrained(
                path,
                dtype=dtype,
                device=device or ("cuda" if torch.cuda.is_available() else "cpu"),
                config_name=None if config_name is None else resolve_model(config_name),
            ).requires_grad_(False)
            tokenizer = tokenizer or _tokenizer_of(path, config_name)
        self.model.eval()
        self.batch_size = batch_size
        self.text = RewardText(
            tokenizer, longest_text(self.model, tokenizer, max_length), prefix=prefix, append_eos=append_eos
        )
        self.passes: Callable[[int], int] = int
        """Forward passes to make where so many are needed: more where passes are collectives (`trl.rlhf`)."""
        self.truncated = 0
        """Texts so far that were too long."""
        self.__name__ = "preference_reward"  # trainers that take a list of reward functions report by this

    @torch.no_grad()
    def __call__(self, *, prompts: Sequence[Text], completions: Sequence[Text], **_ignored: Any) -> list[float | None]:
        """One score per sample; None (no verdict) where prompt and completion are both blank.

        Texts must already be free of the policy's special tokens (decode with ``skip_special_tokens=True``).
        """
        if len(prompts) != len(completions):
            raise ValueError(f"got {len(prompts)} prompts and {len(completions)} completions; expected as many")
        texts = [as_text(prompt) + as_text(answer) for prompt, answer in zip(prompts, completions, strict=True)]
        judged = [index for index, text in enumerate(texts) if text.strip()]
        sequences = self._sequences([texts[index] for index in judged])
        rewards: list[float | None] = [None] * len(texts)
        order = sorted(range(len(judged)), key=lambda i: len(sequences[i]))
        needed = math.ceil(len(order) / self.batch_size)
        for number in range(self.passes(needed)):
            batch = order[number * self.batch_size : (number + 1) * self.batch_size]
            # without texts of its own, a process takes part in the passes of the others
            scores = self._scores([sequences[i] for i in batch] or [[self.text.pad_id]])
            for i, score in zip(batch, scores, strict=False):
                rewards[judged[i]] = score if math.isfinite(score) else None
        return rewards

    def _sequences(self, texts: list[str]) -> list[list[int]]:
        fitted = [self.text.fit(body) for body in self.text.tokenize(texts)]
        cut = sum(is_cut for _, is_cut in fitted)
        if cut and not self.truncated:
            logger.warning("texts too long for the reward model lose the beginning of their prompt (%d so far)", cut)
        self.truncated += cut
        return [ids for [ids], _ in fitted]

    def _scores(self, sequences: list[list[int]]) -> list[float]:
        """End scores of right-padded sequences."""
        device = self.model.head.weight.device
        ids = pad_sequence([torch.tensor(s) for s in sequences], batch_first=True, padding_value=self.text.pad_id)
        ends = torch.zeros_like(ids, dtype=torch.bool)
        ends[torch.arange(len(sequences)), torch.tensor([len(s) - 1 for s in sequences])] = True
        scores: list[float] = self.model(ids.to(device), positions=ends.to(device)).tolist()
        return scores


def _tokenizer_of(path: str, config_name: str | None) -> PreTrainedTokenizerBase:
    """The tokenizer in the model's folder; of a public checkpoint, that of the model it was trained from."""
    folder = Path(path)
    has_own = not path.endswith(".bin") and (not folder.is_dir() or (folder / "tokenizer_config.json").exists())
    source = path if has_own or config_name is None else resolve_model(config_name)
    try:
        return AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise OSError(
            f"{source} has no tokenizer ({reason}); give tokenizer=…, or config_name=… if the reward model was trained "
            "from another model"
        ) from error
