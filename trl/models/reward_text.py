"""How a reward model reads a prompt with its completion: the same tokens in training and in scoring."""

import math
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from trl.models.reward_model import RewardModel


class RewardText:
    """Texts to token ids: ``[BOS, if the tokenizer adds one] prefix prompt completion [EOS]``.

    Prompt and completion are tokenized as one text, so that the ids don't depend on where the border is. What looks
    like a special token in them is read as ordinary characters: a policy must not be able to end the text that it is
    judged by. The score is read at the last token, which is EOS.

    Args:
        tokenizer: the reward model's own.
        max_length: most tokens, the added ones included.
        prefix: text in front of every prompt, for models trained with one; here special tokens count as such.
        append_eos: whether EOS follows. Without it, the score is that of the completion's last token.

    Raises ``ValueError`` where EOS is wanted and there is none, or ``max_length`` leaves no room for a text.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, max_length: int, *, prefix: str = "", append_eos: bool = True
    ) -> None:
        self.tokenizer = tokenizer
        added = list(tokenizer("", verbose=False)["input_ids"])
        self.opening = added[:1] if added and added[0] == tokenizer.bos_token_id else []
        self.opening += list(tokenizer(prefix, add_special_tokens=False)["input_ids"]) if prefix else []
        if append_eos and tokenizer.eos_token_id is None:
            raise ValueError("the reward model's tokenizer has no EOS token; set one, or use append_eos=False")
        self.closing = [tokenizer.eos_token_id] if append_eos else []
        self.room = max_length - len(self.opening) - len(self.closing)
        if self.room < 1:
            raise ValueError(
                f"max_length is {max_length}, of which prefix and special tokens take {max_length - self.room}; "
                "nothing is left for the text"
            )

    @property
    def pad_id(self) -> int:
        """What fills a batch up; the attention mask says where."""
        pad, eos = self.tokenizer.pad_token_id, self.tokenizer.eos_token_id
        return int(pad if pad is not None else eos if eos is not None else 0)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of bare texts (a prompt with its completion), without what is added around them."""
        if not texts:
            return []
        encoded = self.tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True, verbose=False)
        return [list(ids) for ids in encoded["input_ids"]]

    def fit(self, *bodies: list[int]) -> tuple[list[list[int]], bool]:
        """Whole sequences for bodies that have one prompt, and whether something was cut off.

        What is too long loses its beginning, the prompt's; all bodies lose as many tokens, to still have one prompt.
        """
        excess = max(0, *(len(body) - self.room for body in bodies))
        # a body is never emptied: of a pair that differs much in length, the shorter one keeps its last token
        kept = [body[min(excess, max(len(body) - 1, 0)) :] for body in bodies]
        return [[*self.opening, *body, *self.closing] for body in kept], excess > 0


def longest_text(model: RewardModel, tokenizer: PreTrainedTokenizerBase, asked: int | None = None) -> int:
    """Most tokens that tokenizer, model and the caller allow.

    Raises ``ValueError`` where more is asked for than the model has positions.
    """
    # GPT-2's n_positions answers to this name too; some models have no limit
    positions = getattr(model.backbone.config.get_text_config(), "max_position_embeddings", None) or math.inf
    if asked is not None and asked > positions:
        raise ValueError(f"max_length is {asked}, but the reward model has {positions} positions")
    return int(min(asked or math.inf, positions, tokenizer.model_max_length))
