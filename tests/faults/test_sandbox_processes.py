"""Parents that die, workers that are lost, calls that are interrupted: the right answers, and nothing left."""

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.faults.sandbox_processes import assert_only_idle_workers, processes_of, wait_until
from trl.rewards import sandbox as sandbox_module
from trl.rewards.sandbox import Outcome, Sandbox

PROJECT = Path(__file__).parents[2]


def test_the_module_itself_may_be_hostile() -> None:
    evaluate = "\ndef evaluate(example, response): return 1"
    for lines, reason in {
        "while True: pass": "no result within 1 s",
        "import sys; sys.exit(0)": "the snippet called sys.exit (line 1 of the snippet)",
        "import os; os.fork()": "PermissionError",
        "raise SyntaxError('later')": "SyntaxError: later",
        "import nothing_of_that_name": "ModuleNotFoundError: No module named 'nothing_of_that_name'",
        "import antigravity, this; del evaluate": "NameError: name 'evaluate' is not defined",
    }.items():
        with Sandbox(lines + evaluate, timeout=1, workers=1) as sandbox:
            for outcome in sandbox.evaluate([({}, {})] * 2):
                assert math.isnan(outcome.value)
                assert str(outcome.reason).startswith(reason)
    assert_only_idle_workers(0)


PARENT = """
import sys
from tests.faults.sandbox_worlds import WORLDS
from trl.rewards.sandbox import Sandbox
WORLDS.get(sys.argv[1], lambda: None)()
lines = "import os, time\\ndef evaluate(example, response):\\n open('f', 'w').write('x')\\n" + sys.argv[2]
with Sandbox(lines, timeout=100, workers=2) as sandbox:
    open(sys.argv[3], "w").write(str(sandbox.guards))
    sandbox.evaluate([({}, {})] * 4)
"""


@pytest.mark.parametrize("world", ["all guards", "old kernel"])
@pytest.mark.parametrize("work", [" while True: pass", " time.sleep(100)"])
def test_a_killed_parent_takes_everything_with_it(world: str, work: str, tmp_path: Path) -> None:
    temporary, ready = tmp_path / "temporary", tmp_path / "ready"
    temporary.mkdir(mode=0o711)
    command = [sys.executable, "-c", PARENT, world, work, str(ready)]
    with subprocess.Popen(command, cwd=PROJECT, env=dict(os.environ, TMPDIR=str(temporary))) as parent:
        wait_until(lambda: len(processes_of(parent.pid)) == 4)  # two workers, two calls
        parent.kill()
    wait_until(lambda: processes_of(parent.pid) == [])
    wait_until(lambda: list(temporary.iterdir()) == [])


SLOW_ONCE = "import time\ndef evaluate(example, response):\n    time.sleep(0.5)\n    return 0.5"


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
def test_a_worker_lost_from_outside_is_replaced_and_its_call_repeated(
    how: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_module, "GRACE", 0.5)
    with Sandbox(SLOW_ONCE, timeout=2, workers=1) as sandbox:
        assert sandbox.evaluate([({}, {})])[0].value == 0.5
        (worker,) = processes_of(os.getpid())
        killer = subprocess.Popen(["/bin/sh", "-c", f"sleep 0.2; kill -{how} {worker.pid}"])
        assert [outcome.value for outcome in sandbox.evaluate([({}, {})] * 2)] == [0.5, 0.5]
        killer.wait()
        (replaced,) = processes_of(os.getpid())
        assert replaced.pid != worker.pid
    assert_only_idle_workers(0)


def test_a_worker_that_never_starts_is_a_reason_not_a_hang(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "worker.py"
    broken.write_text("raise SystemExit('this machine has no room')")
    monkeypatch.setattr(sandbox_module, "_WORKER", broken)
    with Sandbox(SLOW_ONCE) as sandbox:
        for outcome in sandbox.evaluate([({}, {})] * 2):
            assert math.isnan(outcome.value)
            assert re.match(r"the sandbox lost its worker 3 times: .*this machine has no room", str(outcome.reason))


def test_an_interrupt_ends_the_calls_under_way() -> None:
    """Ctrl-C during a long evaluation: out at once, and the next evaluation gets its own answers."""
    lines = "import time\ndef evaluate(example, response):\n    time.sleep(example['seconds'])\n    return 0.5"

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with Sandbox(lines, timeout=100, workers=2) as sandbox:
            signal.setitimer(signal.ITIMER_REAL, 1.0)
            with pytest.raises(KeyboardInterrupt):
                sandbox.evaluate([({"seconds": 90}, {})] * 4)
            assert sandbox.evaluate([({"seconds": 0}, {})] * 4) == [Outcome(0.5)] * 4
    finally:
        signal.signal(signal.SIGALRM, before)
    assert_only_idle_workers(0)


def test_a_forgotten_sandbox_leaves_nothing() -> None:
    sandbox = Sandbox(SLOW_ONCE, workers=1)
    sandbox.evaluate([({}, {})])
    assert_only_idle_workers(1)
    del sandbox
    assert_only_idle_workers(0)


def test_nothing_is_left_in_the_temporary_folder() -> None:
    assert [path for path in Path(tempfile.gettempdir()).glob("sandbox-*") if path.is_dir()] == []
