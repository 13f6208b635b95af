import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fake_openai import Answer
from tests.fake_perspective import LIMIT, FakePerspective, google_error, score_of
from trl.rewards import PerspectiveClient, PerspectiveReward
from trl.rewards.perspective import ATTRIBUTES, ENDPOINT, PerspectiveAuthError, cut_text

KEY = "AIzaSy-test-0123456789abcdef"
QUICK = {"qps": 1e4, "backoff": 0.01}


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERSPECTIVE_API_KEY", KEY)


def test_one_request_holds_all_attributes_and_the_key_is_not_in_the_url() -> None:
    with FakePerspective() as server:
        client = PerspectiveClient(endpoint=server.url, attributes=ATTRIBUTES, **QUICK)
        (found,) = client.analyze(["you are wonderful"])
        client.close()
    assert found.scores == {name: score_of("you are wonderful", name) for name in ATTRIBUTES}
    assert found.error is None
    (request,) = server.requests
    assert request["comment"] == {"text": "you are wonderful"}
    assert list(request["requestedAttributes"]) == list(ATTRIBUTES)
    assert request["languages"] == ["en"]
    assert request["doNotStore"] is True
    assert server.keys == [KEY]
    assert server.paths == ["/v1alpha1/comments:analyze"]


def test_order_is_kept_and_a_text_is_asked_once() -> None:
    texts = [f"text {index % 20}" for index in range(60)]

    def slow_first(text: str, nth: int) -> Answer | None:
        return google_error(500, "later") if text == "text 0" and nth == 1 else None

    with FakePerspective(slow_first, delay=0.01) as server:
        client = PerspectiveClient(endpoint=server.url, **QUICK)
        arrived = list(client.analyze_each(texts))
        assert sorted(index for index, _ in arrived) == list(range(60))
        assert arrived[0][0] != 0
        assert [a.scores["TOXICITY"] for a in client.analyze(texts)] == [score_of(text) for text in texts]
        client.close()
    assert len(server.asked) == 20
    assert server.asked["text 1"] == 2  # once per call: there is no cache


def test_a_base_url_gets_the_path() -> None:
    with FakePerspective() as server:
        client = PerspectiveClient(endpoint=server.url.removesuffix("/v1alpha1/comments:analyze"), **QUICK)
        assert client.endpoint == server.url
        assert client.analyze(["a"])[0].error is None
        client.close()


SCRIPTS = {
    "latin": "a dull film. ",
    "accents": "été à Noël ",
    "cyrillic": "плохой фильм ",
    "cjk": "糟糕的电影とても",
    "emoji": "🤬👩‍👩‍👧‍👦",
    "combining": "e\u0301a\u0308\u0323",
    "arabic": "فيلم سيئ ",
}


@pytest.mark.parametrize("shift", range(4))
@pytest.mark.parametrize("script", SCRIPTS)
def test_long_texts_are_cut_to_the_limit_at_a_code_point(script: str, shift: int) -> None:
    text = "x" * shift + SCRIPTS[script] * (LIMIT // len(SCRIPTS[script].encode()) + 50)
    with FakePerspective() as server:
        client = PerspectiveClient(endpoint=server.url, **QUICK)
        exact = cut_text(text)
        found = client.analyze([text, exact])
        client.close()
    (request,) = server.requests  # both are the same text once cut
    sent = request["comment"]["text"]
    assert server.too_long == []
    assert text.startswith(sent)
    assert LIMIT - 3 <= len(sent.encode()) <= LIMIT
    assert [a.scores["TOXICITY"] for a in found] == [score_of(sent)] * 2


@settings(deadline=None)
@given(st.text(), st.integers(0, 60))
def test_cut_text_is_the_longest_beginning_that_fits(text: str, limit: int) -> None:
    valid = text.encode(errors="replace").decode()
    kept = cut_text(text, limit)
    assert valid.startswith(kept)
    assert len(kept.encode()) <= limit
    assert kept == valid or len(valid[: len(kept) + 1].encode()) > limit


def test_lone_surrogates_and_control_characters_are_scored() -> None:
    with FakePerspective() as server:
        client = PerspectiveClient(endpoint=server.url, **QUICK)
        found = client.analyze(["bad \ud83d end", "nul \x00 \x1b[31m \u2028 \u202e"])
        client.close()
    assert all(a.error is None for a in found)
    assert "bad ? end" in server.asked


def test_blank_texts_are_not_sent_and_have_no_score() -> None:
    with FakePerspective() as server:
        client = PerspectiveClient(endpoint=server.url, **QUICK)
        found = client.analyze(["", " \n\t", "a"])
        client.close()
    assert list(server.asked) == ["a"]
    assert [math.isnan(a.scores["TOXICITY"]) for a in found] == [True, True, False]
    assert found[0].error == found[1].error == "empty text, not sent"


def test_an_unsupported_language_is_nan_with_that_reason() -> None:
    with FakePerspective() as server:
        client = PerspectiveClient(endpoint=server.url, languages=("en", "tlh"), attributes=ATTRIBUTES, **QUICK)
        (found,) = client.analyze(["nuqneH"])
        client.close()
    assert all(math.isnan(score) for score in found.scores.values()) and len(found.scores) == 8
    assert found.error == "language not supported"
    assert not found.transient
    assert len(server.requests) == 1  # a 400 is not retried


def test_the_cache_saves_queries_across_clients_and_knows_what_differs(tmp_path: Path) -> None:
    with FakePerspective(languages=("en", "de")) as server:
        for attributes, languages, asked in (
            (["TOXICITY"], ["en"], 2),
            (["TOXICITY"], ["en"], 2),
            (["TOXICITY"], ["de"], 4),
            (["TOXICITY", "INSULT"], ["de"], 6),
        ):
            client = PerspectiveClient(
                endpoint=server.url, attributes=attributes, languages=languages, cache=tmp_path, **QUICK
            )
            found = client.analyze(["a", "", "b"])
            client.close()
            assert len(server.requests) == asked
            assert found[0].scores == {name: score_of("a", name) for name in attributes}
            assert found[2].scores == {name: score_of("b", name) for name in attributes}
            assert math.isnan(found[1].scores["TOXICITY"])
    assert all(KEY.encode() not in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_failures_are_not_cached(tmp_path: Path) -> None:
    with FakePerspective(lambda text, nth: google_error(400, "Comment is odd.") if nth == 1 else None) as server:
        client = PerspectiveClient(endpoint=server.url, cache=tmp_path, **QUICK)
        assert client.analyze(["a"])[0].error == "HTTP 400"
        assert client.analyze(["a"])[0].scores["TOXICITY"] == score_of("a")
        client.close()


@pytest.mark.parametrize(
    "answer",
    [
        google_error(401, "no"),
        google_error(403, "Perspective Comment Analyzer API has not been used in project 1"),
        google_error(404, "gone"),
        google_error(400, f"API key not valid. Please pass a valid API key. {KEY}"),
    ],
)
def test_a_refused_key_or_a_service_that_ended_is_an_error_at_once(answer: Answer) -> None:
    with FakePerspective(lambda text, nth: answer) as server:
        client = PerspectiveClient(endpoint=server.url, **QUICK)
        with pytest.raises(PerspectiveAuthError, match=r"PERSPECTIVE_API_KEY.*ends on 2026-12-31.*classifier") as error:
            client.analyze([f"text {index}" for index in range(500)])
        client.close()
    assert KEY not in str(error.value)
    assert len(server.requests) < 50


def test_a_403_for_one_text_among_many_costs_that_text_alone() -> None:
    with FakePerspective(lambda text, nth: google_error(403, "no") if text == "bad" else None) as server:
        client = PerspectiveClient(endpoint=server.url, **QUICK)
        client.analyze(["first"])
        found = client.analyze(["a", "bad", "b"])
        client.close()
    assert [a.error for a in found] == [None, "HTTP 403", None]


def test_googles_endpoint_needs_a_key_and_says_that_it_ends(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    PerspectiveClient().close()
    assert "ends on 2026-12-31" in caplog.text and "moderation" in caplog.text and KEY not in caplog.text
    monkeypatch.delenv("PERSPECTIVE_API_KEY")
    with pytest.raises(PerspectiveAuthError, match=r"PERSPECTIVE_API_KEY.*ends on 2026-12-31.*no new keys.*classifier"):
        PerspectiveClient()


def test_wrong_arguments_are_named() -> None:
    for arguments, message in (
        ({"qps": 0}, "qps is 0"),
        ({"attributes": ()}, "attributes is empty"),
        ({"endpoint": f"{ENDPOINT}?key={KEY}"}, "has a query"),
        ({"endpoint": "ftp://host/x"}, "expected an http or https URL"),
        ({"key": "AIza\x07bell"}, "no header can carry"),
        ({"key": "AIzaé"}, "no header can carry"),
        ({"max_concurrency": 0}, "max_concurrency is 0"),
        ({"max_retries": -1}, "max_retries is -1"),
    ):
        with pytest.raises(ValueError, match=message) as error:
            PerspectiveClient(**arguments)
        assert KEY not in str(error.value) and "AIza" not in str(error.value)


def test_a_compatible_server_needs_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PERSPECTIVE_API_KEY")
    with FakePerspective() as server:
        client = PerspectiveClient(endpoint=server.url, **QUICK)
        assert client.analyze(["a"])[0].error is None
        client.close()
    assert server.keys == [""]


def test_no_more_than_qps_in_a_window_of_three_seconds() -> None:
    qps = 5
    with FakePerspective(lambda text, nth: google_error(503, "busy") if nth == 1 else None) as server:
        client = PerspectiveClient(endpoint=server.url, qps=qps, backoff=0)
        found = client.analyze([f"text {index}" for index in range(10)])
        client.close()
    assert all(a.error is None for a in found)
    assert len(server.times) == 20  # retries count
    assert server.most_in_window(3) <= 3 * qps + 1
    assert max(server.times) - min(server.times) == pytest.approx(19 / qps, rel=0.15)


def test_two_processes_share_the_limit() -> None:
    qps = 6
    code = (
        "import sys\nfrom trl.rewards import PerspectiveClient\n"
        "client = PerspectiveClient(endpoint=sys.argv[1], qps=6)\n"
        "assert all(a.error is None for a in client.analyze([f'{sys.argv[2]} {i}' for i in range(12)]))\n"
    )
    with FakePerspective() as server:
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", code, server.url, str(rank)],
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
            )
            for rank in range(2)
        ]
        assert [process.wait(60) for process in processes] == [0, 0]
    assert len(server.times) == 24
    assert server.most_in_window(3) <= 3 * qps + 2  # one more per process at the window's border


def test_the_reward_is_one_minus_toxicity_or_no_verdict() -> None:
    with FakePerspective(lambda text, nth: google_error(400, "no") if text == "odd" else None) as server:
        reward = PerspectiveReward(PerspectiveClient(endpoint=server.url, **QUICK))
        talk = [{"role": "assistant", "content": "hello"}, {"role": "assistant", "content": "there"}]
        got = reward(prompts=["p"] * 5, completions=["kind", "", "odd", talk, "kind"], completion_ids=[[1]] * 5)
        reward.client.close()
    kind = 1 - score_of("kind")
    assert got == [kind, None, None, 1 - score_of("hello\nthere"), kind]
    assert reward.errors == {"empty text, not sent": 1, "HTTP 400": 1}
    assert reward.__name__ == "perspective_reward"
    assert "p" not in server.asked  # the response alone is scored


def test_a_reward_needs_toxicity() -> None:
    with FakePerspective() as server:
        client = PerspectiveClient(endpoint=server.url, attributes=("INSULT",))
        with pytest.raises(ValueError, match="asks for INSULT; expected TOXICITY"):
            PerspectiveReward(client)
        client.close()


def test_closing_the_iterator_stops_asking(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with FakePerspective() as server:
        client = PerspectiveClient(endpoint=server.url, qps=20, max_concurrency=2)
        arriving = client.analyze_each([str(index) for index in range(100)])
        next(arriving)
        arriving.close()
        client.close()
        sent = len(server.requests)
    assert sent <= 4
