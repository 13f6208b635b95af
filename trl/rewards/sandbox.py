"""Other people's `evaluate(example, response) -> float`, run where it can do little harm.

    with Sandbox(snippet, timeout=100) as sandbox:
        for outcome in sandbox.evaluate([(example, response), ...]):
            outcome.value, outcome.reason, outcome.logs

The snippet comes from a configuration file, is as trustworthy as whoever wrote that file, and reads text that a model
wrote. One worker process per core (`sandbox_worker.py`: the standard library, an empty environment, no import of this
package) has its libraries loaded; each call is a fork of it, in a session of its own, which runs the snippet's body
and `evaluate` from a clean state. When the call's verdict is in, or its time is up, the process is killed and reaped
and its folder emptied. `Sandbox.guards` lists which of these are active on this system:

- ``limits``: the deadline, 1 GB of memory beyond what Python and its libraries take, one core, files of 256 MB, 256
  open files, 1 MB of output. ``process group``: killed as one at the deadline.
- ``system calls`` (Linux, seccomp): no new process or program, no socket, no signal to another process, no change of
  a file's mode, owner or times, no namespaces, tracing, kernel keys, or memory that outlives the process.
- ``namespaces`` (Linux, where mounting is allowed to us or to a user namespace of ours): no network device, and a file
  system that holds only the folders Python and its libraries are loaded from, read-only, and an empty one of 256 MB.
- ``Landlock`` (Linux 5.13 and later): the same list of files where there are no namespaces, and beside them.
- ``user id`` (started as root, and Python's folders are readable to all): an id that owns nothing.

What it does not stop
- A snippet decides its own call's value, so it can also forge it (the channel of the result is in its process). It
  can't touch another call's, nor leave anything behind for one.
- Anything that a hole in the kernel allows: this is no virtual machine.
- Without ``namespaces`` and ``Landlock``: reading files that its user can read (project, home, keys on disk). With
  ``user id`` these are the files readable to everyone. Without ``namespaces``: filling the disk of the temporary
  folder with many files until the deadline.
- Without ``system calls`` (macOS, Linux on rare processors): the network, unless ``namespaces`` is active, and
  processes that leave the process group, which then outlive the call. A warning in the log says so.
- On macOS memory has no limit.
- In site-packages everything is readable, so no key belongs there.
"""

import ast
import contextlib
import json
import logging
import math
import os
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

logger = logging.getLogger(__name__)

TRIES = 3
GRACE = 60.0  # seconds beyond a call's own deadline after which its worker counts as stuck
_WORKER = Path(__file__).with_name("sandbox_worker.py")
_DYNAMIC = {"exec", "globals", "locals", "vars"}


@dataclass(frozen=True)
class Outcome:
    """Of one call: a finite number, or NaN and the reason; and the beginning of what it printed."""

    value: float
    reason: str | None = None
    logs: str = ""


class Sandbox:
    """Runs one snippet on many calls; see the module's docstring for what it stops and what not.

    Args:
        snippet: Python source that defines ``evaluate(example: dict, response: dict) -> float``.
        timeout: seconds per call.
        memory_bytes: memory per call.
        workers: calls that run at the same time; default: the cores this process may use.

    Raises:
        ValueError: the snippet has a syntax error, or defines no `evaluate`.
    """

    def __init__(self, snippet: str, *, timeout: float = 100.0, memory_bytes: int = 2**30, workers: int | None = None):
        if timeout <= 0 or memory_bytes <= 0 or (workers is not None and workers < 1):
            raise ValueError(
                f"timeout ({timeout}), memory_bytes ({memory_bytes}), workers ({workers}) must be positive"
            )
        check_snippet(snippet)
        self._size = workers or usable_cores()
        self._timeout = timeout
        self._settings = {
            "snippet": snippet,
            "timeout": timeout,
            "memory_bytes": memory_bytes,
            "libraries": [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")],
            "temporary": tempfile.gettempdir(),
        }
        self._workers: list[_Worker] = []
        self._closed = False
        self._one_at_a_time = threading.Lock()
        self._finish = weakref.finalize(self, _stop_all, self._workers, os.getpid())  # also at the interpreter's end

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all processes; calls under way in another thread come back as NaN."""
        self._closed = True
        for worker in list(self._workers):
            worker.hang_up()
        with self._one_at_a_time:
            self._finish()

    @property
    def guards(self) -> tuple[str, ...]:
        """The guards that this system allows; starts a worker if there is none."""
        with self._one_at_a_time:
            self._refuse_if_closed()
            worker = self._workers[0] if self._workers else self._start()
            while worker.guards is None:
                worker.receive()
            return worker.guards

    def evaluate(self, calls: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[Outcome]:
        """The outcomes of `evaluate(example, response)`, in the order of `calls`.

        Whatever a call does, its outcome is a number or NaN with the reason. Only when a worker is lost through no
        doing of the call is the call repeated. From several threads, one evaluation waits for the other.
        """
        with self._one_at_a_time:
            self._refuse_if_closed()
            return _Batch(calls, self._timeout).run(self)

    def _refuse_if_closed(self) -> None:
        if self._closed:
            raise ValueError("this sandbox is closed")

    def _start(self) -> "_Worker":
        worker = _Worker(self._settings | {"number": len(self._workers)})
        self._workers.append(worker)
        if self._closed:  # meanwhile, by another thread
            worker.hang_up()
        return worker

    def _idle(self, busy: "dict[_Worker, _Call]") -> "_Worker | None":
        idle = next((worker for worker in self._workers if worker not in busy), None)
        return idle or (self._start() if len(self._workers) < self._size else None)

    def _discard(self, worker: "_Worker", patience: float = 5.0) -> str:
        if worker in self._workers:
            self._workers.remove(worker)
        return worker.stop(patience)


@dataclass
class _Call:
    index: int
    payload: bytes
    tries: int = 0
    deadline: float = math.inf


class _Batch:
    """The calls of one evaluation on their way through the workers."""

    def __init__(self, calls: Sequence[tuple[dict[str, Any], dict[str, Any]]], timeout: float):
        self.timeout = timeout
        self.outcomes: list[Outcome] = [Outcome(math.nan)] * len(calls)
        self.queue: deque[_Call] = deque()
        self.busy: dict[_Worker, _Call] = {}
        for index, call in enumerate(calls):
            try:
                self.queue.append(_Call(index, json.dumps(call).encode()))
            except (TypeError, ValueError, RecursionError) as error:
                self.outcomes[index] = Outcome(math.nan, f"example and response can't be written as JSON: {error}")

    def run(self, sandbox: Sandbox) -> list[Outcome]:
        try:
            while self.queue or self.busy:
                while self.queue and (worker := sandbox._idle(self.busy)) is not None:
                    self.send(sandbox, worker, self.queue.popleft())
                deadline = min((call.deadline for call in self.busy.values()), default=0.0)
                ready = wait([w.socket for w in self.busy], timeout=max(0.0, deadline - time.monotonic()))
                late = time.monotonic()
                for worker in [w for w, call in self.busy.items() if w.socket in ready or call.deadline < late]:
                    self.receive(sandbox, worker)
        finally:
            for worker in list(self.busy):  # only after an exception: their replies belong to no one
                sandbox._discard(worker)
        return self.outcomes

    def send(self, sandbox: Sandbox, worker: "_Worker", call: _Call) -> None:
        call.tries += 1
        call.deadline = time.monotonic() + self.timeout + GRACE
        self.busy[worker] = call
        try:
            worker.send(call.payload)
        except OSError as error:
            self.lost(sandbox, worker, error)

    def receive(self, sandbox: Sandbox, worker: "_Worker") -> None:
        try:
            if time.monotonic() > self.busy[worker].deadline:
                raise TimeoutError("it did not answer")
            outcome = worker.receive()
            if outcome is not None:
                self.outcomes[self.busy.pop(worker).index] = outcome
        except OSError as error:
            self.lost(sandbox, worker, error)

    def lost(self, sandbox: Sandbox, worker: "_Worker", error: OSError) -> None:
        call = self.busy.pop(worker)
        last_words = sandbox._discard(worker, patience=0.1 if isinstance(error, TimeoutError) else 5.0)
        if sandbox._closed:
            self.queue.append(call)
            for call in self.queue:
                self.outcomes[call.index] = Outcome(math.nan, "the sandbox was closed")
            self.queue.clear()
        elif call.tries < TRIES:
            logger.warning("a sandbox worker was lost (%s), its call is repeated: %s", error, last_words)
            self.queue.appendleft(call)
        else:
            reason = f"the sandbox lost its worker {TRIES} times: {error} {last_words}".strip()
            self.outcomes[call.index] = Outcome(math.nan, reason)


class _Worker:
    """A worker process and the socket to it; OSError from a method means that it is lost."""

    def __init__(self, settings: dict[str, Any]):
        self.guards: tuple[str, ...] | None = None
        self._folder: str | None = None
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(GRACE)
        command = [sys.executable, "-I", "-S", "-B", "-Xutf8", "-Wignore", str(_WORKER)]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=[theirs.fileno()],
                cwd="/",
                env={},
                start_new_session=True,  # Ctrl-C is the parent's to handle
            )
        with contextlib.suppress(OSError):  # the first call tells that it is dead already
            self.send(json.dumps(settings).encode())

    def send(self, data: bytes) -> None:
        self.socket.sendall(struct.pack(">Q", len(data)))
        self.socket.sendall(data)

    def receive(self) -> Outcome | None:
        """The outcome of the call that was sent; None after the greeting, which comes first."""
        (size,) = struct.unpack(">Q", self._read(8))
        data = self._read(size)
        if self.guards is None:
            greeting = json.loads(data)
            self.guards, self._folder = tuple(greeting["guards"]), greeting["folder"]
            _report(self.guards)
            return None
        value, length = struct.unpack(">dI", data[:12])
        reason = data[12 : 12 + length].decode("utf-8", "replace")
        return Outcome(value, reason or None, data[12 + length :].decode("utf-8", "replace"))

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            part = self.socket.recv(size - len(data))
            if not part:
                raise ConnectionError("it ended")
            data += part
        return bytes(data)

    def hang_up(self) -> None:
        """Have it end by itself, after it has killed and cleared away its call. From any thread."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def stop(self, patience: float = 5.0) -> str:
        """End it and its call, by force after `patience` seconds: what it last wrote about itself."""
        self.hang_up()
        self.socket.close()
        try:
            self._process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._folder is not None and "namespaces" not in (self.guards or ()):
            shutil.rmtree(self._folder, ignore_errors=True)
        with self._errors as errors:
            errors.seek(0)
            return errors.read()[-1000:].decode("utf-8", "replace").strip()


def _stop_all(workers: list[_Worker], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the owner, at its end
        return
    for worker in list(workers):
        worker.stop()
    workers.clear()


_reported: set[tuple[str, ...]] = set()


def _report(guards: tuple[str, ...]) -> None:
    """Once per set of guards: what protects, and what does not."""
    if guards in _reported:
        return
    _reported.add(guards)
    logger.info("sandbox guards: %s", ", ".join(guards))
    if not {"namespaces", "Landlock"} & set(guards):
        logger.warning("the sandbox can't hide files here: snippets read what their user can read")
    if "system calls" not in guards:
        logger.warning("the sandbox can't refuse system calls here: snippets can start processes that outlive a call")


def usable_cores() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def check_snippet(snippet: str) -> None:
    """ValueError, with line and text, where `snippet` is no Python, or can't define `evaluate`."""
    try:
        tree = ast.parse(snippet)
        compile(snippet, "<snippet>", "exec", dont_inherit=True)
    except SyntaxError as error:
        text = f": {error.text.strip()}" if error.text else ""
        raise ValueError(f"syntax error in line {error.lineno} of the snippet: {error.msg}{text}") from error
    except (ValueError, MemoryError, RecursionError) as error:
        raise ValueError(f"the snippet can't be compiled: {str(error) or type(error).__name__}") from error
    bound: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Name):
            bound.add(node.id)
        elif isinstance(node, ast.alias):
            bound.add(node.asname or node.name)
    if not bound & (_DYNAMIC | {"*", "evaluate"}):
        raise ValueError("the snippet defines no evaluate(example, response)")
