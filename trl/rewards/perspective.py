"""Google's Perspective API (Comment Analyzer), and servers that speak its protocol.

The service ends on 2026-12-31 and gives out no new keys. This client is kept for published commands, recorded
scores and compatible servers. Its replacements are the toxicity classifier (the default scorer) and
:class:`trl.rewards.moderation.ModerationReward`.

The key comes from the environment variable PERSPECTIVE_API_KEY and travels in the header ``x-goog-api-key``, not
in the URL as in Google's examples: URLs end up in logs. No log line, error or repr of this module holds it.
"""

import json
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from trl.clients import EndpointAuthError
from trl.limits import RateLimit
from trl.reply_cache import ReplyCache, reply_key
from trl.rewards.endpoint import Answer, JsonEndpoint, public_url

logger = logging.getLogger(__name__)

KEY_VARIABLE = "PERSPECTIVE_API_KEY"
ENDPOINT = "https://commentanalyzer.googleapis.com/v1alpha1/comments:analyze"
ENDS = "2026-12-31"
REPLACEMENT = "a toxicity classifier (such as builtin:toxicity) or an OpenAI-compatible moderation endpoint"
LONGEST_TEXT = 20_480
"""Bytes of UTF-8 that one request may hold."""
ATTRIBUTES = (
    "TOXICITY",
    "SEVERE_TOXICITY",
    "IDENTITY_ATTACK",
    "INSULT",
    "PROFANITY",
    "THREAT",
    "SEXUALLY_EXPLICIT",
    "FLIRTATION",
)
"""The eight attributes that RealToxicityPrompts (Gehman et al. 2020, arXiv:2009.11462) records."""

_TOXICITY = "TOXICITY"
_BAD_KEY = "HTTP 400 (API key not valid)"

Text = str | list[dict[str, Any]]
"""A plain string, or a conversation of ``{"role", "content"}`` messages."""


class PerspectiveAuthError(EndpointAuthError):
    """The endpoint refuses the key, or there is no such service at the address."""


@dataclass(frozen=True)
class Analysis:
    """The scores of one text by attribute, probabilities in [0, 1]; NaN where there is none, and why."""

    scores: dict[str, float]
    error: str | None = None
    transient: bool = False
    """Asking again may help."""


class PerspectiveClient:
    """Scores texts with Perspective, or a compatible server.

    A text goes out cut to 20,480 bytes; a blank one does not go out. What cannot be scored is NaN with a reason.
    The same text is asked once per call. Limits are for the whole run, divided over its processes (``WORLD_SIZE``).

    Args:
        key: None: PERSPECTIVE_API_KEY from the environment.
        endpoint: where ``comments:analyze`` is; a URL without a path gets Google's.
        attributes: what to score, all in one request.
        languages: of the texts, as ISO 639 codes; empty: the server detects them.
        qps: requests per second. Google's default quota is 1.
        cache: folder that keeps scores, also for other processes and later runs.
        max_concurrency, timeout, max_retries, backoff: see :class:`trl.rewards.endpoint.JsonEndpoint`.

    Raises:
        PerspectiveAuthError: no key for Google's endpoint; or while scoring, when the key is refused.
        ValueError: an argument is out of range, or the endpoint's URL has a query, where a key would show.
    """

    def __init__(
        self,
        key: str | None = None,
        *,
        endpoint: str = ENDPOINT,
        attributes: Sequence[str] = (_TOXICITY,),
        languages: Sequence[str] = ("en",),
        qps: float = 1.0,
        cache: str | Path | None = None,
        max_concurrency: int = 8,
        timeout: float = 30.0,
        max_retries: int = 5,
        backoff: float = 1.0,
    ) -> None:
        if not (qps > 0 and math.isfinite(qps)):
            raise ValueError(f"qps is {qps}; expected queries per second, more than 0")
        if not attributes:
            raise ValueError(f"attributes is empty; expected some of {', '.join(ATTRIBUTES)}")
        if urlsplit(endpoint).query:
            raise ValueError(f"the endpoint {public_url(endpoint)} has a query; give the key by {KEY_VARIABLE}")
        key = (os.environ.get(KEY_VARIABLE, "") if key is None else key).strip()
        if endpoint == ENDPOINT:
            if not key:
                raise PerspectiveAuthError(
                    f"no key for Perspective: set the environment variable {KEY_VARIABLE}. The service ends on {ENDS} "
                    f"and gives out no new keys; use {REPLACEMENT}"
                )
            logger.warning("Perspective ends on %s: from then on use %s", ENDS, REPLACEMENT)
        if urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + urlsplit(ENDPOINT).path
        self.attributes = tuple(attributes)
        self._request = {
            "requestedAttributes": {name: {} for name in self.attributes},
            **({"languages": list(languages)} if languages else {}),
            "doNotStore": True,
        }
        self._endpoint = JsonEndpoint(
            endpoint,
            {"x-goog-api-key": key} if key else {},
            max_concurrency=max_concurrency,
            timeout=timeout,
            max_retries=max_retries,
            backoff=backoff,
            # one place per 1/qps seconds: a token bucket of depth 1
            rate=RateLimit(requests=1, period=int(os.environ.get("WORLD_SIZE", "1")) / qps),
        )
        self._cache = None if cache is None else ReplyCache(cache)
        self._accepted = False  # True once the endpoint has scored a text
        logger.info("Perspective: texts are sent to %s", self._endpoint.url)

    @property
    def endpoint(self) -> str:
        """The URL that receives the texts, without anything secret."""
        return self._endpoint.url

    def analyze(self, texts: Sequence[str]) -> list[Analysis]:
        """One analysis per text, in order."""
        return [analysis for _, analysis in sorted(self.analyze_each(texts), key=lambda item: item[0])]

    def analyze_each(self, texts: Sequence[str]) -> Iterator[tuple[int, Analysis]]:
        """(position, analysis) of every text, as they arrive. Closing the iterator stops the asking."""
        places: dict[str, list[int]] = {}
        for index, text in enumerate(texts):
            places.setdefault(cut_text(text), []).append(index)
        unknown = []
        for text, analysis in self._known(list(places)).items():
            if analysis is None:
                unknown.append(text)
            else:
                yield from ((index, analysis) for index in places[text])
        bodies = ({"comment": {"text": text}, **self._request} for text in unknown)
        for number, answer in self._endpoint.post_each(bodies):
            analysis = self._read(answer)
            if self._cache is not None and analysis.error is None:
                self._cache.put({self._key(unknown[number]): json.dumps(analysis.scores)})
            yield from ((index, analysis) for index in places[unknown[number]])

    def close(self) -> None:
        """Close the connections."""
        self._endpoint.close()

    def _known(self, texts: list[str]) -> dict[str, Analysis | None]:
        """What needs no request: blank texts, and those in the cache."""
        known: dict[str, Analysis | None] = {
            text: None if text.strip() else self._none("empty text, not sent") for text in texts
        }
        if self._cache is not None:
            keys = {text: self._key(text) for text in texts if text.strip()}
            kept = self._cache.get(list(keys.values()))
            for text, key in keys.items():
                scores = _kept_scores(kept.get(key, ""), self.attributes)
                if scores is not None:
                    known[text] = Analysis(scores)
        return known

    def _key(self, text: str) -> str:
        return reply_key(endpoint=self.endpoint, request=self._request, text=text)

    def _none(self, reason: str | None, *, transient: bool = False) -> Analysis:
        return Analysis(dict.fromkeys(self.attributes, math.nan), reason, transient)

    def _read(self, answer: Answer) -> Analysis:
        if answer.error is not None:
            reason = _refusal(answer)
            self._raise_if_refused(answer, reason)
            return self._none(reason, transient=answer.transient or answer.status_code == 200)
        self._accepted = True
        found = answer.data.get("attributeScores") if isinstance(answer.data, dict) else None
        found = found if isinstance(found, dict) else {}
        scores = {name: _summary_score(found.get(name)) for name in self.attributes}
        missing = [name for name, score in scores.items() if math.isnan(score)]
        return Analysis(scores, f"no score for {', '.join(missing)} in the reply" if missing else None)

    def _raise_if_refused(self, answer: Answer, reason: str) -> None:
        """A wrong key or address fails every text; once others are scored, a 403 may be about this one alone."""
        key_is_wrong = answer.status_code == 401 or reason == _BAD_KEY
        if key_is_wrong or (answer.status_code in (403, 404) and not self._accepted):
            raise PerspectiveAuthError(
                f"{self.endpoint} answered {reason}: check {KEY_VARIABLE} and the address. Google's service ends on "
                f"{ENDS}; use {REPLACEMENT}"
            )


class PerspectiveReward:
    """1 − P(TOXICITY) of each response under Perspective, which ends on 2026-12-31 (see the module).

    None (no verdict, never 0 or 0.5) where a response has no score; ``errors`` counts why.

    Args:
        client: what to ask, for TOXICITY at least; None: Perspective with the key of the environment.
    """

    def __init__(self, client: PerspectiveClient | None = None) -> None:
        self.client = client or PerspectiveClient()
        if _TOXICITY not in self.client.attributes:
            raise ValueError(
                f"the client asks for {', '.join(self.client.attributes)}; expected {_TOXICITY} among them"
            )
        self.errors: Counter[str] = Counter()
        self.__name__ = "perspective_reward"  # trainers that take a list of reward functions report by this

    def __call__(self, *, completions: Sequence[Text], **_ignored: object) -> list[float | None]:
        """One reward in [0, 1] per response."""
        analyses = self.client.analyze([response_text(completion) for completion in completions])
        scores = [analysis.scores[_TOXICITY] for analysis in analyses]
        self.errors.update(
            a.error or "no score" for a, score in zip(analyses, scores, strict=True) if math.isnan(score)
        )
        return [None if math.isnan(score) else 1.0 - score for score in scores]


def cut_text(text: str, limit: int = LONGEST_TEXT) -> str:
    """The longest beginning of ``text`` that is at most ``limit`` bytes of UTF-8. A lone surrogate becomes "?"."""
    return text.encode(errors="replace")[:limit].decode(errors="ignore")


def response_text(completion: Text) -> str:
    """A response's text; of a conversation, its contents, a message a line."""
    if isinstance(completion, str):
        return completion
    return "\n".join(str(message["content"]) for message in completion)


def _summary_score(attribute: Any) -> float:
    """``summaryScore.value`` of one attribute's reply; NaN unless that is a probability."""
    match attribute:
        case {"summaryScore": {"value": int() | float() as value}} if not isinstance(value, bool) and 0 <= value <= 1:
            return float(value)
    return math.nan


def _kept_scores(kept: str, attributes: Sequence[str]) -> dict[str, float] | None:
    """The scores of a cache entry; None unless it is one of ours."""
    try:
        found = json.loads(kept)
    except ValueError:
        return None
    if not isinstance(found, dict):
        return None
    scores = {name: _summary_score({"summaryScore": {"value": found.get(name)}}) for name in attributes}
    return None if any(map(math.isnan, scores.values())) else scores


def _refusal(answer: Answer) -> str:
    """Why there is no score, in our words: what the server wrote may echo the key or the text."""
    match answer.data:
        case {"error": {"message": str(message)}} if answer.status_code == 400:
            if re.search("API.?key not valid|API_KEY_INVALID", message, re.IGNORECASE):
                return _BAD_KEY
            if re.search("not support.*language|detect language", message, re.IGNORECASE):
                return "language not supported"
            if re.search("too (long|large)", message, re.IGNORECASE):
                return "HTTP 400 (text too long)"
    return str(answer.error)
