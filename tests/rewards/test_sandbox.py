"""Snippets that mean well: values, order, libraries, a clean state for every call, and errors a person can act on."""

import json
import math
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from trl.rewards.sandbox import Outcome, Sandbox

CALL: tuple[dict, dict] = ({"references": {"answer": "4"}}, {"parts": [{"text": "4"}]})


def outcome_of(snippet: str, example: dict | None = None, response: dict | None = None) -> Outcome:
    with Sandbox(snippet, timeout=20, workers=1) as sandbox:
        (outcome,) = sandbox.evaluate([(example or CALL[0], response or CALL[1])])
    return outcome


def body(text: str) -> str:
    return "def evaluate(example, response):\n" + "".join(f"    {line}\n" for line in text.splitlines())


def test_the_documented_example_gets_camel_case_dicts() -> None:
    snippet = body("return float(response['parts'][0]['text'] == example['references']['answer'])")
    assert outcome_of(snippet) == Outcome(1.0)
    assert outcome_of(snippet, response={"parts": [{"text": "5"}]}) == Outcome(0.0)


@pytest.fixture(scope="module")
def echo() -> Iterator[Sandbox]:
    """Returns what the expression in the response is worth."""
    snippet = "import fractions, numpy, sympy\n" + body("return eval(response['parts'][0]['text'])")
    with Sandbox(snippet, timeout=20) as sandbox:
        yield sandbox


def worth(echo: Sandbox, *expressions: str) -> list[Outcome]:
    return echo.evaluate([({}, {"parts": [{"text": text}]}) for text in expressions])


def test_order_is_kept(echo: Sandbox) -> None:
    found = worth(echo, *[f"__import__('time').sleep({(7 * i) % 5 / 50}) or {i}" for i in range(30)])
    assert [outcome.value for outcome in found] == list(range(30))
    assert all(type(outcome.value) is float and outcome.reason is None for outcome in found)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("3", 3.0),
        ("-0.25", -0.25),
        ("1e300", 1e300),
        ("numpy.float32(0.5)", 0.5),
        ("numpy.int64(-2)", -2.0),
        ("numpy.float64(0.1)", 0.1),
        ("fractions.Fraction(1, 4)", 0.25),
        ("sympy.Rational(1, 2)", 0.5),
    ],
)
def test_real_numbers(echo: Sandbox, expression: str, value: float) -> None:
    assert worth(echo, expression) == [Outcome(value)]


@pytest.mark.parametrize(
    ("expression", "reason"),
    [
        ("None", "evaluate returned None (NoneType), not a finite number"),
        ("'1'", "evaluate returned '1' (str), not a finite number"),
        ("True", "evaluate returned True (bool), not a finite number"),
        ("1j", "evaluate returned 1j (complex), not a finite number"),
        ("float('nan')", "evaluate returned nan, not a finite number"),
        ("-numpy.float32('inf')", "evaluate returned -inf, not a finite number"),
        ("numpy.bool_(True)", "evaluate returned bool, not a finite number"),
        ("numpy.ones(1)", "evaluate returned ndarray, not a finite number"),
        ("[1.0]", "evaluate returned list, not a finite number"),
        ("10 ** 400", "OverflowError: int too large to convert to float"),
        ("'x' * 10**7", "evaluate returned 'xxxxxxxxxxxx...xxxxxxxxxxxxx' (str), not a finite number"),
        ("1 / 0", "ZeroDivisionError: division by zero (line 3 of the snippet)"),
    ],
)
def test_what_is_no_finite_number_is_nan_with_the_reason(echo: Sandbox, expression: str, reason: str) -> None:
    (outcome,) = worth(echo, expression)
    assert math.isnan(outcome.value)
    assert outcome.reason == reason


def test_a_failure_is_its_own_only(echo: Sandbox) -> None:
    found = worth(echo, "1", "1 / 0", "2", "None", "3")
    assert [outcome.value for outcome in found if outcome.reason is None] == [1, 2, 3]


def test_what_is_printed_becomes_logs() -> None:
    snippet = "import sys\n" + body("print('seen', '\\ud800 é 🙂')\nprint('more', file=sys.stderr)\nreturn 1")
    outcome = outcome_of(snippet)
    assert outcome.value == 1
    assert sorted(outcome.logs.splitlines()) == ["more", "seen \\ud800 é 🙂"]
    json.dumps(outcome.logs, ensure_ascii=False).encode()


def test_logs_are_cut_not_lost() -> None:
    outcome = outcome_of(body("print('x' * 200_000)\nreturn 0.5"))
    assert outcome.value == 0.5
    assert outcome.logs == "x" * 65536


def test_every_call_starts_clean() -> None:
    lines = "import os\nseen = []\n" + body(
        "seen.append(1)\nleft = os.listdir('.')\nopen('left', 'w').write('x')\nos.makedirs('a/b/c')\n"
        "os.mkdir('shut', 0)\nos.environ['LEFT'] = '1'\nglobals()['evaluate'] = None\n"
        "return len(seen) + 10 * len(left)"
    )
    with Sandbox(lines, timeout=20, workers=1) as sandbox:
        assert [outcome.value for outcome in sandbox.evaluate([CALL] * 5)] == [1] * 5


def test_the_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    assert outcome_of("import os\n" + body("return len(os.environ)")).value == 0
    assert outcome_of("import os\n" + body("return float(os.getenv('OPENAI_API_KEY') is None)")).value == 1


LIBRARIES = {
    "numpy": "numpy.linalg.norm(numpy.full((400, 400), 0.5)) / 200",
    "pandas": "pandas.DataFrame({'a': [1, 2]}).groupby('a').size().sum()",
    "sympy": "float(sympy.integrate(sympy.Symbol('x') * 2, (sympy.Symbol('x'), 0, 1)))",
    "scipy.stats": "scipy.stats.pearsonr([1, 2, 3], [2, 4, 6])[0]",
    "sklearn.metrics": "sklearn.metrics.f1_score([1, 0, 1], [1, 0, 1])",
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_libraries(library: str) -> None:
    outcome = outcome_of(body(f"import {library}\nreturn float({LIBRARIES[library]})"))
    assert outcome.reason is None
    assert outcome.value == pytest.approx(2 if library == "pandas" else 1)


def test_a_library_that_only_the_call_itself_imports() -> None:
    """Its own memory and its one core are enough for it."""
    lines = f"scipy = __import__('scipy.stats')\nreturn {LIBRARIES['scipy.stats']}"
    outcome = outcome_of(body(lines))
    assert outcome.reason is None
    assert outcome.value == pytest.approx(1)


def test_a_library_is_not_shared_between_calls() -> None:
    snippet = "import numpy, random\n" + body("numpy.pi += 1\nrandom.left = 1\nreturn numpy.pi")
    with Sandbox(snippet, timeout=20, workers=1) as sandbox:
        assert {outcome.value for outcome in sandbox.evaluate([CALL] * 3)} == {math.pi + 1}


@pytest.mark.parametrize(
    "lines",
    [
        "import dataclasses\n@dataclasses.dataclass\nclass Point:\n    x: 'float' = 1.0\n" + body("return Point().x"),
        "import asyncio\nasync def one():\n    return 1\n" + body("return asyncio.run(one())"),
        "from concurrent.futures import ThreadPoolExecutor\n"
        + body("with ThreadPoolExecutor(4) as pool:\n    return sum(pool.map(float, '1000'))"),
        "import tempfile\n"
        + body("with tempfile.TemporaryFile('w+') as f:\n    f.write('1')\n    f.seek(0)\n    return int(f.read())"),
        "import sqlite3\n" + body("return sqlite3.connect('db').execute('select 1').fetchone()[0]"),
        "import ctypes, ctypes.util\n" + body("return ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 1)()"),
        "import warnings, signal, zoneinfo\n"
        + body("warnings.warn('w')\nreturn zoneinfo.ZoneInfo('UTC').utcoffset(None).days + signal.SIGHUP"),
        "if __name__ == '__main__':\n    raise SystemExit\n" + body("return 1"),
        "evaluate = lambda example, response: 1",
        "exec('def evaluate(example, response): return 1')",
    ],
)  # fmt: skip
def test_ordinary_python_works(lines: str) -> None:
    assert outcome_of(lines) == Outcome(1.0, None, outcome_of(lines).logs)


def test_a_syntax_error_is_found_at_construction() -> None:
    with pytest.raises(ValueError, match=r"line 2 of the snippet: .*: retrun 1"):
        Sandbox("def evaluate(example, response):\n    retrun 1")
    with pytest.raises(ValueError, match="'return' outside function"):
        Sandbox("return 1")
    with pytest.raises(ValueError, match="snippet"):
        Sandbox("def evaluate(e, r): return 1\0")
    with pytest.raises(ValueError, match="snippet"):
        Sandbox("evaluate = " + "(" * 10_000)
    with pytest.raises(ValueError, match="can't be compiled: MemoryError"):
        Sandbox("evaluate = " + "-" * 50_000 + "1")


def test_a_library_that_is_a_program_ends_the_call_alone(caplog: pytest.LogCaptureFixture) -> None:
    outcome = outcome_of("import unittest.__main__\ndef evaluate(example, response): return 1.0")
    assert outcome.reason == "the snippet called sys.exit (line 1 of the snippet)"
    assert "was lost" not in caplog.text


def test_a_snippet_without_evaluate() -> None:
    for snippet in ("", "def evaluat(example, response): return 1", "# evaluate\nx = 'evaluate'"):
        with pytest.raises(ValueError, match=r"defines no evaluate"):
            Sandbox(snippet)
    outcome = outcome_of("class Judge:\n    def evaluate(self, example, response): return 1")
    assert outcome.reason == "the snippet defines no function named evaluate"


def test_arguments_that_make_no_sense() -> None:
    for arguments in ({"timeout": 0}, {"memory_bytes": 0}, {"workers": 0}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            Sandbox(body("return 1"), **arguments)


def test_rows_that_are_no_json_fail_alone() -> None:
    with Sandbox(body("return 1"), timeout=20, workers=1) as sandbox:
        bad, good = sandbox.evaluate([({"references": {1, 2}}, {}), CALL])
    assert math.isnan(bad.value)
    assert "can't be written as JSON" in str(bad.reason)
    assert good == Outcome(1.0)


def test_long_texts_and_lone_surrogates_arrive() -> None:
    text = "é🙂" * 2_000_000 + "\ud800"
    snippet = body("text = response['parts'][0]['text']\nreturn len(text) + float(text[-1] == '\\ud800')")
    assert outcome_of(snippet, response={"parts": [{"text": text}]}).value == 4_000_002


def test_no_calls() -> None:
    with Sandbox(body("return 1")) as sandbox:
        assert sandbox.evaluate([]) == []


def test_calls_run_side_by_side() -> None:
    with Sandbox("import time\n" + body("time.sleep(0.5)\nreturn 1"), timeout=20, workers=4) as sandbox:
        assert sandbox.guards[0] == "limits"
        sandbox.evaluate([CALL] * 4)
        begin = time.monotonic()
        sandbox.evaluate([CALL] * 8)
        assert time.monotonic() - begin < 3.5  # one after the other: 4 s


def test_two_sandboxes_and_many_threads_at_once() -> None:
    """The parent has threads that hold locks, as a trainer with an event loop has."""
    stop, noise = threading.Event(), threading.Lock()

    def busy() -> None:
        while not stop.is_set():
            with noise:
                json.dumps(list(range(1000)))

    others = [threading.Thread(target=busy) for _ in range(3)]
    found: dict[tuple[int, int], list[float]] = {}
    with Sandbox(body("return 1"), timeout=20) as one, Sandbox(body("return 2"), timeout=20) as two:

        def ask(number: int, sandbox: Sandbox, thread: int) -> None:
            found[number, thread] = [outcome.value for outcome in sandbox.evaluate([CALL] * 10)]

        asking = [
            threading.Thread(target=ask, args=(number, sandbox, thread))
            for thread in range(3)
            for number, sandbox in ((1, one), (2, two))
        ]
        for thread in others + asking:
            thread.start()
        for thread in asking:
            thread.join()
        stop.set()
        for thread in others:
            thread.join()
    assert found == {(number, thread): [number] * 10 for number in (1, 2) for thread in range(3)}


def test_a_closed_sandbox_says_so() -> None:
    sandbox = Sandbox(body("return 1"))
    sandbox.close()
    sandbox.close()
    with pytest.raises(ValueError, match="closed"):
        sandbox.evaluate([CALL])


def test_close_from_another_thread_ends_the_calls_under_way() -> None:
    sandbox = Sandbox("import time\n" + body("time.sleep(60)"), timeout=100, workers=2)
    timer = threading.Timer(1.0, sandbox.close)
    timer.start()
    begin = time.monotonic()
    assert [outcome.reason for outcome in sandbox.evaluate([CALL] * 5)] == ["the sandbox was closed"] * 5
    assert time.monotonic() - begin < 10


def test_importing_it_is_light() -> None:
    code = "import sys, trl.rewards.sandbox; assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
