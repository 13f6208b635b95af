"""Continuations of text prompts from any causal language model, for evaluation.

Pure sampling unless told otherwise: nothing comes from a checkpoint's own ``generation_config`` except its
end-of-sequence ids. (Rollouts for training are ``PPOTrainer.generate``.)
"""

from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from transformers import GenerationConfig, GenerationMixin

from trl.metrics import position_limit
from trl.model_files import load_language_model, load_tokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Sampling:
    """How to decode. Lengths are in new tokens; ``top_k=0`` and ``top_p=1.0`` mean off."""

    max_new_tokens: int = 20
    min_new_tokens: int = 0
    do_sample: bool = True
    top_p: float = 1.0
    top_k: int = 0
    num_return: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.min_new_tokens <= self.max_new_tokens or self.max_new_tokens < 1:
            raise ValueError(f"expected 0 <= min <= max new tokens; got {self.min_new_tokens}, {self.max_new_tokens}")
        if not 0.0 < self.top_p <= 1.0 or self.top_k < 0 or self.num_return < 1:
            raise ValueError(f"expected 0 < top_p <= 1, top_k >= 0 and at least one return, got {self}")
        if not self.do_sample and self.num_return > 1:
            raise ValueError(f"greedy decoding gives {self.num_return} equal texts: sample, or ask for one return")


def load_causal_lm(
    name: str, device: str | torch.device | None = None
) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """Model (eval mode) and tokenizer of a hub id, local folder or ``builtin:`` name.

    Weights are fp32 on a CPU, the checkpoint's own type on an accelerator.
    """
    from trl.builtin import locate_model

    path = locate_model(name)
    target = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    model = load_language_model(path, dtype="float32" if target.type == "cpu" else "auto")
    cast(torch.nn.Module, model).to(target)
    return model.eval(), load_tokenizer(path)


def sample_continuations(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    prompts: Sequence[str],
    sampling: Sampling,
    *,
    seed: int,
) -> list[list[str]]:
    """``sampling.num_return`` continuations of every prompt, as one left-padded batch.

    The same arguments give the same texts, whatever was drawn before; the global random state is left as
    it was. Texts are what the new tokens add to the prompt (a leading space is kept), without special
    tokens; a continuation that ends at once is "".

    A prompt that leaves no room for the continuation in the model's positions loses its beginning (`count_cut`
    says how many do). Raises ValueError when there is no room for any prompt, or when a prompt is empty and the
    tokenizer has no special token to start from.
    """
    room = prompt_room(model, sampling)
    ids = [_cut_left(_prompt_ids(tokenizer, prompt), room, tokenizer.bos_token_id) for prompt in prompts]
    width = max(map(len, ids))
    eos = eos_ids(model, tokenizer)
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (eos[0] if eos else 0)
    input_ids = torch.full((len(ids), width), pad)  # (P, Q)
    mask = torch.zeros_like(input_ids)
    for row, prompt_ids in enumerate(ids):
        input_ids[row, width - len(prompt_ids) :] = torch.tensor(prompt_ids)
        mask[row, width - len(prompt_ids) :] = 1

    config = GenerationConfig(
        max_new_tokens=sampling.max_new_tokens,
        min_new_tokens=sampling.min_new_tokens or None,
        do_sample=sampling.do_sample,
        num_return_sequences=sampling.num_return,
        pad_token_id=pad,
        eos_token_id=eos or None,
        # Hugging Face's default of top_k=50 applies unless it is named.
        **({"top_k": sampling.top_k, "top_p": sampling.top_p, "temperature": 1.0} if sampling.do_sample else {}),
    )
    devices = [model.device] if model.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices=devices),
        torch.inference_mode(),
        neutral_defaults(model),
        whole_head_input(model),
    ):
        torch.manual_seed(seed)
        output = cast(GenerationMixin, model).generate(
            input_ids=input_ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=config,
        )
    new = output[:, width:].tolist()  # (P·num_return, N)
    texts = [
        added_text(tokenizer, ids[row // sampling.num_return], _until(tokens, eos)) for row, tokens in enumerate(new)
    ]
    return [texts[i : i + sampling.num_return] for i in range(0, len(texts), sampling.num_return)]


def prompt_room(model: "PreTrainedModel", sampling: Sampling) -> int:
    """The most prompt tokens that leave room for the continuation. Raises ValueError where that is none."""
    positions = position_limit(model)
    if sampling.max_new_tokens >= positions:
        raise ValueError(
            f"{sampling.max_new_tokens} new tokens leave a prompt no room in the model's {positions} positions; ask "
            "for fewer"
        )
    return positions - sampling.max_new_tokens


def count_cut(
    model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase", prompts: Sequence[str], sampling: Sampling
) -> int:
    """How many prompts `sample_continuations` cuts; raises what it would, before a long job has begun."""
    room = prompt_room(model, sampling)
    return sum(len(_prompt_ids(tokenizer, prompt)) > room for prompt in prompts)


def _cut_left(ids: list[int], room: int, bos: int | None) -> list[int]:
    """The last ``room`` ids; a BOS token at the start stays."""
    if len(ids) <= room:
        return ids
    return [bos, *ids[len(ids) - room + 1 :]] if ids[0] == bos is not None and room > 1 else ids[-room:]


def batch_seed(seed: int, batch: int) -> int:
    """A seed for one batch of a longer job, so that a resumed job draws what an uninterrupted one would."""
    return int(np.random.SeedSequence([seed, batch]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _prompt_ids(tokenizer: "PreTrainedTokenizerBase", prompt: str) -> list[int]:
    ids: list[int] = list(tokenizer(prompt, verbose=False)["input_ids"])
    if ids and tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id and prompt:
        ids = ids[:-1]  # some tokenizers close every text; a prompt must stay open
    if ids:
        return ids
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if start is None:
        raise ValueError("cannot continue an empty prompt: this tokenizer has no BOS or EOS token to start from")
    return [start]


def eos_ids(model: "PreTrainedModel", tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """The tokenizer's end token and those of the generation config (chat models list several there)."""
    own: Any = model.generation_config.eos_token_id if model.generation_config else None
    listed = own if isinstance(own, list | tuple) else [own]
    # A config class's default (50256 in GPT-2's) may lie outside of a smaller vocabulary.
    size = model.get_input_embeddings().num_embeddings
    return sorted({int(i) for i in (tokenizer.eos_token_id, *listed) if i is not None and i < size})


@contextmanager
def neutral_defaults(model: "PreTrainedModel") -> "Iterator[None]":
    """``generate`` fills every unset field from the checkpoint's own generation config, so set it aside."""
    own = model.generation_config
    model.generation_config = GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


@contextmanager
def whole_head_input(model: "PreTrainedModel") -> "Iterator[None]":
    """Within, the LM head reads hidden states without gaps in memory.

    For a batch's prompts ``generate`` projects the last position only, a slice (B, 1, D) with gaps, and for such a
    tensor torch.matmul copies the head's weights B times: 3.6 GB, and half of the time of 20 tokens, for 32 prompts
    and SmolLM2's vocabulary.
    """
    head = cast(torch.nn.Module, model.get_output_embeddings())
    hook = head.register_forward_pre_hook(lambda _, inputs: tuple(each.contiguous() for each in inputs))
    try:
        yield
    finally:
        hook.remove()


def _until(tokens: list[int], eos: Sequence[int]) -> list[int]:
    end = next((index for index, token in enumerate(tokens) if token in eos), len(tokens))
    return tokens[:end]


def added_text(tokenizer: "PreTrainedTokenizerBase", prompt: list[int], new: list[int]) -> str:
    """The text that ids ``new`` add to ids ``prompt``, without special tokens.

    Decoded alone, SentencePiece's new tokens would lose the space before their first word.
    """

    def text(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    before, after = text(prompt), text([*prompt, *new])
    # A prompt that ends within a character has no text of its own that the whole could start with.
    return after[len(before) :] if after.startswith(before) else text(new)
