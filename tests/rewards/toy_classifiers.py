"""Small random sequence classifiers with a real tokenizer, saved as ordinary transformers folders."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

TEXTS = [
    "a wonderful film , warm and funny , with a great cast and a story that moves .",
    "a dreadful bore : bad jokes , a dull plot and no sense at all .",
    "the movie was good , the movie was bad , i do not know what to think of it .",
]


def save_classifier(folder: Path, labels: list[str], *, positions: int = 64, blocks: int = 2, seed: int = 0) -> Path:
    """A small BERT with random weights whose outputs depend strongly on the text."""
    # A vocabulary written out, because WordPiece training breaks ties differently from run to run.
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    words = sorted(set(" ".join(TEXTS).split()))
    letters = [mark + letter for mark in ("", "##") for letter in "abcdefghijklmnopqrstuvwxyz[]"]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(specials + words + letters))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, mask_token="[MASK]", **names)
    fast.save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(fast),
        hidden_size=32,
        num_hidden_layers=blocks,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=positions,
        initializer_range=0.3,
        num_labels=len(labels),
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        BertForSequenceClassification(config).save_pretrained(folder)
    return folder
