"""Everything a scoring service can do wrong: each score is right, or NaN with a reason, and the key stays hidden."""

import contextlib
import json
import logging
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import pytest

from tests.fake_openai import Answer
from tests.fake_perspective import FakePerspective, Fault, analysis, google_error, score_of
from trl.rewards import PerspectiveClient
from trl.rewards.perspective import Analysis, PerspectiveAuthError

KEY = "AIzaSy-test-0123456789abcdef"
QUICK = {"qps": 1e4, "backoff": 0.01}


@pytest.fixture(autouse=True)
def no_key_in_logs(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Everything that any library logs, down to DEBUG, must be free of the key."""
    caplog.set_level(logging.DEBUG)
    yield
    records = caplog.get_records("call")
    assert records
    assert all(KEY not in logging.Formatter().format(record) for record in records)


def ask(server_url: str, texts: list[str], **arguments: object) -> list[Analysis]:
    client = PerspectiveClient(KEY, endpoint=server_url, **{**QUICK, **arguments})
    try:
        return client.analyze(texts)
    finally:
        assert KEY not in repr(client) + repr(vars(client)) + str(client)
        client.close()


def right_or_nan(texts: list[str], found: list[Analysis]) -> list[str | None]:
    """The reasons, after checking that every text has its own score or else a reason."""
    assert len(found) == len(texts)
    for text, result in zip(texts, found, strict=True):
        score = result.scores["TOXICITY"]
        assert score == score_of(text) or (math.isnan(score) and result.error)
    return [result.error for result in found]


TEXTS = [f"text {index} é 🙂" for index in range(40)]


def first_time(answer: Answer, times: int = 1) -> Fault:
    return lambda text, nth: answer if nth <= times else None


PASSING = {
    "429": google_error(429, "quota"),
    "429 with Retry-After": google_error(429, "quota", retry_after="0"),
    "500": google_error(500, "internal"),
    "503 with HTML": Answer(503, b"<html>busy</html>", {"Content-Type": "text/html"}),
    "reset before the body": analysis("x", ["TOXICITY"], cut_after=0),
    "reset mid-body": analysis("x", ["TOXICITY"], cut_after=40),
}


@pytest.mark.parametrize("fault", PASSING)
def test_what_passes_is_retried_until_every_score_is_there(fault: str) -> None:
    with FakePerspective(first_time(PASSING[fault])) as server:
        assert right_or_nan(TEXTS, ask(server.url, TEXTS)) == [None] * 40
    assert set(server.asked.values()) == {2}


def test_a_slow_answer_is_asked_again() -> None:
    slow = first_time(analysis("x", ["TOXICITY"], delay=1.5))
    with FakePerspective(slow) as server:
        assert right_or_nan(TEXTS[:4], ask(server.url, TEXTS[:4], timeout=0.5)) == [None] * 4


def test_a_storm_of_429_is_ridden_out_and_retry_after_holds_back_everyone() -> None:
    ends: list[float] = []

    def storm(text: str, nth: int) -> Answer | None:
        ends.append(time.monotonic() + 1.2)
        return google_error(429, "quota", retry_after="1") if time.monotonic() < ends[0] else None

    with FakePerspective(storm) as server:
        assert right_or_nan(TEXTS, ask(server.url, TEXTS)) == [None] * 40
    # 8 requests learn of the storm, all wait, and again at most 8 are sent before the next Retry-After
    assert len(server.requests) <= 40 + 2 * 8
    first = min(server.times)
    quiet = [at - first for at in server.times if 0.3 < at - first < 0.95]
    assert quiet == []


def test_retry_after_may_be_a_date() -> None:
    date = formatdate(time.time() + 2, usegmt=True)  # whole seconds: 1 to 2 s from now
    with FakePerspective(first_time(google_error(503, "busy", retry_after=date))) as server:
        start = time.monotonic()
        assert right_or_nan(TEXTS[:1], ask(server.url, TEXTS[:1])) == [None]
    assert 0.8 < time.monotonic() - start < 4


def test_an_absurd_retry_after_is_not_waited_for() -> None:
    with FakePerspective(lambda text, nth: google_error(429, "quota", retry_after="86400")) as server:
        found = ask(server.url, TEXTS[:2])
    assert right_or_nan(TEXTS[:2], found) == ["HTTP 429, asks to wait 86400 s"] * 2
    assert all(a.transient for a in found)


@pytest.mark.parametrize("status", [400, 405, 409, 413, 422])
def test_other_4xx_are_not_retried(status: int) -> None:
    fault = lambda text, nth: google_error(status, f"odd {KEY}") if text == TEXTS[1] else None  # noqa: E731
    with FakePerspective(fault) as server:
        found = ask(server.url, TEXTS[:3])
    assert right_or_nan(TEXTS[:3], found) == [None, f"HTTP {status}", None]
    assert not found[1].transient
    assert server.asked[TEXTS[1]] == 1


def scores(**values: object) -> Answer:
    return Answer(200, json.dumps({"attributeScores": values}).encode())


MALFORMED = {
    "not JSON": (Answer(200, b'{"attributeScores": {"TOX'), "malformed reply (not JSON)"),
    "empty": (Answer(200, b""), "malformed reply (not JSON)"),
    "a list": (Answer(200, b"[1]"), "no score for TOXICITY in the reply"),
    "deep": (Answer(200, b"[" * 500_000), "malformed reply (not JSON)"),
    "5 MB": (Answer(200, b" " * 5_000_000), "malformed reply (more than 1,000,000 bytes)"),
    "missing attribute": (scores(INSULT={"summaryScore": {"value": 0.5}}), "no score for TOXICITY in the reply"),
    "null": (scores(TOXICITY=None), "no score for TOXICITY in the reply"),
    "text": (scores(TOXICITY={"summaryScore": {"value": "0.5"}}), "no score for TOXICITY in the reply"),
    "true": (scores(TOXICITY={"summaryScore": {"value": True}}), "no score for TOXICITY in the reply"),
    "NaN": (scores(TOXICITY={"summaryScore": {"value": math.nan}}), "no score for TOXICITY in the reply"),
    "beyond 1": (scores(TOXICITY={"summaryScore": {"value": 1.5}}), "no score for TOXICITY in the reply"),
    "redirect": (Answer(302, b"", {"Location": "http://127.0.0.1:9/steal"}), "HTTP 302"),
    "no content": (Answer(204, b""), "HTTP 204"),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_reply_is_nan_with_a_reason_and_costs_the_others_nothing(fault: str) -> None:
    answer, reason = MALFORMED[fault]
    with FakePerspective(lambda text, nth: answer if text == TEXTS[2] else None) as server:
        errors = right_or_nan(TEXTS[:5], ask(server.url, TEXTS[:5]))
    assert errors == [None, None, reason, None, None]


def test_the_attributes_that_came_are_kept() -> None:
    half = scores(INSULT={"summaryScore": {"value": 0.25}})
    with FakePerspective(lambda text, nth: half) as server:
        (found,) = ask(server.url, ["a"], attributes=("TOXICITY", "INSULT"))
    assert found.scores["INSULT"] == 0.25 and math.isnan(found.scores["TOXICITY"])
    assert found.error == "no score for TOXICITY in the reply"


def test_a_server_that_stays_down_gives_reasons_not_zeros() -> None:
    with FakePerspective(lambda text, nth: google_error(500, f"internal {KEY}")) as server:
        found = ask(server.url, TEXTS[:3], max_retries=2)
    assert right_or_nan(TEXTS[:3], found) == ["HTTP 500"] * 3
    assert all(a.transient for a in found)
    assert set(server.asked.values()) == {3}


def test_no_server_at_all() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    (found,) = ask(url, ["a"], max_retries=1)
    assert found.error == "connection error (ConnectError)"


def test_a_server_that_trickles_does_not_hold_a_place_for_ever() -> None:
    def trickle(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
                    for _ in range(1000):
                        connection.sendall(b" ")
                        time.sleep(0.05)

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        threading.Thread(target=trickle, args=(listener,), daemon=True).start()
        start = time.monotonic()
        (found,) = ask(f"http://127.0.0.1:{listener.getsockname()[1]}", ["a"], timeout=0.4, max_retries=1)
        listener.shutdown(socket.SHUT_RDWR)
    assert found.error == "no answer in 0.4 s"
    assert time.monotonic() - start < 5


def test_all_faults_at_once_lose_nothing() -> None:
    """One text in five always fails; the others meet a random fault first and are right in the end."""
    kinds = list(PASSING.values())

    def fault(text: str, nth: int) -> Answer | None:
        number = int(text.split()[1])
        if number % 5 == 0:
            return [MALFORMED["not JSON"][0], MALFORMED["missing attribute"][0]][number % 2]
        return kinds[(number + nth) % len(kinds)] if nth <= number % 3 else None

    texts = [f"text {index}" for index in range(100)]
    with FakePerspective(fault) as server:
        errors = right_or_nan(texts, ask(server.url, texts))
    assert [error is None for error in errors] == [index % 5 != 0 for index in range(100)]


def test_a_refusal_shows_the_key_nowhere(capsys: pytest.CaptureFixture[str]) -> None:
    with FakePerspective(lambda text, nth: google_error(403, f"key {KEY} is not allowed")) as server:
        client = PerspectiveClient(KEY, endpoint=server.url, **QUICK)
        with pytest.raises(PerspectiveAuthError) as error:
            client.analyze(["a"])
        client.close()
    shown = "".join(traceback.TracebackException.from_exception(error.value, capture_locals=True).format())
    assert "answered HTTP 403" in shown
    assert KEY not in shown + "".join(capsys.readouterr())


def test_a_broken_cache_costs_queries_not_scores(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with FakePerspective() as server:
        assert right_or_nan(TEXTS[:3], ask(server.url, TEXTS[:3], cache=tmp_path)) == [None] * 3
        (file,) = tmp_path.glob("*.sqlite")
        file.write_bytes(b"not a database at all" * 100)
        assert right_or_nan(TEXTS[:3], ask(server.url, TEXTS[:3], cache=tmp_path)) == [None] * 3
    assert len(server.requests) == 6
    assert "can't be used" in caplog.text


def test_a_worker_killed_half_way_loses_no_score_that_arrived(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom trl.rewards import PerspectiveClient\n"
        "client = PerspectiveClient(endpoint=sys.argv[1], qps=1000, cache=sys.argv[2], max_concurrency=4)\n"
        "client.analyze([f'text {index} é 🙂' for index in range(40)])\n"
    )
    hanging = threading.Event()
    hanging.set()

    def hang(text: str, nth: int) -> Answer | None:
        return google_error(503, "late", delay=600) if hanging.is_set() and server.asked.total() > 20 else None

    with FakePerspective(hang) as server:
        worker = subprocess.Popen(
            [sys.executable, "-c", code, server.url, str(tmp_path)], env={**os.environ, "PERSPECTIVE_API_KEY": KEY}
        )
        deadline = time.monotonic() + 120
        while server.asked.total() < 24 and worker.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        worker.kill()
        assert worker.wait() == -signal.SIGKILL
        assert server.answered.total() == 20
        hanging.clear()
        assert right_or_nan(TEXTS, ask(server.url, TEXTS, cache=tmp_path)) == [None] * 40
    # a place on the wire takes the next text only when its last score is on disk
    assert 40 <= server.answered.total() <= 40 + 4
    assert set(server.asked) == set(TEXTS)
    assert all(KEY.encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
