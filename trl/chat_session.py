"""One prompt to a chat endpoint and back: retries, limits, and what the endpoint does not support."""

import asyncio
import logging
import random
import time
from dataclasses import dataclass, replace
from typing import Any

import openai
import tenacity
from openai.types.chat import ChatCompletion

from trl import chat_protocol
from trl.limits import Budget, BudgetSpent, RateLimit, estimate_tokens

logger = logging.getLogger(__name__)

_OPTIONAL = ("temperature", "stop", "max_tokens")
"""Parameters that some models refuse and that a request can do without."""
_LONGEST_WAIT = 60.0


@dataclass(frozen=True)
class Reply:
    """What came back for one prompt: ``text``, or ``error`` saying why there is none."""

    text: str | None
    error: str | None = None
    status_code: int | None = None
    """HTTP status of the last attempt that got one, when it was an error."""
    attempts: int = 0
    """Requests sent; 0 where the limits or the budget left no room for one."""
    latency: float = 0.0
    """Seconds from the call to the answer, with waiting and retries."""
    tokens_in: int = 0
    tokens_out: int = 0
    """As the server counted them, else estimated."""
    usd: float | None = None
    """What it cost; None where the prices are not known."""
    over_budget: bool = False
    """Not asked, because the budget is spent."""


class _NoRoom(RuntimeError):
    """The limits per minute have no place for a request before its deadline."""


@dataclass
class _Progress:
    """Of one prompt: requests sent so far, and how the last one failed."""

    attempts: int = 0
    last: BaseException | None = None


class ChatSession:
    """What the requests to one endpoint share. All of it runs in one event loop.

    Args:
        client: the SDK's client, without retries of its own.
        settings: what goes into every request beside the messages.
        max_concurrency, max_retries: of this process.
        timeout, backoff: seconds; see :class:`trl.clients.ChatClient`.
        rate: this process's requests and tokens per minute.
    """

    def __init__(
        self,
        client: openai.AsyncOpenAI,
        settings: dict[str, Any],
        *,
        max_concurrency: int,
        timeout: float,
        backoff: float,
        rate: RateLimit,
    ) -> None:
        self._client, self._settings = client, settings
        self._longest: int = settings["max_tokens"]
        self._slots = asyncio.Semaphore(max_concurrency)
        self._timeout, self._backoff, self._rate = timeout, backoff, rate

    async def ask(self, prompt: str, *, deadline: float, max_retries: int, budget: Budget) -> Reply:
        """The reply to one user message, or why there is none, within ``deadline`` seconds."""
        start = time.monotonic()
        end = start + deadline
        progress = _Progress()
        jittered = tenacity.wait_random_exponential(multiplier=self._backoff, max=_LONGEST_WAIT)

        def wait(state: tenacity.RetryCallState) -> float:
            asked = chat_protocol.retry_after(progress.last)
            return jittered(state) if asked is None else asked + random.uniform(0, self._backoff)

        def stop(state: tenacity.RetryCallState) -> bool:
            return state.attempt_number > max_retries or time.monotonic() + state.upcoming_sleep >= end

        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(chat_protocol.is_retried), wait=wait, stop=stop, reraise=True
        )
        try:
            async with asyncio.timeout(deadline):
                async for attempt in retrying:
                    with attempt:
                        async with self._slots:
                            reply = await self._attempt(prompt, end, budget, progress)
        except (openai.OpenAIError, TimeoutError, ValueError, _NoRoom, BudgetSpent) as error:
            reply = Reply(
                None,
                error=self._reason(error, progress.last, deadline),
                status_code=chat_protocol.status_of(progress.last),
                over_budget=isinstance(error, BudgetSpent) and not progress.attempts,
            )
        return replace(reply, attempts=progress.attempts, latency=time.monotonic() - start)

    async def _attempt(self, prompt: str, end: float, budget: Budget, progress: _Progress) -> Reply:
        expected = estimate_tokens(prompt), self._longest
        estimate = budget.cost(*expected)
        budget.take(estimate)
        sent, usd = False, None
        try:
            place = self._rate.reserve(sum(expected), latest=end)
            if place is None:
                raise _NoRoom("the limits per minute leave no place before the deadline")
            await asyncio.sleep(place.at - time.monotonic())
            sent = True
            progress.attempts += 1
            # The SDK's timeout is per read; a server that trickles bytes would hold the slot for ever.
            async with asyncio.timeout(self._timeout):
                completion = await self._create(prompt)
            text = chat_protocol.without(chat_protocol.text_of(completion), self._client.api_key)
            used = chat_protocol.usage_of(completion) or (expected[0], estimate_tokens(text))
            place.tokens = sum(used)
            usd = budget.cost(*used)
            return Reply(text, tokens_in=used[0], tokens_out=used[1], usd=usd)
        except (openai.OpenAIError, TimeoutError, ValueError) as error:
            progress.last = error
            raise
        finally:
            budget.settle(estimate, usd, sent=sent)

    async def _create(self, prompt: str) -> ChatCompletion:
        while True:
            settings = self._settings
            try:
                return await self._client.chat.completions.create(
                    messages=[{"role": "user", "content": prompt}], **settings
                )
            except openai.APIStatusError as error:
                # another request may have learnt it meanwhile; each round leaves fewer parameters to refuse
                if settings is self._settings and not self._do_without(error):
                    raise

    def _do_without(self, error: openai.APIStatusError) -> bool:
        """Leave out the parameter that an error calls unsupported; False if it does not name one of ours."""
        ours = [name for name in _OPTIONAL if name in self._settings]
        name = chat_protocol.unsupported_parameter(error, ours)
        if name is None:
            return False
        kept = {key: value for key, value in self._settings.items() if key != name}
        if name == "max_tokens":
            kept["max_completion_tokens"] = self._settings[name]
        logger.warning(
            "the endpoint refuses %s for model %s: %s from here on",
            name,
            self._settings["model"],
            "sent as max_completion_tokens" if name == "max_tokens" else "left out",
        )
        self._settings = kept
        return True

    def _reason(self, error: BaseException, last: BaseException | None, deadline: float) -> str:
        """Why a prompt has no reply, in words that hold nothing secret."""
        if error is last:
            return chat_protocol.reason_of(error, self._timeout)
        own = f"deadline of {deadline:g} s passed" if isinstance(error, TimeoutError) else str(error)
        return own + (f"; {chat_protocol.reason_of(last, self._timeout)}" if last else "")
