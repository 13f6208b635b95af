"""Critiques written by a local model: batched greedy decoding with the reply's own stopping rules."""

import re
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from trl.critic.template import STOP
from trl.critic.types import Style
from trl.generation import whole_head_input

_NEGATIVE_HEADER = re.compile(r"^.*\bnegative\b[^\n]*span[^\n]*$", re.IGNORECASE | re.MULTILINE)
_BLANK_LINE = re.compile(r"\S[^\S\n]*\n[^\S\n]*\n")


def cut_reply(text: str, style: Style) -> str | None:
    """The reply up to where it ends, or None while it may go on.

    A stop string ends it. So does a blank line after the first text line, in sentiment only once the
    negative section has text: the blank line before that separates the two sections.
    """
    ends = [at for at in (text.find(stop) for stop in STOP[style]) if at >= 0]
    start: int | None = 0
    if style == "sentiment":
        header = _NEGATIVE_HEADER.search(text)
        start = header.end() if header else None
    blank = _BLANK_LINE.search(text, start) if start is not None else None
    if blank:
        ends.append(blank.start() + 1)
    return text[: min(ends)] if ends else None


def greedy_replies(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[str],
    *,
    style: Style,
    max_new_tokens: int,
    batch_size: int,
) -> list[str | None]:
    """One reply per prompt, in order; None where prompt and reply would not fit the model's context.

    Equal prompts are answered once. Prompts are batched by length and padded on the left.
    """
    distinct = list(dict.fromkeys(prompts))
    ids = [_encode(tokenizer, prompt) for prompt in distinct]
    limit = model.config.max_position_embeddings - max_new_tokens
    fitting = sorted((i for i in range(len(ids)) if len(ids[i]) <= limit), key=lambda i: len(ids[i]))
    replies: dict[str, str | None] = dict.fromkeys(distinct)
    for start in range(0, len(fitting), batch_size):
        chosen = fitting[start : start + batch_size]
        texts = _generate(model, tokenizer, [ids[i] for i in chosen], style, max_new_tokens)
        replies.update(zip([distinct[i] for i in chosen], texts, strict=True))
    return [replies[prompt] for prompt in prompts]


def _encode(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    if tokenizer.chat_template is None:
        return list(tokenizer(prompt)["input_ids"])
    message = [{"role": "user", "content": prompt}]
    # The template writes the special tokens itself.
    text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


class _ReplyEnded(StoppingCriteria):
    """Per row: the text generated so far contains its end."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_length: int, style: Style) -> None:
        self._tokenizer, self._prompt_length, self._style = tokenizer, prompt_length, style

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
        texts = self._tokenizer.batch_decode(input_ids[:, self._prompt_length :], skip_special_tokens=True)
        ended = [cut_reply(text, self._style) is not None for text in texts]
        return torch.tensor(ended, device=input_ids.device)


@torch.no_grad()
def _generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[list[int]],
    style: Style,
    max_new_tokens: int,
) -> list[str]:
    length = max(map(len, rows))
    end = model.generation_config.eos_token_id if model.generation_config else None
    end = tokenizer.eos_token_id if end is None else end
    pad = tokenizer.pad_token_id
    if pad is None:
        pad = end[0] if isinstance(end, list) else (end or 0)
    ids = torch.full((len(rows), length), pad, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, length - len(row) :] = torch.tensor(row)
        mask[i, length - len(row) :] = 1
    with whole_head_input(model):
        output: Tensor = model.generate(  # type: ignore[operator]
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=GenerationConfig(
                do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=pad, eos_token_id=end
            ),
            stopping_criteria=StoppingCriteriaList([_ReplyEnded(tokenizer, length, style)]),
        )
    texts = tokenizer.batch_decode(output[:, length:], skip_special_tokens=True)
    return [text if (cut := cut_reply(text, style)) is None else cut for text in texts]
