"""A small real HTTP server that speaks the reward service's protocol and can be told to misbehave.

    with FakeReward(lambda body, nth: reward_reply(1.0)) as server:
        load_reward({"rewardName": "r", "cloudRunRewardScorer": {"cloudRunUri": server.url}})

The function gets the request's JSON and how often this very request has come, this time included.
"""

import contextlib
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from tests.fake_openai import Answer

Serve = Callable[[dict[str, Any], int], Answer]


def reward_reply(reward: Any, aux: Any = None, *, delay: float = 0.0) -> Answer:
    """A reward as the protocol has it, whatever its type."""
    body = {"reward": reward} | ({} if aux is None else {"user_requested_aux_info": aux})
    return Answer(200, json.dumps(body).encode(), delay=delay)


class _Server(ThreadingHTTPServer):
    request_queue_size = 128  # of the default 5, a burst of connections overflows the queue and waits for whole seconds


class FakeReward:
    """``requests``: JSON bodies received; ``headers``, ``times``: of each request; ``most_at_once``: concurrency."""

    def __init__(self, serve: Serve) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.times: list[float] = []
        self.most_at_once = 0
        self._now = 0
        self._asked: Counter[bytes] = Counter()
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle(self) -> None:
                with contextlib.suppress(ConnectionResetError, BrokenPipeError):  # a client that gave up
                    super().handle()

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                with fake._lock:
                    fake._now += 1
                    fake.most_at_once = max(fake.most_at_once, fake._now)
                    fake._asked[content] += 1
                    nth = fake._asked[content]
                    fake.requests.append(json.loads(content))
                    fake.headers.append({name.lower(): value for name, value in self.headers.items()})
                    fake.times.append(time.monotonic())
                try:
                    answer = serve(json.loads(content), nth)
                    time.sleep(answer.delay)
                    self.send_response(answer.status)
                    for name, value in {"Content-Type": "application/json", **answer.headers}.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(answer.body)))
                    self.end_headers()
                    self.wfile.write(answer.body[: answer.cut_after])
                    self.close_connection = self.close_connection or answer.cut_after is not None
                finally:
                    with fake._lock:
                        fake._now -= 1

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/score"

    def __enter__(self) -> "FakeReward":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
