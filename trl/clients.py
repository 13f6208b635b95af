"""The HTTP client for LLM endpoints that speak OpenAI's chat protocol, shared by critic, judges and rewards.

The key comes from the environment variable OPENAI_API_KEY and goes into the Authorization header only: no
log line, exception text, reply or repr of this module holds it, also when a server echoes it.
"""

import asyncio
import logging
import os
import queue
import threading
from collections.abc import Coroutine, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import openai

from trl.chat_session import ChatSession, Reply
from trl.limits import Budget, RateLimit, run_share
from trl.loopback import is_loopback

T = TypeVar("T")
_Arrivals = queue.SimpleQueue[tuple[int, Reply, asyncio.Event] | None]

KEY_VARIABLE = "OPENAI_API_KEY"
_REFUSED = frozenset({401, 403, 404})
_HEADER_LOGGERS = ("openai", "httpcore", "httpcore2")
"""At DEBUG they write down every header that a server sends, and a server may echo the key in one."""


class EndpointAuthError(RuntimeError):
    """The endpoint refuses the key (401, 403) or does not know the model (404): no retry can help."""


class ChatClient:
    """Asks an OpenAI-compatible endpoint many prompts at once, at temperature 0.

    Requests run on an event loop in a thread of their own, over one connection pool, so that callers in any
    thread can use plain calls. Timeouts, connection errors, 408, 409, 429 and 5xx are retried with jittered
    exponential backoff, or after what the server's Retry-After says. A parameter that the endpoint calls
    unsupported is left out from then on (max_tokens: renamed max_completion_tokens). Other errors become a
    :class:`Reply` at once.

    Args:
        model: the model's name at the endpoint.
        base_url: the endpoint; None: OPENAI_BASE_URL from the environment, else OpenAI.
        max_tokens: the longest reply.
        stop: up to four strings that end a reply.
        max_concurrency: requests on the wire at one time, divided over the run's processes (at least one each).
        timeout: seconds one attempt may take.
        deadline: seconds after which a call's requests fail, with waiting for a slot and retries counted.
        max_retries: attempts after the first.
        backoff: seconds; the n-th wait is random between 0 and ``backoff * 2**n``.
        rate: requests and tokens per minute of this process; None: as fast as it goes.
        budget: what all requests of this process, but the preflight, may cost; None: anything.

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
        rate: RateLimit | None = None,
        budget: Budget | None = None,
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
        self.model, self.max_tokens = model, max_tokens
        self._deadline, self._max_retries, self._budget = deadline, max_retries, budget or Budget()
        self._places = max(1, run_share(max_concurrency))
        settings: dict[str, Any] = {"model": model, "temperature": 0, "max_tokens": max_tokens}
        if stop:
            settings["stop"] = list(stop)
        is_local = is_loopback(base_url or os.environ.get("OPENAI_BASE_URL", ""))
        # Local servers take any key, but the SDK insists on one.
        self._client = openai.AsyncOpenAI(
            api_key=key or "none",
            base_url=base_url,
            timeout=timeout,
            max_retries=0,
            # else a proxy of the environment is asked for this machine's addresses
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False) if is_local else None,
        )
        self._session = ChatSession(
            self._client,
            settings,
            max_concurrency=self._places,
            timeout=timeout,
            backoff=backoff,
            rate=rate or RateLimit(),
        )
        for name in _HEADER_LOGGERS:
            if logging.getLogger(name).level == logging.NOTSET:
                logging.getLogger(name).setLevel(logging.INFO)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="chat-client", daemon=True).start()

    @property
    def endpoint(self) -> str:
        """The base URL that receives the prompts, without any user name or password in it."""
        url = urlsplit(str(self._client.base_url))
        return url._replace(netloc=url.netloc.rpartition("@")[2]).geturl().rstrip("/")

    def complete(self, prompts: Sequence[str], *, retry: bool = True) -> list[Reply]:
        """Ask every prompt as a user message; one reply each, in order, within ``deadline`` seconds."""
        return self._run(self._ask_all(prompts, self._max_retries if retry else 0, self._budget))

    def complete_each(self, prompts: Sequence[str]) -> Iterator[tuple[int, Reply]]:
        """(position, reply) of every prompt, asked as a user message, as the replies arrive.

        A prompt's ``deadline`` counts from when there is a place on the wire for it. A reply counts as taken when the
        next one is asked for, and its place waits for that: a caller that writes each reply down loses at most
        ``max_concurrency`` of them to a kill. Closing the iterator stops the asking.
        """
        arrived: _Arrivals = queue.SimpleQueue()
        work = asyncio.run_coroutine_threadsafe(self._ask_each(prompts, arrived), self._loop)
        work.add_done_callback(lambda _: arrived.put(None))
        try:
            while (item := arrived.get()) is not None:
                index, reply, taken = item
                yield index, reply
                self._loop.call_soon_threadsafe(taken.set)
            work.result()
        finally:
            work.cancel()

    def preflight(self) -> Reply:
        """Ask one tiny question, once, to learn whether key, endpoint and model are accepted.

        Raises:
            EndpointAuthError: the endpoint answered 401, 403 or 404.
        """
        (reply,) = self._run(self._ask_all(["Say OK."], 0, Budget()))
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

    async def _ask_each(self, prompts: Sequence[str], arrived: "_Arrivals") -> None:
        waiting = iter(enumerate(prompts))

        async def worker() -> None:
            for index, prompt in waiting:
                limits: dict[str, Any] = {"max_retries": self._max_retries, "budget": self._budget}
                reply = await self._session.ask(prompt, deadline=self._deadline, **limits)
                taken = asyncio.Event()
                arrived.put((index, reply, taken))
                await taken.wait()

        async with asyncio.TaskGroup() as group:
            for _ in range(self._places):
                group.create_task(worker())

    async def _ask_all(self, prompts: Sequence[str], max_retries: int, budget: Budget) -> list[Reply]:
        asked = (
            self._session.ask(prompt, deadline=self._deadline, max_retries=max_retries, budget=budget)
            for prompt in prompts
        )
        return await asyncio.gather(*asked)
