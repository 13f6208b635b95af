"""JSON over HTTP to one scoring service: many requests at once, a limit on their rate, retries, no secrets in errors.

What comes back is read without trust: it may be anything, of any size, or nothing.
"""

import asyncio
import json
import logging
import math
import queue
import random
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlsplit

import httpx

from trl.jsonl import strict
from trl.limits import RateLimit, run_share
from trl.loopback import is_loopback

logger = logging.getLogger(__name__)

_HEADER_LOGGERS = ("httpcore", "httpcore2")
"""At DEBUG they write down every header that a server sends, and a server may echo the key in one."""
LONGEST_REPLY = 1_000_000
"""Bytes; a reply that is longer is no answer."""
LONGEST_WAIT = 120.0
"""Seconds; a server that asks to wait longer gets no second request."""


@dataclass(frozen=True)
class Answer:
    """What came back for one request: ``data``, or ``error`` saying in words without secrets why there is none."""

    data: Any = field(default=None, repr=False)
    """The reply's JSON; also that of a refusal (4xx), where it has one. Not in the repr: servers echo keys."""
    error: str | None = None
    status_code: int | None = None
    """None where no whole reply came."""
    transient: bool = False
    """The same request may succeed later."""
    attempts: int = 0


_Arrivals = queue.SimpleQueue[tuple[int, Answer, asyncio.Event] | None]


class JsonEndpoint:
    """Posts JSON to one URL over one pool of connections.

    Requests run on an event loop in a thread of their own, so that callers in any thread can use plain calls.
    429, 5xx, timeouts and lost connections are retried with jittered exponential backoff. A Retry-After holds
    back everything that this object sends. Redirects are not followed: they would carry the key elsewhere.

    Args:
        url: http or https; user name and password in it are used, and never shown.
        headers: sent with every request, where not None; the place for keys.
        max_concurrency: requests on the wire, divided over the run's processes (at least one each).
        timeout: seconds one attempt may take, from connecting to the last byte.
        max_retries: attempts after the first.
        backoff: seconds; the n-th wait is random between 0 and ``backoff * 2**n``.
        jitter: False: the n-th wait is ``backoff * 2**n``, not random.
        rate: this process's limit, which retries count in; None: as fast as it goes.
    """

    def __init__(
        self,
        url: str,
        headers: Mapping[str, str | None],
        *,
        max_concurrency: int = 8,
        timeout: float = 30.0,
        max_retries: int = 5,
        backoff: float = 1.0,
        jitter: bool = True,
        rate: RateLimit | None = None,
    ) -> None:
        if not _is_usable(url):
            raise ValueError(f"the endpoint is {public_url(url)!r}; expected an http or https URL")
        if max_concurrency < 1 or timeout <= 0:
            raise ValueError(f"max_concurrency is {max_concurrency} and timeout {timeout}; expected more than 0")
        if max_retries < 0 or backoff < 0:
            raise ValueError(f"max_retries is {max_retries} and backoff {backoff}; expected 0 or more")
        given = {name: value for name, value in headers.items() if value is not None}
        if not all(value.isascii() and value.isprintable() for value in given.values()):
            # the HTTP library's own error would quote the value
            raise ValueError(f"a key or header for {public_url(url)} holds characters that no header can carry")
        self.url = public_url(url)
        self._target = url
        self._workers = max(1, run_share(max_concurrency))
        self._timeout, self._max_retries, self._backoff, self._jitter = timeout, max_retries, backoff, jitter
        self._rate = rate or RateLimit()
        self._resume_at = -math.inf
        self._client = httpx.AsyncClient(
            headers=given,
            timeout=timeout,
            limits=httpx.Limits(max_connections=self._workers),
            trust_env=not is_loopback(url),  # else a proxy of the environment is asked for this machine's addresses
        )
        for name in _HEADER_LOGGERS:
            if logging.getLogger(name).level == logging.NOTSET:
                logging.getLogger(name).setLevel(logging.INFO)
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="json-endpoint", daemon=True).start()

    def post_each(self, bodies: Iterable[Any]) -> Iterator[tuple[int, Answer]]:
        """Post every body; yields (its position, its answer) as the answers arrive, in any order.

        An answer counts as taken when the next one is asked for, and every place on the wire waits until its last
        answer is taken: a caller that writes each answer down loses at most ``max_concurrency`` of them to a kill.
        Closing the iterator early stops what has not been sent.
        """
        arrived: _Arrivals = queue.SimpleQueue()
        work = asyncio.run_coroutine_threadsafe(self._post_each(bodies, arrived), self._loop)
        work.add_done_callback(lambda _: arrived.put(None))
        try:
            while (item := arrived.get()) is not None:
                index, answer, taken = item
                yield index, answer
                self._loop.call_soon_threadsafe(taken.set)
            work.result()
        finally:
            work.cancel()

    def post_all(self, bodies: Iterable[Any]) -> list[Answer]:
        """Post every body; the answers in the order of the bodies."""
        return [answer for _, answer in sorted(self.post_each(bodies), key=lambda item: item[0])]

    def close(self) -> None:
        """Close the connections and end the thread."""
        if self._loop.is_running():
            asyncio.run_coroutine_threadsafe(self._client.aclose(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)

    async def _post_each(self, bodies: Iterable[Any], arrived: _Arrivals) -> None:
        waiting = iter(enumerate(bodies))

        async def worker() -> None:
            for index, body in waiting:
                taken = asyncio.Event()
                arrived.put((index, await self._post(body), taken))
                await taken.wait()

        async with asyncio.TaskGroup() as group:
            for _ in range(self._workers):
                group.create_task(worker())

    async def _post(self, body: Any) -> Answer:
        content = json.dumps(strict(body)).encode()
        attempt = 0
        while True:
            attempt += 1
            await self._turn()
            answer, asked = await self._attempt(content)
            answer = replace(answer, attempts=attempt)
            if not answer.transient or attempt > self._max_retries:
                return answer
            if asked is not None and asked > LONGEST_WAIT:
                return replace(answer, error=f"{answer.error}, asks to wait {asked:.0f} s")
            if asked is None:
                longest = min(LONGEST_WAIT, self._backoff * 2**attempt)
                await asyncio.sleep(random.uniform(0, longest) if self._jitter else longest)
            else:
                self._resume_at = max(self._resume_at, time.monotonic() + asked)

    async def _turn(self) -> None:
        """Wait for a place in the rate limit that is not before the server's Retry-After."""
        while True:
            await asyncio.sleep(self._resume_at - time.monotonic())
            place = self._rate.reserve(0, latest=math.inf)
            if place is not None:
                await asyncio.sleep(place.at - time.monotonic())
            if time.monotonic() >= self._resume_at:
                return

    async def _attempt(self, content: bytes) -> tuple[Answer, float | None]:
        """One request; also the seconds that the server asks to wait."""
        # a few hundred compressed bytes can stand for gigabytes
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        try:
            # httpx's timeouts are per read; a server that trickles bytes would hold the place for ever
            async with (
                asyncio.timeout(self._timeout),
                self._client.stream("POST", self._target, content=content, headers=headers) as response,
            ):
                if response.headers.get("content-encoding", "identity") != "identity":
                    return Answer(error="malformed reply (compressed)", status_code=response.status_code), None
                received = bytearray()
                async for part in response.aiter_raw():
                    received += part
                    if len(received) > LONGEST_REPLY:
                        long = f"malformed reply (more than {LONGEST_REPLY:,} bytes)"
                        return Answer(error=long, status_code=response.status_code), None
        except (TimeoutError, httpx.TimeoutException):
            return Answer(error=f"no answer in {self._timeout:g} s", transient=True), None
        except httpx.RequestError as error:
            return Answer(error=f"connection error ({type(error).__name__})", transient=True), None
        return _read(response, bytes(received)), _retry_after(response.headers.get("retry-after", ""))


def _is_usable(url: str) -> bool:
    """Whether requests can be sent to ``url``; the HTTP library would say so only at the first one."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        return False
    return parsed.scheme in ("http", "https") and bool(parsed.host) and 0 < (parsed.port or 80) < 2**16


def public_url(url: str) -> str:
    """``url`` without what may be secret: user name, password, query and fragment."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()


def _read(response: httpx.Response, content: bytes) -> Answer:
    status = response.status_code
    try:
        data = json.loads(content)
    except (ValueError, RecursionError):
        data = None
        if status == 200:
            return Answer(error="malformed reply (not JSON)", status_code=status)
    if status == 200:
        return Answer(data, status_code=status)
    return Answer(data, error=f"HTTP {status}", status_code=status, transient=status == 429 or status >= 500)


def _retry_after(value: str) -> float | None:
    """Seconds of a Retry-After header, which holds seconds or an HTTP date; None where it holds neither."""
    try:
        seconds = float(value)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(value).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return max(0.0, seconds) if math.isfinite(seconds) else None
