"""LocalCritic: a causal language model in this process as the critic, by its labels or by its words."""

import copy
import logging
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Literal

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trl.critic.generate import greedy_replies
from trl.critic.parse import parse_critique
from trl.critic.score import can_pack, label_margins, plain_label_margins
from trl.critic.template import PromptTemplate
from trl.critic.types import Critique, CritiqueRequest
from trl.critic.windows import NEUTRAL_PHRASES, ScorePrompt, TextWindows, document_phrases
from trl.metrics import position_limit

logger = logging.getLogger(__name__)


class LocalCritic:
    """Critiques with a ``transformers`` causal LM: a frozen snapshot of the policy, or any other model.

    ``mode="generate"``: the model reads the few-shot prompt and writes the critique, greedily; its chat
    template is used when it has one. ``mode="score"``, for models too small to write one: after a few-shot
    prompt, logit(good label) - logit(bad label) is read for each word and each window of ``window`` words;
    less the score of neutral phrases, words beyond ``margin`` are the spans. In the styles that mark flaws
    only (toxicity, summary) the good words are left out.

    The model's mode, gradients and parameters stay as they are.

    Args:
        template: "generate": a critic prompt; "score": a scoring prompt (``prompts/score_*.txt``).
        model: a causal LM in evaluation mode.
        tokenizer: its tokenizer.
        dtype: work with a copy of the weights in this dtype (bfloat16 halves the time on CPUs that have it,
            and takes half the memory of a float32 model once more); None: with the model itself.
        window: words per window.
        margin: logits a word must be away from neutral. With the shipped prompt and SmolLM2-135M, 1.4 marks one
            word in ten of film reviews, three of four with the sign of the whole review.
        max_new_tokens: longest reply, for "generate".
        batch_size: prompts generated at once.

    Raises:
        ValueError: unknown mode, a scoring prompt without its label pair, or labels that are not one token;
            from ``critique``: the model is in training mode, where dropout would make the answers random.
    """

    def __init__(
        self,
        template: PromptTemplate,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        mode: Literal["generate", "score"] = "generate",
        *,
        dtype: torch.dtype | None = None,
        window: int = 3,
        margin: float = 1.4,
        max_new_tokens: int = 128,
        batch_size: int = 8,
    ) -> None:
        if mode not in ("generate", "score"):
            raise ValueError(f"mode is {mode!r}; expected 'generate' or 'score'")
        if window < 1 or margin < 0:
            raise ValueError(f"window is {window} and margin {margin}; expected window >= 1 and margin >= 0")
        self._template = template
        self._mode = mode
        self._model = model if dtype in (None, model.dtype) else _cast_copy(model, dtype)
        # A copy: fast tokenizers raise "Already borrowed" when two threads use one, and critics run beside
        # the trainer.
        self._tokenizer = copy.deepcopy(tokenizer)
        self._window, self._margin = window, margin
        self._max_new_tokens, self._batch_size = max_new_tokens, batch_size
        if mode == "score":
            self._prompt = ScorePrompt.from_template(template)
            self._labels = self._label_ids()
            self._packs: bool | None = None  # not known before the first batch

    def critique(self, requests: Sequence[CritiqueRequest]) -> list[Critique]:
        """One critique per request, in order."""
        if self._model.training:
            raise ValueError(
                "the critic's model is in training mode, so dropout would make its answers random; call "
                "model.eval(), or give the critic a frozen copy"
            )
        if not requests:
            return []
        return self._score(requests) if self._mode == "score" else self._generate(requests)

    def scores(self, phrases: Iterable[str], request: CritiqueRequest | None = None) -> dict[str, float]:
        """logit(good label) - logit(bad label) of each phrase, before the baseline ("score" only).

        A prompt that shows the document takes it from ``request``.
        """
        distinct = sorted(set(phrases))
        if not distinct:
            return {}
        about = request or CritiqueRequest("")
        sequences = self._tokenizer([self._prompt.fill(phrase, about) for phrase in distinct])["input_ids"]
        if self._packs is None:
            self._packs = can_pack(self._model, sequences[:: max(1, len(sequences) // 4)], self._labels)
            if not self._packs:
                logger.warning(
                    "%s cannot score many phrases in one pass; scoring them row by row, which is slower",
                    type(self._model).__name__,
                )
        margins = label_margins if self._packs else plain_label_margins
        values = margins(self._model, sequences, self._labels)
        return dict(zip(distinct, values.tolist(), strict=True))

    def _score(self, requests: Sequence[CritiqueRequest]) -> list[Critique]:
        if self._prompt.shows_document:
            return [self._score_one(request) for request in requests]
        texts = [TextWindows.of(request, self._window) for request in requests]
        asked = {phrase for text in texts for phrase in text.phrases()}
        score = self.scores(asked.union(NEUTRAL_PHRASES))
        baseline = median(score[phrase] for phrase in NEUTRAL_PHRASES)
        return [self._marked(text, score, baseline) for text in texts]

    def _score_one(self, request: CritiqueRequest) -> Critique:
        """Against the request's own document; the zero is what the document's own words score."""
        text = TextWindows.of(request, self._window)
        neutral = document_phrases(request.document or "", self._window) or list(NEUTRAL_PHRASES)
        longest = self._prompt.fill(max([*text.phrases(), *neutral], key=len), request)
        # Room for a phrase that is shorter but has more tokens.
        if len(self._tokenizer(longest)["input_ids"]) + 16 > position_limit(self._model):
            return Critique(spans=(), status="failed", error="the prompt does not fit the model's context")
        score = self.scores([*text.phrases(), *neutral], request)
        return self._marked(text, score, median(score[phrase] for phrase in neutral))

    def _marked(self, text: TextWindows, score: Mapping[str, float], baseline: float) -> Critique:
        spans = text.spans(text.word_scores(score, baseline), self._margin)
        if self._template.style != "sentiment":
            spans = [span for span in spans if span.polarity == "negative"]
        return Critique(spans=tuple(spans), status="ok" if spans else "none")

    def _generate(self, requests: Sequence[CritiqueRequest]) -> list[Critique]:
        replies = greedy_replies(
            self._model,
            self._tokenizer,
            [self._template.fill(request) for request in requests],
            style=self._template.style,
            max_new_tokens=self._max_new_tokens,
            batch_size=self._batch_size,
        )
        return [
            parse_critique(reply, self._template.style)
            if reply is not None
            else Critique(spans=(), status="failed", error="the prompt does not fit the model's context")
            for reply in replies
        ]

    def _label_ids(self) -> tuple[int, int]:
        """Ids of the two label words as they follow a phrase."""
        prompt = self._prompt.fill("this", CritiqueRequest("this", document="this", score=0.0))
        start = self._tokenizer(prompt)["input_ids"]
        ids = []
        for label in self._prompt.labels:
            longer = self._tokenizer(f"{prompt} {label}")["input_ids"]
            if len(longer) != len(start) + 1 or longer[:-1] != start:
                raise ValueError(
                    f"label {label!r} is not one token of {type(self._tokenizer).__name__} after a space; choose "
                    "a pair of common words for the scoring prompt's first line"
                )
            ids.append(longer[-1])
        return ids[0], ids[1]


def _cast_copy(model: PreTrainedModel, dtype: torch.dtype | None) -> PreTrainedModel:
    """A frozen copy with its parameters in ``dtype``. Buffers keep theirs: rotary frequencies need float32."""
    copied = copy.deepcopy(model).requires_grad_(False)
    for parameter in copied.parameters():
        parameter.data = parameter.data.to(dtype)
    return copied
