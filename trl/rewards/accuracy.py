"""Is the answer right? Rewards that compare a formula in the completion with a known solution (math-verify).

Model output is hostile to a computer algebra system: ``10^{10^{10}}`` is eleven characters and hours of work. So
answers are checked in a few worker processes that are killed at a deadline and replaced. They start at the first
call (0.5 s), are shared by all threads, and end with this process. POSIX only.

Needs only the standard library here (the workers need math-verify), so that this file can also be loaded by its
path where ``trl`` is another library, and its functions given to that library's trainers as ``reward_funcs``.
"""

import atexit
import json
import logging
import math
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar

logger = logging.getLogger(__name__)

Completion = str | Sequence[Mapping[str, object]]
LogExtra = Callable[[str, list[str | None]], None]

DEADLINE = 10.0
"""Seconds of wall time for one sample; nearly all take a millisecond."""
START_DEADLINE = 120.0
"""Seconds for a worker to start, also on a machine that is very busy."""
WORKERS = min(4, os.cpu_count() or 1)

_INHERITED = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")
"""All that a worker sees of the environment: it works on text that nobody checked, and needs no keys."""


def accuracy_reward(
    completions: Sequence[Completion],
    solution: Sequence[str | None],
    log_extra: LogExtra | None = None,
    **_ignored: object,
) -> list[float | None]:
    r"""1.0 where the completion's answer equals the solution mathematically, else 0.0.

    The answer is LaTeX in ``\boxed{…}`` (the last one counts; boxes less than a sentence apart can be one answer
    with several values), or without a box a formula that is announced, as in "the answer is $2$"; the solution may be
    LaTeX or a plain expression. A completion without an answer that can be read, or whose check overran the
    deadline, gets 0.0. No verdict (None) where the solution is None, cannot be parsed, or not within the deadline.

    Args:
        completions: texts, or conversations, whose last message is judged.
        solution: one text per completion. Several accepted answers to one question are not supported.
        log_extra: called as ``log_extra(column name, one entry per completion)`` with what was compared: "solution",
            "gold_parsed" and "answer_parsed".

    Raises ``ValueError`` for lists of different length and for samples of another form (naming them),
    ``ImportError`` if math-verify is not installed.
    """
    return _judge(_texts(completions), solution, log_extra)


def reasoning_accuracy_reward(
    completions: Sequence[Completion],
    solution: Sequence[str | None],
    reasoning_delimiters: Sequence[str] | None = None,
    log_extra: LogExtra | None = None,
    **_ignored: object,
) -> list[float | None]:
    """``accuracy_reward`` of what follows the last of all ``reasoning_delimiters`` (default: ``</think>``).

    A completion without any delimiter never came to an answer: 0.0, whatever the solution.

    Raises ``ValueError`` also for delimiters that are empty or not a list of strings.
    """
    delimiters = ["</think>"] if reasoning_delimiters is None else reasoning_delimiters
    if isinstance(delimiters, str) or not delimiters or not all(isinstance(d, str) and d for d in delimiters):
        raise ValueError(f"reasoning_delimiters is {delimiters!r}; expected a list of strings that are not empty")
    answers = [_after_last(text, delimiters) for text in _texts(completions)]
    return _judge(answers, solution, log_extra)


@dataclass(frozen=True)
class _CosineScaledReward:
    max_len: int
    min_value_wrong: float
    max_value_wrong: float
    min_value_correct: float
    max_value_correct: float
    __name__: ClassVar[str] = "cosine_scaled_reward"  # trainers that take a list of reward functions report by this

    def __call__(
        self,
        completions: Sequence[Completion],
        solution: Sequence[str | None],
        completion_ids: Sequence[Sequence[int]],
        **_ignored: object,
    ) -> list[float | None]:
        """One reward per completion; None where ``accuracy_reward`` is None. ``completion_ids``: (B,) lists of ids."""
        _check_lengths(completions=completions, solution=solution, completion_ids=completion_ids)
        verdicts = accuracy_reward(completions, solution)
        return [
            None if verdict is None else self._scaled(verdict == 1.0, len(ids))
            for verdict, ids in zip(verdicts, completion_ids, strict=True)
        ]

    def _scaled(self, correct: bool, length: int) -> float:
        low, high = (
            (self.min_value_correct, self.max_value_correct)
            if correct
            else (self.max_value_wrong, self.min_value_wrong)  # swapped: a long wrong answer costs less
        )
        # the cosine would rise again past max_len
        return low + 0.5 * (high - low) * (1.0 + math.cos(math.pi * min(length / self.max_len, 1.0)))


def get_cosine_scaled_reward(
    max_len: int,
    min_value_wrong: float = -1.0,
    max_value_wrong: float = -0.5,
    min_value_correct: float = 0.5,
    max_value_correct: float = 1.0,
) -> Callable[..., list[float | None]]:
    """``accuracy_reward`` scaled by length: short right answers gain most, short wrong ones lose most.

    Between the two bounds of its kind the reward follows half a cosine over 0 … ``max_len`` completion tokens, and
    stays at the bound beyond. Source: Yeo et al. 2025, Demystifying Long Chain-of-Thought Reasoning, appendix C.1.

    The callable takes ``completions``, ``solution`` and ``completion_ids``, and can be pickled. Raises
    ``ValueError`` naming the argument if ``max_len`` is less than 1 or a bound is not finite.
    """
    if not max_len >= 1:
        raise ValueError(f"max_len is {max_len}; expected at least 1 token")
    reward = _CosineScaledReward(max_len, min_value_wrong, max_value_wrong, min_value_correct, max_value_correct)
    for name in ("min_value_wrong", "max_value_wrong", "min_value_correct", "max_value_correct"):
        if not math.isfinite(vars(reward)[name]):
            raise ValueError(f"{name} is {vars(reward)[name]}; expected a finite number")
    return reward


def _check_lengths(**lists: Sequence[object]) -> None:
    (first, reference), *others = lists.items()
    for name, values in others:
        if len(values) != len(reference):
            raise ValueError(f"{name} has {len(values)} entries, {first} has {len(reference)}; expected equally many")


def _texts(completions: Sequence[Completion]) -> list[str]:
    return [_text(completion, sample) for sample, completion in enumerate(completions)]


def _text(completion: Completion, sample: int) -> str:
    """The completion itself, or the content of its last message: after calls of tools, the final answer."""
    match completion:
        case str():
            return completion
        case [*_, {"content": str() as text}]:
            return text
    raise ValueError(
        f"completions[{sample}] is {completion!r:.100}; expected a string or a list of messages like "
        '{"role": "assistant", "content": "…"}'
    )


def _after_last(text: str, delimiters: Sequence[str]) -> str | None:
    ends = [text.rfind(delimiter) + len(delimiter) for delimiter in delimiters if delimiter in text]
    return text[max(ends) :] if ends else None


def _judge(
    answers: Sequence[str | None], solution: Sequence[str | None], log_extra: LogExtra | None
) -> list[float | None]:
    """The rewards of both functions. An answer of None is one that was never come to."""
    _check_lengths(completions=answers, solution=solution)
    for sample, gold in enumerate(solution):
        if not isinstance(gold, str | None):
            raise ValueError(f"solution[{sample}] is {gold!r:.100}; expected one string, or None for 'no verdict'")
    verdicts = [
        _Verdict(False, "[incomplete reasoning]", "[incomplete reasoning]")
        if answer is None
        else _Verdict(None, "[unparseable]", "[skipped]")
        for answer in answers
    ]
    wanted = [i for i, (gold, answer) in enumerate(zip(solution, answers, strict=True)) if gold and answer is not None]
    if wanted:
        pairs = [(str(solution[i]), str(answers[i])) for i in wanted]
        for i, verdict in zip(wanted, _shared_pool().judge(pairs, log_extra is not None), strict=True):
            verdicts[i] = verdict
    if log_extra is not None:
        log_extra("solution", list(solution))
        log_extra("gold_parsed", [verdict.gold for verdict in verdicts])
        log_extra("answer_parsed", [verdict.answer for verdict in verdicts])
    return [None if verdict.correct is None else float(verdict.correct) for verdict in verdicts]


@dataclass(frozen=True)
class _Verdict:
    correct: bool | None
    """None: the solution cannot be parsed."""
    gold: str
    answer: str
    """What was compared, in sympy's notation, or in brackets why there is nothing."""


class _WorkerEnded(Exception):
    """A worker ended in the middle of a sample: at the deadline, or by itself."""

    def __init__(self, known: _Verdict, overran: bool) -> None:
        super().__init__(known, overran)
        self.known, self.overran = known, overran


class _Worker:
    """One process that runs math_worker.py. Only one thread may use it at a time.

    A plain child with a socket, not one of ``multiprocessing``: that would run the user's main script again, and
    is not allowed inside daemonic processes. When this process dies, however it does, the worker reads the
    end of its input and ends too.
    """

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("math_worker.py"))],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                # one order of sets in all runs: sympy's results can depend on it
                env={name: os.environ[name] for name in _INHERITED if name in os.environ} | {"PYTHONHASHSEED": "0"},
                start_new_session=True,  # Ctrl-C is for the parent, which ends the workers in its own time
            )
        self._unread = b""
        try:
            greeting = self._receive(time.monotonic() + START_DEADLINE)
        except (OSError, EOFError) as error:
            self.end()
            code = self.process.returncode
            raise RuntimeError(f"a process for checking answers did not start (exit code {code})") from error
        if greeting != "ready":
            self.end()
            raise ImportError(str(greeting))

    def judge(self, gold: str, answer: str, describe: bool) -> _Verdict:
        """The verdict on one sample. Raises ``_WorkerEnded`` with as much as was known by then."""
        known = _Verdict(None, "[timed out]", "[skipped]")
        deadline = time.monotonic() + DEADLINE
        try:
            self._socket.settimeout(DEADLINE)
            self._socket.sendall(json.dumps([gold, answer, describe]).encode() + b"\n")
            if not self._receive(deadline):
                return _Verdict(None, "[unparseable]", "[skipped]")
            known = _Verdict(False, "[timed out]", "[timed out]")
            known = replace(known, correct=self._receive(deadline))
            if describe:
                gold_parsed, answer_parsed = self._receive(deadline)
                known = replace(known, gold=gold_parsed, answer=answer_parsed)
        except (OSError, EOFError) as error:
            self.end()
            raise _WorkerEnded(known, overran=isinstance(error, TimeoutError)) from error
        return known

    def end(self) -> None:
        """Kill the process and reap it."""
        self.forget()
        self.process.kill()
        self.process.wait()

    def forget(self) -> None:
        """Let go of the connection only: in a fork of the process that the worker belongs to."""
        self._socket.close()

    def _receive(self, deadline: float) -> Any:
        # not by a file object of the socket: its lock may be held forever in a fork
        while b"\n" not in self._unread:
            self._socket.settimeout(max(deadline - time.monotonic(), 1e-3))  # 0 would mean "do not wait"
            received = self._socket.recv(2**16)
            if not received:
                raise EOFError
            self._unread += received
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)


class _Pool:
    """Up to ``WORKERS`` threads, each with a worker of its own, which it replaces when that has ended."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="math-verify")
        self.workers: dict[int, _Worker] = {}
        """By the thread's identity."""
        self._warned = False

    def judge(self, pairs: Sequence[tuple[str, str]], describe: bool) -> list[_Verdict]:
        """Verdicts on (gold, answer) pairs, in their order."""
        return list(self._threads.map(self._judge, pairs, repeat(describe)))

    def close(self) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self.workers.values():
            worker.end()

    def _judge(self, pair: tuple[str, str], describe: bool, again: bool = True) -> _Verdict:
        try:
            return self._own_worker().judge(*pair, describe)
        except _WorkerEnded as ended:
            if again and not ended.overran:  # something else may have killed it
                return self._judge(pair, describe, again=False)
            if not self._warned:
                self._warned = True
                logger.warning(
                    "an answer could not be checked within %g s and counts as wrong (as 'no verdict' if it was the "
                    "solution that took so long); further ones are not reported",
                    DEADLINE,
                )
            return ended.known

    def _own_worker(self) -> _Worker:
        me = threading.get_ident()
        worker = self.workers.get(me)
        if worker is None or worker.process.returncode is not None:
            worker = self.workers[me] = _Worker()
        return worker


_pool: _Pool | None = None
_pool_lock = threading.Lock()


def _shared_pool() -> _Pool:
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = _Pool()
            atexit.register(_pool.close)
        return _pool


def _leave_pool_to_parent() -> None:
    """In a fork: the threads are not here, and an open connection would keep the parent's workers alive."""
    global _pool, _pool_lock
    _pool_lock = threading.Lock()
    if _pool is not None:
        atexit.unregister(_pool.close)
        for worker in _pool.workers.values():
            worker.forget()
        _pool = None


os.register_at_fork(after_in_child=_leave_pool_to_parent)
