"""The HTTP client for LLM endpoints that speak OpenAI's chat protocol, shared by critic, judges and rewards.

The key comes from the environment variable OPENAI_API_KEY and goes into the Authorization header only: no
log line, exception text or repr of this module holds it, also when a server echoes it.
"""

import asyncio
import logging
import os
import random
import threading
import time
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar
from urllib.parse import urlsplit

import openai
import tenacity
from openai.types.chat import ChatCompletion

logger = logging.getLogger(__name__)
T = TypeVar("T")

KEY_VARIABLE = "OPENAI_API_KEY"
_REFUSED = frozenset({401, 403, 404})
_RETRIED = frozenset({408, 409, 429})
_MAX_WAIT = 60.0


class EndpointAuthError(RuntimeError):
    """The endpoint refuses the key (401, 403) or does not know the model (404): no retry can help."""


@dataclass(frozen=True)
class Reply:
    """What came back for one prompt: ``text``, or ``error`` saying why there is none."""

    text: str | None
    error: str | None = None
    status_code: int | None = None
    """HTTP status of the last attempt that got one, when it was an error."""
    attempts: int = 1
    latency: float = 0.0
    """Seconds from the call to the answer, with waiting and retries."""


class ChatClient:
    """Asks an OpenAI-compatible endpoint many prompts at once, at temperature 0.

    Requests run on an event loop in a thread of their own, over one connection pool, so that callers in any
    thread can use plain calls. Timeouts, connection errors, 408, 409, 429 and 5xx are retried with jittered
    exponential backoff, or after what the server's Retry-After says. Other errors become a
    :class:`Reply` at once.

    Args:
        model: the model's name at the endpoint.
        base_url: the endpoint; None: OPENAI_BASE_URL from the environment, else OpenAI.
        max_tokens: the longest reply.
        stop: up to four strings that end a reply.
        max_concurrency: requests on the wire at one time.
        timeout: seconds one attempt may take.
        deadline: seconds after which a call's requests fail, with waiting for a slot and retries counted.
        max_retries: attempts after the first.
        backoff: seconds; the n-th wait is random between 0 and ``backoff * 2**n``.

    Raises:
        EndpointAuthError: no OPENAI_API_KEY, and no ``base_url`` of a server that may need none.
    """

    def __init__(
        self,
        model: str,
        *,
        base_url: str | None = None,
        max_tokens: int = 256,
        stop: Sequence[str] = (),
        max_concurrency: int = 16,
        timeout: float = 30.0,
        deadline: float = 120.0,
        max_retries: int = 5,
        backoff: float = 0.5,
    ) -> None:
        for name, value in (("max_concurrency", max_concurrency), ("timeout", timeout), ("deadline", deadline)):
            if value <= 0:
                raise ValueError(f"{name} is {value}; expected more than 0")
        if max_retries < 0 or backoff < 0:
            raise ValueError(f"max_retries is {max_retries} and backoff {backoff}; expected 0 or more")
        key = os.environ.get(KEY_VARIABLE, "").strip()
        if not key and base_url is None and not os.environ.get("OPENAI_BASE_URL"):
            raise EndpointAuthError(
                f"no key for OpenAI: set the environment variable {KEY_VARIABLE}, "
                "or give the base URL of another server"
            )
        self.model = model
        self._settings: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": max_tokens}
        if stop:
            self._settings["stop"] = list(stop)
        self._timeout, self._deadline = timeout, deadline
        self._max_retries, self._backoff = max_retries, backoff
        self._slots = asyncio.Semaphore(max_concurrency)
        # Local servers take any key, but the SDK insists on one.
        self._client = openai.AsyncOpenAI(api_key=key or "none", base_url=base_url, timeout=timeout, max_retries=0)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="chat-client", daemon=True).start()

    @property
    def endpoint(self) -> str:
        """The base URL that receives the prompts, without any user name or password in it."""
        url = urlsplit(str(self._client.base_url))
        return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl().rstrip("/")

    def complete(self, prompts: Sequence[str]) -> list[Reply]:
        """Ask every prompt as a user message; one reply each, in order, within ``deadline`` seconds."""
        return self._run(self._ask_all(prompts))

    def preflight(self) -> Reply:
        """Ask one tiny question, once, to learn whether key, endpoint and model are accepted.

        Raises:
            EndpointAuthError: the endpoint answered 401, 403 or 404.
        """
        reply = self._run(self._ask("Say OK.", time.monotonic(), max_retries=0))
        self.raise_if_refused(reply)
        return reply

    def raise_if_refused(self, reply: Reply) -> None:
        """Raise EndpointAuthError when the reply is a 401, 403 or 404."""
        if reply.status_code in _REFUSED:
            what = "the model or the path is not known there" if reply.status_code == 404 else "the key is refused"
            raise EndpointAuthError(
                f"{self.endpoint} answered {reply.status_code} for model {self.model!r}: {what}. "
                f"Check {KEY_VARIABLE}, the base URL and the model's name"
            )

    def close(self) -> None:
        """Close the connections and end the thread."""
        if self._loop.is_running():
            self._run(self._client.close())
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:  # also Ctrl-C: nothing may go on asking behind the caller's back
            future.cancel()
            raise

    async def _ask_all(self, prompts: Sequence[str]) -> list[Reply]:
        start = time.monotonic()
        return await asyncio.gather(*(self._ask(prompt, start, self._max_retries) for prompt in prompts))

    async def _ask(self, prompt: str, start: float, max_retries: int) -> Reply:
        """One prompt with its retries. ``start`` is when the caller's clock began (monotonic seconds)."""
        end = start + self._deadline
        attempts = 0
        last: BaseException | None = None

        def wait(state: tenacity.RetryCallState) -> float:
            asked = _retry_after(last)
            return jittered(state) if asked is None else asked + random.uniform(0, self._backoff)

        def too_late(state: tenacity.RetryCallState) -> bool:
            return time.monotonic() + state.upcoming_sleep >= end

        jittered = tenacity.wait_random_exponential(multiplier=self._backoff, max=_MAX_WAIT)
        retrying = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(_is_retried),
            wait=wait,
            stop=lambda state: state.attempt_number > max_retries or too_late(state),
            reraise=True,
        )
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + end - time.monotonic()):
                async for attempt in retrying:
                    with attempt:
                        async with self._slots:
                            attempts += 1
                            try:
                                text = await self._attempt(prompt)
                            except (openai.OpenAIError, TimeoutError, ValueError) as error:
                                last = error
                                raise
                return Reply(text, attempts=attempts, latency=time.monotonic() - start)
        except (openai.OpenAIError, TimeoutError, ValueError) as error:
            failure = error
        if failure is last:
            reason = self._reason(failure)
        else:
            reason = f"deadline of {self._deadline:g} s passed" + (f"; {self._reason(last)}" if last else "")
        return Reply(
            None,
            error=reason,
            status_code=_status(last),
            attempts=attempts,
            latency=time.monotonic() - start,
        )

    async def _attempt(self, prompt: str) -> str:
        # The SDK's timeout is per read; a server that trickles bytes would hold the slot for ever.
        async with asyncio.timeout(self._timeout):
            completion = await self._client.chat.completions.create(
                messages=[{"role": "user", "content": prompt}], **self._settings
            )
        return _text_of(completion)

    def _reason(self, error: BaseException | None) -> str:
        """Why a request failed, in words that hold nothing secret: no URL, header or echoed body."""
        if isinstance(error, openai.APIStatusError):
            return f"HTTP {error.status_code}"
        if isinstance(error, openai.APITimeoutError | TimeoutError):
            return f"no answer in {self._timeout:g} s"
        if isinstance(error, openai.APIConnectionError):
            return f"connection error ({type(error.__cause__ or error).__name__})"
        return f"malformed reply ({type(error).__name__})"


def _text_of(completion: ChatCompletion) -> str:
    """The reply's text. The SDK does not validate, so any JSON (or text) can stand where the type says else."""
    try:
        content = completion.choices[0].message.content
    except (AttributeError, IndexError, KeyError, TypeError):
        raise ValueError("not a chat completion") from None
    if not isinstance(content, str | None):
        raise ValueError("a chat completion whose content is not text")
    return content or ""


def _is_retried(error: BaseException) -> bool:
    if isinstance(error, openai.APIStatusError):
        return error.status_code in _RETRIED or error.status_code >= 500
    return isinstance(error, openai.APIConnectionError | TimeoutError)


def _status(error: BaseException | None) -> int | None:
    return error.status_code if isinstance(error, openai.APIStatusError) else None


def _retry_after(error: BaseException | None) -> float | None:
    """Seconds the server asks to wait: the Retry-After header, in seconds or as an HTTP date."""
    if not isinstance(error, openai.APIStatusError):
        return None
    value = error.response.headers.get("retry-after", "").strip()
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None
