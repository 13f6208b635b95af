"""The toxicity reward from an OpenAI-compatible moderation endpoint (``/v1/moderations``)."""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai

from trl.clients import KEY_VARIABLE, EndpointAuthError
from trl.limits import RateLimit
from trl.reply_cache import ReplyCache, reply_key
from trl.rewards.endpoint import Answer, JsonEndpoint
from trl.rewards.perspective import Text, response_text

logger = logging.getLogger(__name__)

CATEGORIES = ("harassment", "hate", "violence")
_REFUSED = frozenset({401, 403, 404})


class ModerationReward:
    """1 − the highest of the harassment, hate and violence scores of each response, in [0, 1].

    Key and address come from OPENAI_API_KEY and OPENAI_BASE_URL, as for the critic. Texts go out in batches, the
    same text once per call, blank ones not at all. Where a batch is refused (4xx) its texts are asked one by one, so
    that one text does not cost the others their verdict. None where there is no verdict; ``errors`` counts why.

    Args:
        model: the moderation model's name at the endpoint.
        base_url: the endpoint; None: OPENAI_BASE_URL, else OpenAI.
        batch_size: texts per request.
        requests_per_minute: of the whole run, divided over its processes; None: as fast as it goes.
        cache: folder that keeps scores, also for other processes and later runs.
        max_concurrency, timeout, max_retries, backoff: see :class:`trl.rewards.endpoint.JsonEndpoint`.

    Raises:
        EndpointAuthError: no OPENAI_API_KEY for OpenAI; or from a call: the endpoint refuses the key (401), or,
            before it has scored anything, answers 403 or 404.
    """

    def __init__(
        self,
        model: str = "omni-moderation-latest",
        *,
        base_url: str | None = None,
        batch_size: int = 32,
        requests_per_minute: int | None = None,
        cache: str | Path | None = None,
        max_concurrency: int = 8,
        timeout: float = 30.0,
        max_retries: int = 5,
        backoff: float = 1.0,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}; expected 1 or more")
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not key and base_url is None and not os.environ.get("OPENAI_BASE_URL"):
            raise EndpointAuthError(
                f"no key for OpenAI: set the environment variable {KEY_VARIABLE}, "
                "or give the base URL of another server"
            )
        self.model, self.batch_size = model, batch_size
        self.errors: Counter[str] = Counter()
        self.__name__ = "moderation_reward"  # trainers that take a list of reward functions report by this
        # The SDK knows where requests go and for whom; what it lacks is a limit on their rate.
        settings = openai.OpenAI(api_key=key or "none", base_url=base_url)
        headers = {"OpenAI-Organization": settings.organization, "OpenAI-Project": settings.project}
        self._endpoint = JsonEndpoint(
            f"{settings.base_url}moderations",
            {"Authorization": f"Bearer {key}" if key else None, **headers},
            max_concurrency=max_concurrency,
            timeout=timeout,
            max_retries=max_retries,
            backoff=backoff,
            rate=RateLimit.of_run(requests_per_minute, None),
        )
        self._cache = None if cache is None else ReplyCache(cache)
        self._accepted = False  # True once the endpoint has scored a text
        logger.info("Moderation: responses are sent to %s (model %s)", self._endpoint.url, model)

    def __call__(self, *, completions: Sequence[Text], **_ignored: object) -> list[float | None]:
        """One reward per response."""
        # a lone surrogate has no UTF-8 form
        texts = [response_text(c).encode(errors="replace").decode() for c in completions]
        verdicts = self._verdicts([text for text in dict.fromkeys(texts) if text.strip()])
        rewards: list[float | None] = []
        for text in texts:
            verdict = verdicts.get(text, "empty text, not sent")
            if isinstance(verdict, str):
                self.errors[verdict] += 1
            rewards.append(None if isinstance(verdict, str) else 1.0 - verdict)
        return rewards

    def close(self) -> None:
        """Close the connections."""
        self._endpoint.close()

    def _verdicts(self, texts: list[str]) -> dict[str, float | str]:
        """Of each text the highest score, or why there is none."""
        verdicts: dict[str, float | str] = {}
        if self._cache is not None:
            keys = {text: self._key(text) for text in texts}
            kept = self._cache.get(list(keys.values()))
            known = {text: _probability(_number(kept.get(key, ""))) for text, key in keys.items()}
            verdicts |= {text: score for text, score in known.items() if score is not None}
        unknown = [text for text in texts if text not in verdicts]
        size = self.batch_size
        batches = [unknown[start : start + size] for start in range(0, len(unknown), size)]
        refused = self._ask(batches, verdicts)
        self._ask([[text] for batch in refused for text in batch if len(batch) > 1], verdicts)
        if self._cache is not None:
            scores = {text: verdict for text in unknown if isinstance(verdict := verdicts[text], float)}
            self._cache.put({self._key(text): repr(score) for text, score in scores.items()})
        return verdicts

    def _ask(self, batches: list[list[str]], verdicts: dict[str, float | str]) -> list[list[str]]:
        """Fill in the verdicts of some batches; returns those that were refused."""
        refused = []
        bodies = ({"model": self.model, "input": batch} for batch in batches)
        for number, answer in self._endpoint.post_each(bodies):
            batch = batches[number]
            self._raise_if_refused(answer)
            if answer.error is not None and not answer.transient and answer.status_code != 200:
                refused.append(batch)
            verdicts |= zip(batch, _scores(answer, len(batch)), strict=True)
        return refused

    def _key(self, text: str) -> str:
        return reply_key(endpoint=self._endpoint.url, model=self.model, categories=CATEGORIES, text=text)

    def _raise_if_refused(self, answer: Answer) -> None:
        if answer.status_code == 401 or (answer.status_code in _REFUSED and not self._accepted):
            raise EndpointAuthError(
                f"{self._endpoint.url} answered {answer.error} for model {self.model!r}: "
                f"check {KEY_VARIABLE}, the base URL and the model's name"
            )
        self._accepted = self._accepted or answer.error is None


def _scores(answer: Answer, count: int) -> list[float | str]:
    """The highest score of each text of a batch, or why there is none."""
    if answer.error is not None:
        return [answer.error] * count
    match answer.data:
        case {"results": list(results)} if len(results) == count:
            return [_highest(result) for result in results]
    return [f"malformed reply (expected {count} results)"] * count


def _highest(result: Any) -> float | str:
    scores = result.get("category_scores") if isinstance(result, dict) else None
    found = [_probability(scores.get(name)) if isinstance(scores, dict) else None for name in CATEGORIES]
    numbers = [score for score in found if score is not None]
    if len(numbers) < len(CATEGORIES):
        return f"no score for one of {', '.join(CATEGORIES)} in the reply"
    return max(numbers)


def _probability(value: Any) -> float | None:
    """``value`` if that is a probability; NaN is none."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
