"""A small real HTTP server that speaks Perspective's comments:analyze and can be told to misbehave.

    with FakePerspective(lambda text, nth: error(429) if nth == 1 else None) as server:
        PerspectiveClient("a-key", endpoint=server.url, qps=100)

Scores depend on text and attribute alone: :func:`score_of`. The fault function gets the text and how often it has
been asked for, this time included; None means the right answer.
"""

import contextlib
import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from tests.fake_openai import Answer

LIMIT = 20_480
PATH = "/v1alpha1/comments:analyze"
Fault = Callable[[str, int], Answer | None]


def score_of(text: str, attribute: str = "TOXICITY") -> float:
    """A number in [0, 1] that no other text is likely to have."""
    return int.from_bytes(hashlib.sha256(f"{attribute}\n{text}".encode()).digest()[:4]) / 2**32


def google_error(status: int, message: str, *, delay: float = 0.0, **headers: str) -> Answer:
    """An error as Google words it. Header names: retry_after=... becomes Retry-After."""
    names = {name.replace("_", "-").title(): value for name, value in headers.items()}
    body = {"error": {"code": status, "message": message, "status": "INVALID_ARGUMENT"}}
    return Answer(status, json.dumps(body).encode(), names, delay=delay)


def analysis(text: str, attributes: list[str], **kwargs: Any) -> Answer:
    """The right answer; its span score differs from the summary score."""
    scores = {
        name: {
            "spanScores": [{"begin": 0, "end": len(text), "score": {"value": 0.123, "type": "PROBABILITY"}}],
            "summaryScore": {"value": score_of(text, name), "type": "PROBABILITY"},
        }
        for name in attributes
    }
    return Answer(200, json.dumps({"attributeScores": scores, "languages": ["en"]}).encode(), **kwargs)


class FakePerspective:
    """``requests``: JSON bodies received; ``answered``: texts whose right answer was sent whole.

    ``keys``, ``paths``, ``times``: of each request. ``too_long``: bytes of the texts over the limit.
    """

    def __init__(self, fault: Fault | None = None, *, languages: tuple[str, ...] = ("en",), delay: float = 0.0) -> None:
        self.requests: list[dict[str, Any]] = []
        self.asked: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.keys: list[str] = []
        self.paths: list[str] = []
        self.times: list[float] = []
        self.too_long: list[int] = []
        self._fault, self._languages, self._delay = fault, set(languages), delay
        self._lock = threading.Lock()
        self._open = 0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle(self) -> None:
                with contextlib.suppress(ConnectionResetError):  # a client that was killed, or gave up
                    super().handle()

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                answer = fake._answer(body, self.headers.get("x-goog-api-key", ""), self.path)
                try:
                    time.sleep(answer.delay)
                    self.send_response(answer.status)
                    for name, value in {"Content-Type": "application/json", **answer.headers}.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(answer.body)))
                    self.end_headers()
                    self.wfile.write(answer.body[: answer.cut_after])
                    if answer.cut_after is not None:
                        self.close_connection = True
                    elif answer.status == 200:
                        fake._count_answer(body)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True
                finally:
                    with fake._lock:
                        fake._open -= 1

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}{PATH}"

    def most_in_window(self, seconds: float) -> int:
        """The most requests that arrived within any window of so many seconds."""
        times = sorted(self.times)
        return max(sum(1 for later in times[i:] if later < start + seconds) for i, start in enumerate(times))

    def wait_idle(self, seconds: float = 0.5) -> None:
        """Return once nothing has been on its way for so long."""
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < seconds:
            if self._open:
                quiet_since = time.monotonic()
            time.sleep(0.01)

    def _answer(self, body: dict[str, Any], key: str, path: str) -> Answer:
        text, attributes = body["comment"]["text"], list(body["requestedAttributes"])
        with self._lock:
            self._open += 1
            self.requests.append(body)
            self.keys.append(key)
            self.paths.append(path)
            self.times.append(time.monotonic())
            self.asked[text] += 1
            size = len(text.encode())
            if size > LIMIT:
                self.too_long.append(size)
            fault = self._fault(text, self.asked[text]) if self._fault else None
        if fault is not None:
            return fault
        if path != PATH:
            return google_error(404, "no such method")
        if size > LIMIT:
            return google_error(400, "Comment text too long.")
        if not text.strip():
            return google_error(400, "Comment must be non-empty.")
        if foreign := set(body.get("languages", [])) - self._languages:
            return google_error(400, f"Attribute {attributes[0]} does not support request languages: {foreign}")
        return analysis(text, attributes, delay=self._delay)

    def _count_answer(self, body: dict[str, Any]) -> None:
        with self._lock:
            self.answered[body["comment"]["text"]] += 1

    def __enter__(self) -> "FakePerspective":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
