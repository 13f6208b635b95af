"""Snippets that mean ill: each comes back as NaN with a reason, in time, and nothing of it is left."""

import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.hostile_snippets import ALWAYS, FILES, RUNNER, SYSTEM_CALLS, TIMED_OUT
from tests.faults.sandbox_processes import assert_only_idle_workers, processes_of
from trl.rewards.sandbox import Outcome, Sandbox

PROJECT = Path(__file__).parents[2]
SHORT, LONG, SLACK = 1.0, 10.0, 2.0
GOOD = "return 0.5"
KEY = "sk-secret-0123456789"


def call(text: str, example: dict | None = None) -> tuple[dict, dict]:
    return example or {}, {"parts": [{"text": text}]}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict]:
    """Keys in the project, in the home folder and in the environment; a server that must never be reached."""
    home = tmp_path_factory.mktemp("home")
    keys = [PROJECT / f".key-of-the-tests-{os.getpid()}", home / "key"]
    for key in keys:
        key.write_text(KEY)
    keys[1].chmod(0o644)
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OPENAI_API_KEY", KEY)
        patch.setenv("HOME", str(home))
        server.setblocking(False)
        example = {"key": str(keys[0]), "home_key": str(keys[1]), "project": str(PROJECT)}
        yield example | {"parent": os.getpid(), "port": server.getsockname()[1]}
        with pytest.raises(BlockingIOError):
            server.accept()
    assert [key.read_text() for key in keys] == [KEY, KEY]
    assert not (PROJECT / "poison").exists()
    for key in keys:
        key.unlink()


@pytest.fixture(scope="module")
def prisons(attacked: dict) -> Iterator[dict[float, Sandbox]]:
    """By deadline. A busy machine takes its time over what ends by itself; what never ends need not wait for it."""
    with (
        Sandbox(RUNNER, timeout=SHORT, memory_bytes=200 * 2**20, workers=1) as short,
        Sandbox(RUNNER, timeout=LONG, memory_bytes=200 * 2**20, workers=1) as long,
    ):
        for prison in (short, long):
            assert prison.evaluate([call(GOOD)]) == [Outcome(0.5)]
            assert {"limits", "process group", "system calls"} <= set(prison.guards)
            assert {"namespaces", "Landlock"} & set(prison.guards)
        yield {SHORT: short, LONG: long}


CASES = ALWAYS | FILES | SYSTEM_CALLS


@pytest.mark.parametrize("name", CASES)
def test_hostile(name: str, prisons: dict[float, Sandbox], attacked: dict) -> None:
    text, reason = CASES[name]
    deadline = SHORT if reason == TIMED_OUT else LONG
    workers = processes_of(os.getpid())
    begin = time.monotonic()
    (outcome,) = prisons[deadline].evaluate([call(text, attacked)])
    seconds = time.monotonic() - begin
    assert math.isnan(outcome.value)
    assert re.search(reason, str(outcome.reason)), outcome.reason
    assert len(str(outcome.reason)) <= 1000
    assert len(outcome.logs) <= 65536
    assert seconds < deadline + SLACK
    assert KEY not in str(outcome)
    assert processes_of(os.getpid()) == workers  # the same ones: nothing was repeated
    assert_only_idle_workers(2)
    assert prisons[LONG].evaluate([call("import os\nreturn len(os.listdir('.')) + 0.5")]) == [Outcome(0.5)]


def test_threads_that_are_left_running_end_with_the_call(prisons: dict[float, Sandbox]) -> None:
    spin = "import threading\ndef spin():\n  while True: pass\n"
    text = spin + "for _ in range(3): threading.Thread(target=spin).start()\nreturn 0.5"
    assert prisons[LONG].evaluate([call(text)]) == [Outcome(0.5)]
    assert_only_idle_workers(2)
    text = "import threading\nwhile True: threading.Thread(target=threading.Event().wait).start()"
    (outcome,) = prisons[LONG].evaluate([call(text)])
    assert re.match("RuntimeError: can't start new thread|MemoryError", str(outcome.reason))
    assert_only_idle_workers(2)


def test_all_at_once_in_order_with_good_ones_between(prisons: dict[float, Sandbox], attacked: dict) -> None:
    names = list(CASES)
    calls = [one for name in names for one in (call(CASES[name][0], attacked), call(GOOD))]
    with Sandbox(RUNNER, timeout=SHORT, memory_bytes=200 * 2**20, workers=6) as sandbox:
        found = sandbox.evaluate(calls)
        assert_only_idle_workers(6 + len(prisons))
    for name, bad, good in zip(names, found[::2], found[1::2], strict=True):
        assert math.isnan(bad.value)
        assert re.search(CASES[name][1] + "|no result within", str(bad.reason)), (name, bad.reason)
        assert good.value == 0.5 or good.reason == "no result within 1 s"  # six spinning at once leave it little
    assert_only_idle_workers(2)


SPINNING = {"infinite loop", "stops itself", "fork loop that insists"}  # the others of that kind only take time
LOST = {  # of the guards that the tests' own process has; the user id goes with some of them
    "ordinary user": set(),
    "container": {"namespaces"},
    "old kernel": {"namespaces", "Landlock"},
    "no filter": {"system calls"},
}


@pytest.mark.parametrize("world", LOST)
def test_where_the_system_allows_less(
    world: str, prisons: dict[float, Sandbox], attacked: dict, tmp_path: Path
) -> None:
    expected = set(prisons[SHORT].guards) - LOST[world] - {"user id"}
    files = FILES if expected & {"namespaces", "Landlock"} else {}
    cases = ALWAYS | files | (SYSTEM_CALLS if "system calls" in expected else {})
    cases = {name: case for name, case in cases.items() if case[1] != TIMED_OUT or name in SPINNING}
    temporary = tmp_path / "temporary"
    temporary.mkdir(mode=0o711)
    (tmp_path / "calls").write_text(json.dumps([[attacked, text] for text, _ in cases.values()]))
    command = [sys.executable, "-m", "tests.faults.sandbox_worlds", world]
    command += [str(tmp_path / "calls"), str(tmp_path / "result")]
    with subprocess.Popen(command, cwd=PROJECT, env=dict(os.environ, TMPDIR=str(temporary))) as process:
        assert process.wait(timeout=60) == 0
    found = json.loads((tmp_path / "result").read_text())
    assert set(found["guards"]) - {"user id"} == expected
    for (name, (_, reason)), (value, why) in zip(cases.items(), found["outcomes"], strict=True):
        assert math.isnan(value), name
        assert re.search(reason + "|no result within", why), (name, why)
    assert found["seconds"] < len(cases) * (SHORT + SLACK) / 4
    assert processes_of(process.pid) == []
    assert list(temporary.iterdir()) == []
