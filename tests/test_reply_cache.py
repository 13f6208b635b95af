import logging
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.fake_openai import Answer, FakeOpenAI, completion, error
from trl import reply_cache as cache_module
from trl.critic.openai import CriticAuthError, OpenAICritic
from trl.critic.template import PromptTemplate
from trl.critic.types import Critique, CritiqueRequest
from trl.reply_cache import FILE, ReplyCache

GOOD = "[Span 1]: a treat"
KEY = "sk-test-0123456789abcdef"
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def template_of(folder: Path, text: str = "Quote it: {}") -> PromptTemplate:
    (folder / "p.txt").write_text(text)
    return PromptTemplate.from_file(folder / "p.txt", style="sentiment")


@pytest.fixture
def template(tmp_path: Path) -> PromptTemplate:
    return template_of(tmp_path)


def ask(template: PromptTemplate, server: FakeOpenAI, *texts: str, **settings: Any) -> list[Critique]:
    """What a run of its own gets."""
    critic = OpenAICritic(template, **{"model": "m", "base_url": server.url, "max_retries": 0, **settings})
    try:
        return critic.critique([CritiqueRequest(text) for text in texts])
    finally:
        critic.close()


def test_a_later_run_asks_only_what_is_new_and_the_preflight(template: PromptTemplate, tmp_path: Path) -> None:
    with FakeOpenAI([completion(GOOD)]) as server:
        first = ask(template, server, "a treat", "b", "b", cache=tmp_path / "made" / "here")
        assert len(server.requests) == 1 + 2
        again = ask(template, server, "b", "new", "a treat", "a treat", cache=tmp_path / "made" / "here")
        assert len(server.requests) == 3 + 1 + 1
        assert {c.reply for c in again} == {GOOD}
        assert again[2].spans == first[0].spans
        assert [c.call.cached for c in again if c.call] == [True, False, True, True]
        assert [c.call.requests for c in again if c.call] == [0, 1, 0, 0]


def test_everything_that_a_reply_depends_on_is_in_the_key(template: PromptTemplate, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    with FakeOpenAI([completion(GOOD)]) as server, FakeOpenAI([completion(GOOD)]) as other:
        ask(template, server, "a", cache=folder)
        changes: list[dict[str, Any]] = [{"model": "n"}, {"max_tokens": 99}, {"base_url": other.url}]
        for change in changes:
            (critique,) = ask(template, server, "a", cache=folder, **change)
            assert critique.call is not None
            assert not critique.call.cached, change
        (critique,) = ask(template_of(tmp_path, "Quote it! {}"), server, "a", cache=folder)
        assert critique.call is not None
        assert not critique.call.cached
        # what does not change a reply does not change the key
        (critique,) = ask(template, server, "a", cache=folder, timeout=9, max_concurrency=1, requests_per_minute=50)
        assert critique.call is not None
        assert critique.call.cached


@pytest.mark.parametrize(
    "trouble", [error(500), error(400), error(403), Answer(200, b"{"), Answer(200, b'{"choices": []}')]
)
def test_failures_are_not_kept(template: PromptTemplate, tmp_path: Path, trouble: Answer) -> None:
    with FakeOpenAI([completion("OK"), trouble, completion(GOOD)]) as server:
        assert ask(template, server, "a", cache=tmp_path)[0].status == "failed"
        assert ask(template, server, "a", cache=tmp_path)[0].status == "ok"


def test_a_refused_key_is_not_kept(template: PromptTemplate, tmp_path: Path) -> None:
    with FakeOpenAI([error(401), completion(GOOD)]) as server:
        with pytest.raises(CriticAuthError):
            ask(template, server, "a", cache=tmp_path)
        assert ask(template, server, "a", cache=tmp_path)[0].status == "ok"


@pytest.mark.parametrize("reply", ["I can't help with that.", "", "None identified"])
def test_unparsable_and_empty_replies_are_kept(template: PromptTemplate, tmp_path: Path, reply: str) -> None:
    with FakeOpenAI([completion(reply)]) as server:
        first = ask(template, server, "a", cache=tmp_path)
        assert ask(template, server, "a", cache=tmp_path) == first
        assert len(server.requests) == 1 + 1 + 1


def test_replies_that_came_before_an_error_are_kept(template: PromptTemplate, tmp_path: Path) -> None:
    def answer(body: dict[str, Any]) -> Answer:
        return error(401) if "bad" in body["messages"][0]["content"] else completion(GOOD)

    with FakeOpenAI(answer) as server:
        with pytest.raises(CriticAuthError):
            ask(template, server, "a", "b", "bad", cache=tmp_path)
        assert [c.call.cached for c in ask(template, server, "a", "b", cache=tmp_path) if c.call] == [True, True]


def damage_random(folder: Path) -> None:
    folder.mkdir()
    (folder / FILE).write_bytes(os.urandom(5000))


def damage_torn(folder: Path) -> None:
    ReplyCache(folder).put({str(i): "x" * 500 for i in range(200)})
    content = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(content[:4096] + os.urandom(len(content) // 2))


def damage_other_table(folder: Path) -> None:
    folder.mkdir()
    with sqlite3.connect(folder / FILE) as connection:
        connection.execute("CREATE TABLE replies (something TEXT)")


def damage_is_a_file(folder: Path) -> None:
    folder.write_text("not a folder")


def damage_is_a_folder(folder: Path) -> None:
    (folder / FILE).mkdir(parents=True)


@pytest.mark.parametrize(
    "damage", [damage_random, damage_torn, damage_other_table, damage_is_a_file, damage_is_a_folder]
)
def test_a_useless_file_costs_one_warning(
    template: PromptTemplate, tmp_path: Path, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    damage(tmp_path / "cache")
    with FakeOpenAI([completion(GOOD)]) as server:
        critic = OpenAICritic(template, "m", base_url=server.url, cache=tmp_path / "cache")
        for text in "ab":
            assert critic.critique([CritiqueRequest(text)])[0].status == "ok"
        critic.close()
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warnings) == 1
    assert str(tmp_path / "cache") in warnings[0]


def test_a_disk_that_is_full_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = ReplyCache(tmp_path)
    cache.put({"a": "x"})
    connect = sqlite3.connect

    def small(*args: Any, **kwargs: Any) -> sqlite3.Connection:
        connection = connect(*args, **kwargs)
        connection.execute("PRAGMA max_page_count = 3")  # SQLite's own "database or disk is full"
        return connection

    monkeypatch.setattr(sqlite3, "connect", small)
    cache.put({"b": "x" * 100_000})
    cache.put({"c": "x"})
    assert len(caplog.records) == 1
    assert "full" in caplog.text
    monkeypatch.undo()
    assert ReplyCache(tmp_path).get(["a", "b", "c"]) == {"a": "x"}


def test_a_locked_file_is_left_alone_while_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cache_module, "_LOCK_SECONDS", 0.05)
    cache = ReplyCache(tmp_path)
    cache.put({"a": "x"})
    with sqlite3.connect(tmp_path / FILE, isolation_level=None) as other:
        other.execute("BEGIN EXCLUSIVE")
        assert cache.get(["a"]) == {}
        cache.put({"b": "y"})
        other.execute("COMMIT")
    other.close()
    cache.put({"c": "z"})
    assert cache.get(["a", "b", "c"]) == {"a": "x", "c": "z"}
    assert len(caplog.records) == 1


def test_any_text_can_be_kept(tmp_path: Path) -> None:
    replies = {"a": "", "b": "naïve 🎬 \u0000 \r\n 'quoted' \u202e", "c": "lone \ud800 surrogate", "d": "x" * 1_000_000}
    cache = ReplyCache(tmp_path)
    cache.put(replies)
    assert cache.get([*"abcde"]) == replies | {"c": "lone ? surrogate"}
    assert cache.get([]) == {}
    cache.put({})
    cache.put({"a": "again"})
    assert cache.get(["a"]) == {"a": "again"}


WORKER = """
import sys
from trl.critic.openai import OpenAICritic
from trl.critic.template import PromptTemplate
from trl.critic.types import CritiqueRequest
url, prompt, folder = sys.argv[1:]
template = PromptTemplate.from_file(prompt, style="sentiment")
critic = OpenAICritic(template, "m", base_url=url, cache=folder)
for batch in range(6):
    asked = [CritiqueRequest(f"text {batch} {i}") for i in range(8)]
    print(*[c.status + c.spans[0].text for c in critic.critique(asked)])
"""


def test_processes_share_one_file(template: PromptTemplate, tmp_path: Path) -> None:
    processes, texts = 3, 48

    def answer(body: dict[str, Any]) -> Answer:
        return completion("[Span 1]: " + body["messages"][0]["content"].rpartition(" ")[2])

    with FakeOpenAI(answer) as server:
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER, server.url, str(tmp_path / "p.txt"), str(tmp_path / "cache")],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for _ in range(processes)
        ]
        outputs = [worker.communicate(timeout=120) for worker in workers]
        assert [worker.returncode for worker in workers] == [0] * processes
        for stdout, stderr in outputs:
            assert stdout.split() == [f"ok{i}" for _ in range(6) for i in range(8)]
            assert "cache" not in stderr
        assert texts + processes <= len(server.requests) <= processes * (texts + 1)  # at worst asked by each
        before = len(server.requests)
        again = ask(template, server, *(f"text {b} {i}" for b in range(6) for i in range(8)), cache=tmp_path / "cache")
        assert all(critique.call and critique.call.cached for critique in again)
        assert len(server.requests) == before + 1
    with sqlite3.connect(tmp_path / "cache" / FILE) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert connection.execute("SELECT count(*) FROM replies").fetchone() == (texts,)
    connection.close()


def test_no_key_and_no_prompt_on_disk(
    template: PromptTemplate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    with FakeOpenAI([completion(f"[Span 1]: {KEY}")]) as server:
        (critique,) = ask(template, server, "a confidential text", cache=tmp_path / "cache")
        assert critique.spans[0].text == "[key]"
    content = b"".join(path.read_bytes() for path in (tmp_path / "cache").iterdir())
    assert b"[Span 1]" in content
    assert KEY.encode() not in content
    assert b"confidential" not in content
