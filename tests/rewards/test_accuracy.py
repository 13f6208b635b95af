"""Rewards by math verification: values, forms of input, and the processes that answers are checked in."""

import json
import math
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from trl.rewards import accuracy, accuracy_reward, get_cosine_scaled_reward, reasoning_accuracy_reward

RIGHT, WRONG = r"\boxed{\frac{63}{400}}", r"\boxed{\frac{64}{400}}"
GOLD = "63/400"

HOSTILE = {
    "power tower": r"\boxed{10^{10^{10}}}",
    "four nines": r"\boxed{9^{9^{9^{9}}}}",
    "four nines in code": r"\boxed{9**9**9**9}",
    "factorial": r"\boxed{10000000000!}",
    "deep braces": r"\boxed{" + "{" * 5000 + "1" + "}" * 5000 + "}",
    "nested fractions": r"\boxed{" + r"\frac{1}{" * 400 + "2" + "}" * 400 + "}",
    "one megabyte": "x" * 1_000_000,
    "one megabyte of digits": r"\boxed{" + "9" * 1_000_000 + "}",
    "unclosed": r"\boxed{" * 1000,
    "control characters": "\\boxed{\x00\x1b\udcff\u202e1\n}",
    "too many digits to print": r"\boxed{10^{5000}}",
}


def conversation(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def worker_pids() -> set[int]:
    return {worker.process.pid for worker in accuracy._shared_pool().workers.values()}


def run_script(code: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(code)
    return subprocess.run([sys.executable, str(script), *arguments], text=True, capture_output=True, timeout=120)


def wait_until_gone(pids: list[int]) -> None:
    until = time.monotonic() + 30
    while any(map(psutil.pid_exists, pids)):
        assert time.monotonic() < until, f"still there: {[pid for pid in pids if psutil.pid_exists(pid)]}"
        time.sleep(0.05)


def test_verdicts() -> None:
    texts = [RIGHT, WRONG, "63/400", "", RIGHT]
    assert accuracy_reward(texts, [GOLD] * 4 + ["six"]) == [1.0, 0.0, 0.0, 0.0, None]
    # one mathematical object in other notations
    assert accuracy_reward([r"\boxed{0.5}", "The answer is $x(x+1)$."], [r"\frac{1}{2}", "$x^2 + x$"]) == [1.0, 1.0]
    # a formula must be in a box or announced; a plain number is no answer
    assert accuracy_reward(["So $2$.", "It is 2.", "So the answer is $2$."], ["2"] * 3) == [0.0, 0.0, 1.0]
    # the box counts before another formula, the last box before the first
    changed_mind = r"\boxed{2}. But that left out the first of the cases that the question names, so it is \boxed{1}"
    assert accuracy_reward([r"\boxed{1} or $2$", changed_mind], ["1", "1"]) == [1.0, 1.0]
    # boxes close to each other are one answer with several values
    assert accuracy_reward([r"\boxed{1} and \boxed{2}"] * 2, ["1", r"$\{1, 2\}$"]) == [0.0, 1.0]


def test_no_verdict_without_a_solution() -> None:
    assert accuracy_reward([RIGHT, RIGHT, "nothing"], [None, "", None]) == [None, None, None]
    assert accuracy_reward([], []) == []


def test_conversations_and_strings_are_one() -> None:
    texts = [RIGHT, WRONG, "π ≈ \\boxed{3} ✓"]
    solution = [GOLD, GOLD, "3"]
    expected = [1.0, 0.0, 1.0]
    assert accuracy_reward(completions=texts, solution=solution) == expected
    assert accuracy_reward(completions=[conversation(text) for text in texts], solution=solution) == expected
    # after a call of a tool: what the tool said and what was written before it are not the answer
    tools = [*conversation(RIGHT), {"role": "tool", "content": RIGHT}, *conversation(WRONG)]
    assert accuracy_reward(completions=[tools], solution=[GOLD]) == [0.0]


def test_keywords_that_it_does_not_know_are_ignored() -> None:
    ignored = {"prompts": ["p"], "completion_ids": [[1]], "trainer_state": object(), "log_metric": print, "extra": []}
    assert accuracy_reward(completions=[RIGHT], solution=[GOLD], **ignored) == [1.0]


def test_log_extra_gets_what_was_compared() -> None:
    columns: dict[str, list[str]] = {}
    accuracy_reward([RIGHT, "none", RIGHT], [GOLD, GOLD, "six"], log_extra=columns.__setitem__)
    assert columns == {
        "solution": [GOLD, GOLD, "six"],
        "gold_parsed": ["[63/400, '63/400']", "[63/400, '63/400']", "[unparseable]"],
        "answer_parsed": [r"[63/400, '\\frac{63}{400}']", "[unparseable]", "[skipped]"],
    }
    reasoning_accuracy_reward(["no end", f"</think> {RIGHT}"], ["six", GOLD], log_extra=columns.__setitem__)
    assert columns["gold_parsed"] == ["[incomplete reasoning]", "[63/400, '63/400']"]
    assert columns["answer_parsed"][0] == "[incomplete reasoning]"


def test_only_what_follows_the_last_delimiter_is_judged() -> None:
    texts = [
        f"<think>{WRONG}</think>{RIGHT}",
        f"<think>{RIGHT}</think>{WRONG}",
        f"{RIGHT}</think>{RIGHT}</think>{WRONG}",
        f"<think>{RIGHT}",
        f"</think>{RIGHT}",
    ]
    assert reasoning_accuracy_reward(texts, [GOLD] * 4 + ["six"]) == [1.0, 0.0, 0.0, 0.0, None]
    assert reasoning_accuracy_reward([RIGHT, RIGHT], ["six", None]) == [0.0, 0.0]  # no delimiter, whatever the gold


def test_the_last_of_several_delimiters_counts() -> None:
    """Also where it is not the first of the list: the peer takes the first one of the list that occurs."""
    text = f"</think>{RIGHT}<answer>none"
    for delimiters in (["</think>", "<answer>"], ["<answer>", "</think>"]):
        assert reasoning_accuracy_reward([text], [GOLD], reasoning_delimiters=delimiters) == [0.0]
    assert reasoning_accuracy_reward([text], [GOLD], reasoning_delimiters=["</think>"]) == [1.0]


@pytest.mark.parametrize("delimiters", ["</think>", [], [""], [None]])
def test_delimiters_that_mean_nothing(delimiters: object) -> None:
    with pytest.raises(ValueError, match="reasoning_delimiters"):
        reasoning_accuracy_reward(["a"], ["1"], reasoning_delimiters=delimiters)  # type: ignore[arg-type]


def test_cosine_values() -> None:
    reward = get_cosine_scaled_reward(max_len=100)
    lengths = [25, 75, 25, 75, 0, 100, 1000, 50]
    texts = [RIGHT, RIGHT, WRONG, WRONG, WRONG, WRONG, RIGHT, RIGHT]
    got = reward(completions=texts, solution=[GOLD] * 7 + ["six"], completion_ids=[[1] * n for n in lengths])
    assert got[:4] == pytest.approx([0.926777, 0.573223, -0.926777, -0.573223], abs=1e-6)
    assert got[4:7] == pytest.approx([-1.0, -0.5, 0.5])
    assert got[7] is None


def test_cosine_bounds_are_the_callers() -> None:
    reward = get_cosine_scaled_reward(10, -3.0, -2.0, 5.0, 9.0)
    got = reward(completions=[RIGHT, RIGHT, WRONG, WRONG], solution=[GOLD] * 4, completion_ids=[[], [1] * 10] * 2)
    assert got == pytest.approx([9.0, 5.0, -3.0, -2.0])


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_len": 0}, "max_len"),
        ({"max_len": math.nan}, "max_len"),
        ({"max_len": 5, "min_value_wrong": math.nan}, "min_value_wrong"),
        ({"max_len": 5, "max_value_correct": math.inf}, "max_value_correct"),
    ],
)
def test_cosine_arguments_out_of_range(settings: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        get_cosine_scaled_reward(**settings)  # type: ignore[arg-type]


def test_callables_can_be_pickled_and_say_their_names() -> None:
    reward = get_cosine_scaled_reward(max_len=100)
    assert reward.__name__ == "cosine_scaled_reward"
    assert accuracy_reward.__name__ == "accuracy_reward"
    again = pickle.loads(pickle.dumps(reward))
    assert again.__name__ == "cosine_scaled_reward"
    assert again([RIGHT], [GOLD], [[1] * 100]) == pytest.approx([0.5])
    assert pickle.loads(pickle.dumps(accuracy_reward)) is accuracy_reward


def test_lists_of_different_length_are_named() -> None:
    with pytest.raises(ValueError, match="solution has 2 entries, completions has 1"):
        accuracy_reward([RIGHT], [GOLD, GOLD])
    with pytest.raises(ValueError, match="solution has 0"):
        reasoning_accuracy_reward([RIGHT], [])
    with pytest.raises(ValueError, match="completion_ids has 2"):
        get_cosine_scaled_reward(5)([RIGHT], [GOLD], [[1], [2]])


@pytest.mark.parametrize(
    "bad",
    [None, 5, [], {}, [{"role": "assistant"}], [{"content": None}], [{"content": ["a"]}], ["text"], b"text"],
    ids=repr,
)
def test_malformed_completions_are_named(bad: object) -> None:
    with pytest.raises(ValueError, match=r"completions\[1\] is .* expected a string or a list of messages"):
        accuracy_reward([RIGHT, bad], [GOLD, GOLD])  # type: ignore[list-item]


@pytest.mark.parametrize("bad", [5, 0.5, ["1", "2"], {"answer": "1"}, True], ids=repr)
def test_solutions_that_are_no_text_are_named(bad: object) -> None:
    """Left to the parser, they would silently take every such sample out of the training."""
    with pytest.raises(ValueError, match=r"solution\[1\] is .* expected one string"):
        accuracy_reward([RIGHT, RIGHT], [GOLD, bad])  # type: ignore[list-item]


def test_hostile_answers_end_and_leave_their_neighbours_alone() -> None:
    texts = [text for hostile in HOSTILE.values() for text in (hostile, RIGHT)]
    columns: dict[str, list[str]] = {}
    started = time.monotonic()
    rewards = accuracy_reward(texts, [GOLD] * len(texts), log_extra=columns.__setitem__)
    assert dict(zip(HOSTILE, rewards[::2], strict=True)) == dict.fromkeys(HOSTILE, 0.0)
    assert rewards[1::2] == [1.0] * len(HOSTILE)
    assert time.monotonic() - started < accuracy.DEADLINE * len(HOSTILE)
    assert all(isinstance(text, str) for text in columns["answer_parsed"])


def test_hostile_solutions_have_no_verdict_or_a_wrong_answer() -> None:
    rewards = accuracy_reward([RIGHT] * 3, [HOSTILE["deep braces"], HOSTILE["power tower"], GOLD])
    assert rewards == [None, 0.0, 1.0]


def test_a_worker_that_overruns_is_killed_and_replaced(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert accuracy_reward([RIGHT], [GOLD]) == [1.0]
    monkeypatch.setattr(accuracy, "DEADLINE", 0.7)  # before math-verify's own limits
    monkeypatch.setattr(accuracy._shared_pool(), "_warned", False)
    columns: dict[str, list[str]] = {}
    known = worker_pids()
    started = time.monotonic()
    hostile = [HOSTILE["power tower"]] * 3
    assert accuracy_reward(hostile, [GOLD] * 3, log_extra=columns.__setitem__) == [0.0] * 3
    assert time.monotonic() - started < 20
    assert accuracy_reward([RIGHT], [HOSTILE["deep braces"]], log_extra=columns.__setitem__) == [None]
    assert columns["gold_parsed"] == ["[timed out]"]
    assert [record.message for record in caplog.records if "could not be checked" in record.message] == [
        "an answer could not be checked within 0.7 s and counts as wrong (as 'no verdict' if it was the solution that "
        "took so long); further ones are not reported"
    ]
    monkeypatch.undo()
    assert accuracy_reward([RIGHT, WRONG] * 4, [GOLD] * 8) == [1.0, 0.0] * 4
    assert worker_pids() - known
    children = psutil.Process().children(recursive=True)
    assert not [child for child in children if child.status() == psutil.STATUS_ZOMBIE]
    assert {c.pid for c in children if any("math_worker" in a for a in c.cmdline())} == worker_pids()


def test_workers_killed_from_outside_are_replaced() -> None:
    accuracy_reward([RIGHT] * 8, [GOLD] * 8)
    killed = worker_pids()
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert accuracy_reward([RIGHT, WRONG] * 4, [GOLD] * 8) == [1.0, 0.0] * 4
    assert not killed & {p.pid for p in psutil.Process().children()}


def test_any_thread_may_call_and_order_is_kept() -> None:
    def call(offset: int) -> list[float | None]:
        texts = [rf"\boxed{{{offset + i % 3}}}" for i in range(60)]
        return accuracy_reward(texts, [str(offset)] * 60)

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(call, range(8))) == [[1.0, 0.0, 0.0] * 20] * 8
    assert len(worker_pids()) <= accuracy.WORKERS


def test_a_thousand_samples() -> None:
    rewards = accuracy_reward(
        [rf"\boxed{{\frac{{{i}}}{{7}}}}" for i in range(1000)], [f"{i - i % 2}/7" for i in range(1000)]
    )
    assert rewards == [1.0, 0.0] * 500


def test_workers_do_not_see_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    pool = accuracy._Pool()
    try:
        assert pool.judge([(GOLD, RIGHT)], False)[0].correct
        (worker,) = pool.workers.values()
        assert "sk-secret" not in str(psutil.Process(worker.process.pid).environ())
    finally:
        pool.close()
    assert not psutil.pid_exists(worker.process.pid)


def test_missing_math_verify_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("raise ImportError('not here')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = accuracy._Pool()
    try:
        with pytest.raises(ImportError, match=r"pip install 'math-verify>=0.9' \(not here\)"):
            pool.judge([(GOLD, RIGHT)] * 3, False)
    finally:
        pool.close()


def test_a_worker_that_cannot_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "math_verify.py").write_text("import os; os._exit(7)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = accuracy._Pool()
    try:
        with pytest.raises(RuntimeError, match=r"did not start \(exit code 7\)"):
            pool.judge([(GOLD, RIGHT)], False)
    finally:
        pool.close()


SPAWN = r"""
import json, multiprocessing, pathlib, sys
from trl.rewards import accuracy, accuracy_reward, get_cosine_scaled_reward, get_repetition_penalty_reward

def call(task):
    reward, keywords = task
    result = reward(**keywords)
    return result, [worker.process.pid for worker in (accuracy._pool.workers.values() if accuracy._pool else ())]

if __name__ == "__main__":
    texts, gold = [r"\boxed{2}", r"\boxed{3}"], ["2", "2"]
    tasks = [
        (accuracy_reward, {"completions": texts, "solution": gold}),
        (get_cosine_scaled_reward(4), {"completions": texts, "solution": gold, "completion_ids": [[1] * 4] * 2}),
        (get_repetition_penalty_reward(1), {"completion_ids": [[1, 1]]}),
    ]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        results = pool.map(call, tasks, chunksize=1)
    pathlib.Path(sys.argv[1]).write_text(json.dumps(results))
"""


def test_spawned_daemonic_processes_can_use_them(tmp_path: Path) -> None:
    done = run_script(SPAWN, tmp_path, str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out.json").read_text())
    assert [result for result, _ in results] == [[1.0, 0.0], [0.5, -0.5], [-0.5]]
    pids = [pid for _, pids in results for pid in pids]
    assert pids
    wait_until_gone(pids)  # the pool kills its processes: the workers notice


FORK = r"""
import json, os, pathlib, sys
from trl.rewards import accuracy, accuracy_reward

out = pathlib.Path(sys.argv[1])
pair = {"completions": [r"\boxed{2}", r"\boxed{3}"], "solution": ["2", "2"]}
before = accuracy_reward(**pair)
parents = [worker.process.pid for worker in accuracy._pool.workers.values()]
child = os.fork()
if child == 0:
    result = accuracy_reward(**pair)
    workers = [worker.process.pid for worker in accuracy._pool.workers.values()]
    out.with_suffix(".child").write_text(json.dumps([result, workers]))
    os._exit(0)
os.waitpid(child, 0)
out.write_text(json.dumps([before, accuracy_reward(**pair), parents]))
if sys.argv[2] == "killed":
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", ["at its end", "killed"])
def test_a_fork_has_workers_of_its_own_and_nothing_outlives_its_process(tmp_path: Path, end: str) -> None:
    done = run_script(FORK, tmp_path, str(tmp_path / "out.json"), end)
    assert done.returncode == (-signal.SIGKILL if end == "killed" else 0), done.stderr
    before, after, parents = json.loads((tmp_path / "out.json").read_text())
    result, workers = json.loads((tmp_path / "out.child").read_text())
    assert before == after == result == [1.0, 0.0]
    assert workers
    assert not set(workers) & set(parents)
    wait_until_gone(parents + workers)


BY_PATH = r"""
import importlib.util, json, pathlib, sys
sys.modules["trl"] = None  # an import of any trl fails
results = []
for name in ("accuracy", "shaping"):
    spec = importlib.util.spec_from_file_location("ours_" + name, pathlib.Path(sys.argv[2]) / (name + ".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if name == "accuracy":
        results.append(module.get_cosine_scaled_reward(1)([r"\boxed{2}", r"\boxed{3}"], ["2", "2"], [[1], [1]]))
    else:
        results.append(module.get_repetition_penalty_reward(1)([[1, 1]]))
        results.append(module.think_format_reward(["<think></think>"]))
heavy = {"torch", "transformers", "sympy", "math_verify", "numpy"} & set(sys.modules)
pathlib.Path(sys.argv[1]).write_text(json.dumps([results, sorted(heavy)]))
"""


def test_the_files_load_by_their_path_beside_another_trl(tmp_path: Path) -> None:
    folder = Path(accuracy.__file__).parent
    done = run_script(BY_PATH, tmp_path, str(tmp_path / "out.json"), str(folder))
    assert done.returncode == 0, done.stderr
    results, heavy = json.loads((tmp_path / "out.json").read_text())
    assert results == [[0.5, -0.5], [-0.5], [1.0]]
    assert heavy == []
