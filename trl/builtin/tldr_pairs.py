"""``builtin:tldr-pairs``: preference pairs, an article's own lead sentence against a worse summary made from real text.

Nobody judged these pairs: the preferred text is the journalist's sentence, and what makes the other one worse is known
(its ``kind``). Three kinds an article, drawn from those below, are made with the help of another article of the same
split (splits are those of ``builtin:tldr``):

- ``other``: the lead of another article, the one of many of about this length that has most words in common;
- ``names``: the lead with its names and figures replaced by the other article's;
- ``splice``: the first half of the lead, the second half of the other's;
- ``order``: the lead with the words of neighbouring groups shuffled;
- ``repeat``: the lead up to some word, then its last few words over and over;
- ``detail``: a sentence of the article's body;
- ``length``: the lead cut off after half of its words, or followed by half of a sentence of the other article.

Rejected texts begin with a capital and end in a full stop as all leads do, and (but for ``length``, shorter as often
as longer) have about the lead's length, so that no one surface cue tells the two apart. How far judges that never see
the prompt get is measured when the pairs are made (`baselines`); % right of the 1,215 pairs of valid and test:

====================== ==== ===== ===== ====== ===== ====== ====== ======
judge                   all other names splice order repeat detail length
====================== ==== ===== ===== ====== ===== ====== ====== ======
the longer text          52    53    59     49    51     51     56     49
the one with a "."       50    50    50     50    50     50     50     50
logistic, eight counts   66    40    64     57    51    100     65     86
logistic, bag of words   60    51    64     54    51     57     75     71
====================== ==== ===== ===== ====== ===== ====== ====== ======

The eight counts (`_lengths`: words, characters, different words, capitals, …) see all repetition and most odd lengths:
a reward model should beat 66, and ``other`` and ``names`` show whether it reads the article. Rows of ``train.jsonl``,
``valid.jsonl`` and ``test.jsonl`` are ``{"prompt", "chosen", "rejected", "kind"}``, in an order that mixes the kinds.
"""

import hashlib
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trl.builtin.catalog import Progress, resolve
from trl.builtin.tldr import END, split_sentences
from trl.jsonl import dump_line, read_jsonl

KINDS_PER_ARTICLE = 3
SAMPLED, COMPARED = 300, 60
"""Of so many random articles, those whose leads are nearest in length are compared for the other article."""
DETAIL_SLACK = 6
"""Words that a sentence of the body may be longer or shorter than the lead."""
GROUP = 5
"""Words that ``order`` shuffles together."""

_NAME = re.compile(r"\b[A-Z][\w'&-]*(?: (?:of |de |the )?[A-Z][\w'&-]*)*")
_FIGURE = re.compile(r"(?<!\w)[£$€]?\d(?:[\d,.]*\d)?(?:%|bn\b|m\b|th\b|st\b|nd\b|rd\b|\b)")
_COMMON = frozenset({"a", "an", "and", "as", "at", "by", "for", "from", "in", "is", "it", "of", "on", "s", "the", "to"})
_REFERRING = frozenset(
    {"He", "She", "It", "They", "We", "I", "His", "Her", "Its", "Their", "This", "That", "These", "But"}
)

Pair = dict[str, str]


@dataclass(frozen=True)
class Summary:
    """A row of ``builtin:tldr``."""

    prompt: str
    lead: str

    @property
    def document(self) -> str:
        """The text of the prompt."""
        return self.prompt.removesuffix(END)

    @property
    def words(self) -> list[str]:
        """Of the lead, split at spaces."""
        return self.lead.split()


def build(target: Path, source: None, progress: Progress) -> dict[str, float]:
    """Write the three splits; returns their sizes and what `baselines` reach."""
    rows = resolve("builtin:tldr", "summaries")
    splits: dict[str, list[Pair]] = {}
    for name in ("train", "valid", "test"):
        progress(f"making the pairs of {name}", 0.2 * len(splits))
        summaries = [Summary(row["prompt"], row["label"]) for row in read_jsonl(rows / f"{name}.jsonl")]
        splits[name] = make_pairs(summaries)
        lines = (dump_line(pair) + "\n" for pair in splits[name])
        (target / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    progress("measuring what surface cues tell", 0.7)
    sizes = {name: len(pairs) for name, pairs in splits.items()}
    return {**sizes, **baselines(splits["train"], splits["valid"] + splits["test"])}


def make_pairs(summaries: Sequence[Summary]) -> list[Pair]:
    """``KINDS_PER_ARTICLE`` pairs a summary (fewer where a kind can't be made of it), in the order of their hashes."""
    content = [_content(summary.lead) for summary in summaries]
    pairs: list[Pair] = []
    for index, summary in enumerate(summaries):
        draw = random.Random(summary.lead)
        alike = _most_alike(index, summaries, content, draw)
        kinds = draw.sample(sorted(MAKERS), len(MAKERS))
        made = ((kind, MAKERS[kind](summary, alike, draw)) for kind in kinds)
        usable = [(kind, text) for kind, text in made if text and text != summary.lead]
        pairs += [
            {"prompt": summary.prompt, "chosen": summary.lead, "rejected": text, "kind": kind}
            for kind, text in usable[:KINDS_PER_ARTICLE]
        ]
    return sorted(pairs, key=lambda pair: hashlib.sha256(f"{pair['prompt']}{pair['rejected']}".encode()).digest())


def _content(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower())) - _COMMON


def _most_alike(index: int, summaries: Sequence[Summary], content: Sequence[set[str]], draw: random.Random) -> Summary:
    """Another summary of about this one's length: of some random ones, that with most words in common."""
    length = len(summaries[index].words)
    others = [other for other in range(len(summaries)) if other != index]
    some = draw.sample(others, min(SAMPLED, len(others)))
    near = sorted(some, key=lambda other: abs(len(summaries[other].words) - length))[:COMPARED]
    return summaries[max(near, key=lambda other: len(content[other] & content[index]))]


def sentence(words: Sequence[str]) -> str:
    """The words with a capital first, one full stop and nothing else last, and no half of a quotation."""
    text = " ".join(words).rstrip(" .,;:!?-\"'(")
    if text.count('"') % 2:
        text = text.replace('"', "")
    return f"{text[:1].upper()}{text[1:]}."


def other(summary: Summary, alike: Summary, draw: random.Random) -> str:
    """The other article's lead."""
    return alike.lead


def names(summary: Summary, alike: Summary, draw: random.Random) -> str:
    """The lead with another article's names and figures; empty if it has none to replace."""
    text = summary.lead
    for pattern in (_FIGURE, _NAME):
        foreign = [found for found in _found(pattern, f"{alike.lead} {alike.document}") if found not in summary.lead]
        for own in _found(pattern, text):
            fitting = [found for found in foreign if len(found.split()) == len(own.split())] or foreign
            if fitting:
                chosen = draw.choice(fitting)
                foreign.remove(chosen)
                whole = rf"(?<!\w){re.escape(own)}(?!\w)"  # U2 is not 2
                text = re.sub(whole, chosen.replace("\\", "\\\\"), text)
    return text


def _found(pattern: re.Pattern[str], text: str) -> list[str]:
    """What matches within the sentences of ``text``, once each; their first words are capitals for another reason."""
    found: dict[str, None] = {}
    for part in split_sentences(text):
        for match in pattern.finditer(part):
            if match.start() > 0 or " " in match.group():
                found.setdefault(match.group())
    return list(found)


def splice(summary: Summary, alike: Summary, draw: random.Random) -> str:
    """The first half of this lead, then the other lead's second half."""
    cut = len(summary.words) // 2
    return sentence([*summary.words[:cut], *alike.words[len(alike.words) // 2 :]])


def order(summary: Summary, alike: Summary, draw: random.Random) -> str:
    """Every group of words shuffled, but for the first and the last word of the sentence."""
    first, *middle, last = summary.words
    shuffled: list[str] = []
    for start in range(0, len(middle), GROUP):
        group = middle[start : start + GROUP]
        shuffled += draw.sample(group, len(group))
    return sentence([first, *shuffled, last])


def repeat(summary: Summary, alike: Summary, draw: random.Random) -> str:
    """The lead up to a word between a third and two thirds of it, the rest filled with the last few words."""
    words = summary.words
    length = draw.randint(2, 4)
    cut = max(length, draw.randint(len(words) // 3, 2 * len(words) // 3))
    phrase = words[cut - length : cut]
    filler = phrase * len(words)
    return sentence([*words[:cut], *filler[: len(words) - cut]])


def detail(summary: Summary, alike: Summary, draw: random.Random) -> str:
    """The sentence of the body whose length is nearest to the lead's; empty if it is far from it.

    Sentences that quote, or say "he" or "but" of what went before, would be told from leads by that alone.
    """
    length = len(summary.words)
    parts = [
        part
        for part in split_sentences(summary.document)
        if '"' not in part and part.endswith(".") and part.split()[0] not in _REFERRING
    ]
    nearest = min(parts, key=lambda part: abs(len(part.split()) - length), default="")
    return nearest if abs(len(nearest.split()) - length) <= DETAIL_SLACK else ""


def length(summary: Summary, alike: Summary, draw: random.Random) -> str:
    """Half of the lead, or the lead and half as much of the other article's text."""
    words = summary.words
    half = len(words) // 2
    if draw.random() < 0.5:
        return sentence(words[:half])
    return sentence([*words[:-1], words[-1].rstrip("."), *alike.document.split()[:half]])


MAKERS: dict[str, Callable[[Summary, Summary, random.Random], str]] = {
    maker.__name__: maker for maker in (other, names, splice, order, repeat, detail, length)
}


def baselines(train: Sequence[Pair], held_out: Sequence[Pair]) -> dict[str, float]:
    """% of held-out pairs that judges who don't see the prompt get right; a tie counts as half."""
    import numpy as np
    from scipy import sparse
    from sklearn.feature_extraction.text import CountVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import MaxAbsScaler

    def right(differences: np.ndarray) -> float:
        return 100.0 * float(np.mean((differences > 0) + 0.5 * (differences == 0)))

    def by(score: Callable[[str], float]) -> float:
        return right(np.array([score(pair["chosen"]) - score(pair["rejected"]) for pair in held_out]))

    def learned(features: Callable[[list[str]], Any]) -> float:
        """Logistic regression on the differences of the two texts' features."""
        seen, new = (
            sparse.csr_matrix(features([pair["chosen"] for pair in pairs]))
            - sparse.csr_matrix(features([pair["rejected"] for pair in pairs]))
            for pairs in (train, held_out)
        )
        scaler = MaxAbsScaler().fit(seen)
        both = sparse.vstack([seen, -seen])
        model = LogisticRegression(fit_intercept=False, max_iter=1000)
        model.fit(scaler.transform(both), np.repeat([1, 0], len(train)))
        return right(model.decision_function(scaler.transform(new)))

    vectorizer = CountVectorizer(min_df=3, token_pattern=r"\w+|[^\w\s]").fit([pair["chosen"] for pair in train])
    return {
        "longer": by(len),
        "ends with a full stop": by(lambda text: text.endswith(".")),
        "lengths": learned(lambda texts: np.array([_lengths(text) for text in texts], dtype=np.float64)),
        "words": learned(lambda texts: vectorizer.transform(texts).astype(np.float64)),
    }


def _lengths(text: str) -> list[float]:
    words = text.split()
    return [
        len(words),
        len(words) ** 2,
        len(text),
        len(text) / len(words),
        len(set(words)) / len(words),
        text.count(","),
        sum(word[0].isupper() for word in words),
        sum(character.isdigit() for character in text),
    ]
