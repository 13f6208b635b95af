"""Small tokenizers of every kind the critic's alignment must serve, trained here on a few sentences."""

import random
from collections.abc import Callable
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

SENTENCES = [
    "The film was quite boring or in parts badly made, but the cast is great.",
    "I will never watch this bad and sad movie again; do not bother!",
    "A delightful surprise: warm, funny and clever. It isn't long.",
    "Der Film war schön, das Ende natürlich nicht. Ça alors, déjà vu!",
    "Nobody's perfect, said the critic, and she's right. We've seen worse.",
    "映画は面白い 🎬👍 très bien — naïve “quotes” and ‘more’ of them…",
]
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def _wrap(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def byte_level() -> PreTrainedTokenizerFast:
    """GPT-2, Llama 3, SmolLM: byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    wrapped = _wrap(tokenizer)
    wrapped.add_tokens(["\n\n\n", "<tool>", AddedToken("<|reserved|>", special=True)])
    return wrapped


def _sentencepiece_bpe(decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=220, special_tokens=SPECIAL, show_progress=False)
    trained.train_from_iterator([s for s in SENTENCES if s.isascii()], trainer)
    vocabulary = {**trained.get_vocab()}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoder
    return _wrap(tokenizer)


def byte_fallback() -> PreTrainedTokenizerFast:
    """Llama 2: SentencePiece BPE with byte fallback; the decoder takes one leading space off."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _sentencepiece_bpe(decoders.Sequence(steps))


def byte_fallback_unstripped() -> PreTrainedTokenizerFast:
    """Gemma: the same without the leading space's special treatment."""
    return _sentencepiece_bpe(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def unigram() -> PreTrainedTokenizerFast:
    """T5, XLNet: SentencePiece Unigram with Metaspace."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=160, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return _wrap(tokenizer)


def wordpiece() -> PreTrainedTokenizerFast:
    """BERT: words joined by spaces, continuations marked with ##."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=260, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return _wrap(tokenizer)


def word_suffix() -> PreTrainedTokenizerFast:
    """OpenAI's first GPT: the word's end is marked. Has no fast path here, so it tests the general one."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    trainer = trainers.BpeTrainer(
        vocab_size=260, special_tokens=SPECIAL, end_of_word_suffix="</w>", show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    return _wrap(tokenizer)


def slow_bytes() -> PreTrainedTokenizerBase:
    """ByT5: one byte per token, a slow (pure Python) tokenizer."""
    return ByT5Tokenizer(extra_ids=0)


KINDS: dict[str, Callable[[], PreTrainedTokenizerBase]] = {
    make.__name__: make
    for make in (
        byte_level,
        byte_fallback,
        byte_fallback_unstripped,
        unigram,
        wordpiece,
        word_suffix,
        slow_bytes,
    )
}
FAST_PATHS = ["byte_level", "byte_fallback", "byte_fallback_unstripped", "unigram", "wordpiece"]
LOSSLESS = ["byte_level", "byte_fallback", "byte_fallback_unstripped", "slow_bytes"]


@cache
def tokenizer_of(kind: str) -> PreTrainedTokenizerBase:
    return KINDS[kind]()


@cache
def _byte_tokens(kind: str) -> dict[bytes, int]:
    """Tokens of a lossless tokenizer by the bytes they stand for."""
    tokenizer = tokenizer_of(kind)
    hidden = set(tokenizer.all_special_ids)
    if kind == "byte_level":
        stand_in = _stand_ins()
        entries = {
            bytes(stand_in[char] for char in token): i
            for token, i in tokenizer.get_vocab().items()
            if i not in hidden and all(char in stand_in for char in token)
        }
    elif kind == "slow_bytes":
        entries = {bytes([byte]): byte + 3 for byte in range(256)}
    else:
        entries = {}
        for token, i in tokenizer.get_vocab().items():
            if token.startswith("<0x"):
                entries.setdefault(bytes([int(token[3:5], 16)]), i)
            elif i not in hidden:
                entries[token.replace("▁", " ").encode()] = i
    return entries


def _stand_ins() -> dict[str, int]:
    """Byte-level BPE's letter for each byte, asked from the library rather than from our own table."""
    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    letters: dict[str, int] = {}
    for code in [*range(0x80), *range(0x80, 0x800), 0x800, *range(0x1000, 0x10000, 0x1000), 0x10000]:
        if 0xD800 <= code < 0xE000:
            continue
        char = chr(code)
        letters.update(zip(pre_tokenizer.pre_tokenize_str(char)[0][0], char.encode(), strict=True))
    for code in range(0x10000, 0x110000, 0x10000):
        letters.update(zip(pre_tokenizer.pre_tokenize_str(chr(code))[0][0], chr(code).encode(), strict=True))
    return letters


def random_split(kind: str, text: str, rng: random.Random) -> list[int]:
    """One of the many id sequences that decode to ``text``, seldom the tokenizer's own."""
    entries = _byte_tokens(kind)
    data = text.encode()
    ids = []
    at = 0
    while at < len(data):
        fitting = [width for width in range(1, 12) if data[at : at + width] in entries and at + width <= len(data)]
        width = rng.choice(fitting)
        ids.append(entries[data[at : at + width]])
        at += width
    return ids
