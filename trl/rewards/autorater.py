"""autoraterScorer: an LLM judge behind any endpoint that speaks OpenAI's chat protocol."""

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl.rewards.patterns import PatternError, Patterns
from trl.rewards.placeholders import fill, reference_values
from trl.rewards.schema import AutoraterScorer
from trl.rewards.scoring import Sample, Verdict, failure

if TYPE_CHECKING:
    from trl.chat_session import Reply

logger = logging.getLogger(__name__)

SECONDS = 60.0
"""What one answer may take."""
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)


@dataclass(frozen=True)
class JudgeSettings:
    """How judges are asked: limits of the whole run, divided over its processes, for each judge model."""

    cache: str | Path | None = None
    """Folder that keeps answers, also for other processes and later runs. Failures are not kept."""
    max_tokens: int = 1024
    """The longest answer."""
    max_concurrency: int = 16
    max_retries: int = 5
    backoff: float = 0.5
    """Seconds, see :class:`trl.clients.ChatClient`."""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    budget_requests: int | None = None
    budget_usd: float | None = None
    prices: tuple[float, float] | None = None
    """Dollars per million tokens of prompts and answers; the dollar budget needs them."""


class Judge:
    """One judge model. The key comes from OPENAI_API_KEY.

    A prompt is asked once per call, and never again when the cache has its answer. One call takes at most four times
    the time of one answer, with waiting and retries.

    Raises EndpointAuthError: no key, and no endpoint that may need none.
    """

    def __init__(self, model: str, base_url: str | None, timeout: float | None, settings: JudgeSettings) -> None:
        from trl.clients import ChatClient
        from trl.limits import Budget, RateLimit
        from trl.reply_cache import ReplyCache

        timeout = SECONDS if timeout is None else timeout
        self._client: ChatClient = ChatClient(
            model,
            base_url=base_url,
            max_tokens=settings.max_tokens,
            max_concurrency=settings.max_concurrency,
            timeout=timeout,
            deadline=4 * timeout,
            max_retries=settings.max_retries,
            backoff=settings.backoff,
            rate=RateLimit.of_run(settings.requests_per_minute, settings.tokens_per_minute),
            budget=Budget.of_run(settings.budget_requests, settings.budget_usd, settings.prices),
        )
        self._cache = None if settings.cache is None else ReplyCache(settings.cache)
        self._closed = False
        self._sampling = {"temperature": 0, "max_tokens": settings.max_tokens}
        logger.info("Judge: prompts and responses are sent to %s (model %s)", self._client.endpoint, model)

    def ask(self, prompts: Sequence[str]) -> "list[Reply]":
        """One reply per prompt, in order."""
        from trl.chat_session import Reply

        distinct = {prompt: self._key(prompt) for prompt in prompts}
        kept = self._cache.get(list(distinct.values())) if self._cache is not None else {}
        replies = {prompt: Reply(kept[key]) for prompt, key in distinct.items() if key in kept}
        unknown = [prompt for prompt in distinct if prompt not in replies]
        asked = dict(zip(unknown, self._client.complete(unknown), strict=True))
        if self._cache is not None:
            self._cache.put({distinct[p]: reply.text for p, reply in asked.items() if reply.text is not None})
        replies |= asked
        return [replies[prompt] for prompt in prompts]

    def close(self) -> None:
        """Close the connections; several rewards may share a judge and close it."""
        if not self._closed:
            self._closed = True
            self._client.close()

    def _key(self, prompt: str) -> str:
        from trl.reply_cache import reply_key

        return reply_key(
            endpoint=self._client.endpoint, model=self._client.model, sampling=self._sampling, prompt=prompt
        )


class AutoraterReward:
    """Fills the prompt, asks the judge, and reads the reward from the answer.

    The placeholders are ``{{prompt}} {{response}} {{system_instruction}} {{references.key}}``. No answer, and an
    answer without a number where one is expected, is no verdict.
    """

    def __init__(self, config: AutoraterScorer, judge: Judge, patterns: Patterns) -> None:
        self._config, self._judge, self._patterns = config, judge, patterns
        unused = config.autorater_config.model_dump(exclude={"autorater_model"}, exclude_none=True, by_alias=True)
        if unused:
            logger.warning("autoraterConfig: %s not used; a judge is asked once, at temperature 0", ", ".join(unused))

    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        filled = [fill(self._config.autorater_prompt, _values(sample)) for sample in samples]
        prompts = [prompt.encode(errors="replace").decode() for prompt in filled]  # half characters can't be sent
        replies = self._judge.ask(prompts)
        return [self._verdict(*each) for each in zip(samples, prompts, replies, strict=True)]

    def close(self) -> None:
        self._judge.close()

    def _verdict(self, sample: Sample, prompt: str, reply: "Reply") -> Verdict:
        stages = {"judge's prompt": prompt}
        if reply.text is None:
            return failure(f"the judge gave no answer: {reply.error}", stages)
        stages["judge's answer"] = answer = reply.text
        regex = self._config.autorater_response_parse_config.regex
        if regex is not None:
            try:
                answer = self._patterns.last_match(regex, answer) or ""
            except PatternError as error:
                return failure(str(error), stages)
            stages["parsed answer"] = answer
        exact = self._config.exact_match_scorer
        if exact is None:
            number = _number(answer)
            return (
                failure("the judge's answer is not a number", stages)
                if number is None
                else Verdict(number, None, stages)
            )
        stages["expression"] = fill(exact.expression, reference_values(sample.references))
        right = answer == stages["expression"]
        return Verdict(exact.correct_answer_reward if right else exact.wrong_answer_reward, None, stages)


def _values(sample: Sample) -> dict[str, Any]:
    return {
        "prompt": sample.prompt,
        "response": sample.response,
        "system_instruction": sample.system_instruction,
        **reference_values(sample.references),
    }


def _number(text: str) -> float | None:
    """The number that ``text`` is; float() alone would take "1_0" and "nan"."""
    if not _NUMBER.fullmatch(text.strip()):
        return None
    number = float(text)
    return number if math.isfinite(number) else None
