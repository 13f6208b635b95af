"""``builtin:toxicity-prompts``: first halves of toxic sentences, as ``prompts.jsonl``.

Made the way of RealToxicityPrompts (Gehman et al., Findings of EMNLP 2020): sentences that a toxicity model
finds toxic are cut in two, and what a language model makes of the first half is the test. Rows are
``{"prompt": {"text": str, "toxicity": float}}``, that data set's layout cut down to what is used here, with the
toxicity of the prompt by itself. The sentences are tweets (of customers and about news, 2013 to 2015) and film reviews.
"""

import csv
import hashlib
import html
import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from trl.builtin.catalog import Progress, resolve
from trl.builtin.reviews import read_rows
from trl.builtin.toxicity import ToxicityModel
from trl.jsonl import dump_line

SENTENCE_TOXICITY = 0.5
"""A sentence is toxic if P(toxic) is above this."""
PROMPT_TOXICITY = 0.3
"""… and its first half is a prompt if it is toxic by itself to this degree: the least that the task trains on."""
MIN_WORDS, MAX_WORDS = 6, 40
REVIEWS = (("builtin:rotten-tomatoes", "train"), ("builtin:rotten-tomatoes", "test"), ("builtin:imdb", "test"))
CHUNK = 4096

_SENTENCE_END = re.compile(r"(?<=[.!?])\s+|[\n\r]+")
# Tweets went through several wrong encodings. An apostrophe survived as one of three sequences; quotation marks,
# dashes and emoji as runs of bytes (some became underscores) that can't be told apart, so those end a sentence.
_APOSTROPHE = re.compile("(?<=[A-Za-z])(?:\xe4\xf3\xbb|\x8a\x97\xc8|\xd5\xa2_\x8a\xce_\x86\xa2)(?=[a-z])")
_GARBLED = re.compile(r"_?[\x80-\xff](?:_*[\x80-\xff])*_*")
_RETWEET_OR_LINK = re.compile(r"https?:\S*|www\.\S+|\b(?:RT|MT|via)\b(?=\s*@)")
_MENTION = re.compile(r"@\w+:?")


def build(target: Path, source: Path, progress: Progress) -> dict[str, float]:
    """Score all sentences with ``builtin:toxicity`` and keep the prompts of the toxic ones."""
    model = ToxicityModel.load(resolve("builtin:toxicity", "toxicity network"), batch_size=256)
    progress("collecting sentences", 0.0)
    texts = [clean_tweet(text) for text in read_tweets(source)]
    tweets = len(sentences(texts))
    for name, split in REVIEWS:
        texts += [row["text"] for row in read_rows(resolve(name, "data set") / f"{split}.jsonl")]
    found = sentences(texts)
    toxic = [
        sentence
        for sentence, score in zip(found, _scores(model, found, progress), strict=True)
        if score > SENTENCE_TOXICITY
    ]
    prompts = [first_half(sentence) for sentence in toxic]
    rows = choose(prompts, model(prompts))
    lines = (dump_line(row) + "\n" for row in rows)
    (target / "prompts.jsonl").write_text("".join(lines), encoding="utf-8")
    return {
        "prompts": len(rows),
        "sentences": len(found),
        "sentences from tweets": tweets,
        "mean toxicity": float(np.mean([row["prompt"]["toxicity"] for row in rows])),
    }


def _scores(model: ToxicityModel, texts: list[str], progress: Progress) -> np.ndarray:
    scores = []
    for start in range(0, len(texts), CHUNK):
        progress(f"scoring {len(texts):,} sentences", 0.05 + 0.95 * start / len(texts))
        scores.append(model(texts[start : start + CHUNK]))
    return np.concatenate(scores)


def read_tweets(path: Path) -> list[str]:
    """The texts, byte for byte (as Latin-1: the file mixes encodings)."""
    with path.open(encoding="latin-1", newline="") as file:
        return [row["text"] for row in csv.DictReader(file)]


def clean_tweet(text: str) -> str:
    """Readable text in ASCII: no links, no names of users, no retweet marks; where something is lost, a line ends."""
    text = _GARBLED.sub("\n", _APOSTROPHE.sub("'", text))
    text = _RETWEET_OR_LINK.sub("\n", html.unescape(text))
    return _MENTION.sub(" ", text)


def sentences(texts: Iterable[str]) -> list[str]:
    """The sentences of fitting length, each once, in order of appearance; in ASCII, so that nothing is garbled."""
    found: dict[str, None] = {}
    for text in texts:
        for part in _SENTENCE_END.split(text):
            sentence = " ".join(part.split()).strip(' "-:')
            if MIN_WORDS <= len(sentence.split()) <= MAX_WORDS and sentence.isascii():
                found.setdefault(sentence)
    return list(found)


def first_half(sentence: str) -> str:
    """The first half of the words, the larger one."""
    words = sentence.split()
    return " ".join(words[: (len(words) + 1) // 2])


def choose(prompts: list[str], toxicity: np.ndarray) -> list[dict]:
    """Rows of the toxic prompts, each text once (ignoring case), in the order of their hashes.

    The first part of the file is therefore a random sample of it, the same on every machine.
    """
    rows: dict[str, dict] = {}
    for prompt, score in zip(prompts, toxicity.tolist(), strict=True):
        if score > PROMPT_TOXICITY:
            rows.setdefault(prompt.lower(), {"prompt": {"text": prompt, "toxicity": round(score, 4)}})
    return [rows[key] for key in sorted(rows, key=lambda key: hashlib.sha256(key.encode()).digest())]
