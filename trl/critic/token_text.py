"""Token ids → text, with the character range that each token covers.

Everything starts from the ids that were sampled. The text is never tokenised again: a policy may sample
" bor" + "ing" where the tokenizer would write " boring", and rewards must land on what was sampled.

The usual fast tokenizers are decoded token by token (``decoders``). Those with other decoder steps, and the
slow ones, take the general way: decode every prefix and see which characters the last token added.
"""

from collections.abc import Callable, Sequence
from typing import cast

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from trl.critic.decoders import REPLACEMENT, Range, decoder_steps, run_steps


def token_ranges(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> tuple[str, list[Range]]:
    """The text of ``ids`` and the range of characters ``(start, end)`` that each id covers.

    The text is what ``tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)``
    gives. Tokens that share a character (each holds some of its bytes) all have it in their range. Special
    tokens, ids outside the vocabulary and tokens without text get an empty range.

    Args:
        ids: token ids (N,), as sampled.
        tokenizer: any transformers tokenizer, fast or slow.
    """
    hidden = set(tokenizer.all_special_ids)
    hidden.update(i for i, token in tokenizer.added_tokens_decoder.items() if token.special)
    # None for ids that the model has but the tokenizer doesn't (padded embedding rows).
    tokens = cast(list[str | None], tokenizer.convert_ids_to_tokens(list(ids)))
    shown = [n for n, (i, token) in enumerate(zip(ids, tokens, strict=True)) if i not in hidden and token is not None]

    steps = None
    if isinstance(tokenizer, PreTrainedTokenizerFast) and tokenizer.backend_tokenizer.decoder is not None:
        steps = decoder_steps(tokenizer.backend_tokenizer.decoder.__getstate__())
    if steps is None:
        visible = [ids[n] for n in shown]
        text, ranges = ranges_by_prefix(visible, lambda prefix: _decode(tokenizer, prefix))
    else:
        texts = [tokens[n] or "" for n in shown]
        text, ranges = run_steps(steps, texts)
    return text, _with_hidden(len(ids), dict(zip(shown, ranges, strict=True)), len(text))


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _with_hidden(count: int, shown: dict[int, Range], length: int) -> list[Range]:
    """Give the tokens that were left out an empty range where the next shown token starts."""
    ranges: list[Range] = []
    following = length
    for n in reversed(range(count)):
        ranges.append(shown.get(n, (following, following)))
        following = ranges[-1][0]
    return ranges[::-1]


def ranges_by_prefix(ids: Sequence[int], decode: Callable[[list[int]], str]) -> tuple[str, list[Range]]:
    """Ranges for any decoder, from the text of every prefix of ``ids``: quadratic in their number.

    A prefix that ends inside a character shows U+FFFD there; that character is open until a longer prefix
    agrees with the whole text. What was settled once stays settled: an unfinished run of byte tokens can hide
    characters that are complete. A decoder that shows nothing for an open character (ByT5) gives it to the token
    that completes it.
    """
    whole = decode(list(ids))
    ranges: list[Range] = []
    settled = end = 0
    for count in range(1, len(ids) + 1):
        prefix = decode(list(ids[:count]))
        start, settled = settled, max(settled, _common_length(prefix, whole))
        is_open = prefix[settled : settled + 1] == REPLACEMENT
        end = max(end, min(len(whole), settled + is_open))
        ranges.append((start, end))
    return whole, ranges


def _common_length(a: str, b: str) -> int:
    shorter = min(len(a), len(b))
    return next((n for n in range(shorter) if a[n] != b[n]), shorter)
