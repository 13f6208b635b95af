"""PPO-ptx: a language-model loss on plain text, mixed into PPO's updates (Ouyang et al. 2022, section 3.5, eq. 2)."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from trl.core import logprobs_from_logits


class PretrainingMix:
    """Draws random blocks of text for every optimizer step; their loss keeps the policy's general ability.

    Blocks come from torch's global generator, so they differ between processes and a checkpoint of its state restores
    them.

    Args:
        texts: documents; they are joined, each ended by the end-of-sequence token, and cut into blocks.
        coef: weight of the loss beside PPO's.
        block_length: tokens per block.
        batch_size: blocks per optimizer step and process.

    Raises:
        ValueError: the texts together are shorter than one block.
    """

    def __init__(
        self,
        texts: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        coef: float,
        *,
        block_length: int = 128,
        batch_size: int = 8,
    ):
        if coef <= 0:
            raise ValueError(f"coef is {coef}; expected more than 0, or no pre-training mix at all")
        end = [tokenizer.eos_token_id]
        ids = [id for text in texts for id in [*tokenizer(text, add_special_tokens=False)["input_ids"], *end]]
        count = len(ids) // block_length
        if count == 0:
            raise ValueError(f"the pre-training text has {len(ids)} tokens; expected at least {block_length}")
        self.blocks = torch.tensor(ids[: count * block_length]).view(count, block_length)
        self.coef, self.batch_size = coef, batch_size

    def loss(self, model: nn.Module) -> Tensor:
        """Mean next-token loss, in nats, of ``model`` (a policy with value head) on random blocks."""
        chosen = torch.randint(len(self.blocks), (self.batch_size,))
        ids = self.blocks[chosen].to(next(model.parameters()).device)
        positions = torch.ones_like(ids, dtype=torch.bool)
        positions[:, -1] = False
        logits, _, values = model(input_ids=ids, positions=positions)
        # a value head without any gradient would keep the one of the step before under ZeRO-3
        return -logprobs_from_logits(logits, ids[:, 1:].reshape(-1)).mean() + 0.0 * values.sum()
