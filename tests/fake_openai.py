"""A small real HTTP server that speaks OpenAI's chat protocol and can be told to misbehave.

    with FakeOpenAI(lambda body: completion("[Span 1]: good")) as server:
        OpenAICritic(template, base_url=server.url)

The answer function gets the request's JSON and returns an :class:`Answer`; a list of answers is served in
order, its last one for ever.
"""

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any


@dataclass(frozen=True)
class Answer:
    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    """Seconds before the first byte."""
    cut_after: int | None = None
    """Close the connection after this many bytes of the body, though Content-Length promised them all."""
    reset: bool = False
    """Close by a reset (RST) instead of an orderly end."""


def completion(text: str | None, usage: tuple[int, int] | None = (1, 1), **kwargs: Any) -> Answer:
    """A well-formed chat completion that says ``text``; ``usage``: tokens of prompt and reply."""
    body: dict[str, Any] = {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": "fake",
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
    }
    if usage is not None:
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        body["usage"] = dict(zip(counts, (*usage, sum(usage)), strict=True))
    return Answer(200, json.dumps(body).encode(), **kwargs)


def error(status: int, message: str = "no", param: str | None = None, **headers: str) -> Answer:
    """An error as OpenAI words it. Header names: retry_after=... becomes Retry-After."""
    names = {name.replace("_", "-").title(): value for name, value in headers.items()}
    body = {"error": {"message": message, "type": "t", "param": param, "code": None}}
    return Answer(status, json.dumps(body).encode(), names)


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # of the default 5, a burst of connections overflows the queue and waits for whole seconds


class FakeOpenAI:
    """``requests``: JSON bodies received, in order; ``keys``: bearer tokens; ``most_at_once``: concurrency.

    ``port`` 0: any that is free.
    """

    def __init__(self, answers: Callable[[dict[str, Any]], Answer] | Sequence[Answer], *, port: int = 0) -> None:
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.times: list[float] = []
        self.most_at_once = 0
        self._now = 0
        self._answers = answers
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                if len(content) < int(self.headers["Content-Length"]):  # the client was killed
                    self.close_connection = True
                    return
                answer = fake._enter(json.loads(content), self.headers.get("Authorization", ""))
                try:
                    time.sleep(answer.delay)
                    self._send(answer)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True
                finally:
                    fake._leave()

            def _send(self, answer: Answer) -> None:
                self.send_response(answer.status)
                headers = {"Content-Type": "application/json", **answer.headers}
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(answer.body)))
                self.end_headers()
                self.wfile.write(answer.body[: answer.cut_after])
                if answer.cut_after is not None:
                    self.close_connection = True
                if answer.reset:
                    self.wfile.flush()
                    time.sleep(0.05)  # the client reads what came before the reset
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.connection.close()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = _Server(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def _enter(self, body: dict[str, Any], authorization: str) -> Answer:
        with self._lock:
            self.requests.append(body)
            self.keys.append(authorization.removeprefix("Bearer "))
            self.times.append(time.monotonic())
            self._now += 1
            self.most_at_once = max(self.most_at_once, self._now)
            if callable(self._answers):
                return self._answers(body)
            return self._answers[min(len(self.requests), len(self._answers)) - 1]

    def _leave(self) -> None:
        with self._lock:
            self._now -= 1

    def __enter__(self) -> "FakeOpenAI":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
