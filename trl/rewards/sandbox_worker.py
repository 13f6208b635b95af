"""The process that runs a snippet, one fork per call. Started by `trl.rewards.sandbox`, whose docstring says what it
is for and what it stops; the standard library only, and nothing of this package but the two files beside it.

    python -I -S sandbox_worker.py SOCKET PARENT

Frames on the socket are a 64-bit length and that many bytes. In: the settings (JSON), then one call after the other
(JSON ``[example, response]``). Out: one greeting (JSON ``{"guards", "folder"}``), then one reply per call:
a double, the length of the reason, the reason, the logs. The worker ends when the socket or the parent does.
"""

import ast
import contextlib
import gc
import importlib
import itertools
import json
import math
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import time
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import sandbox_call
import sandbox_guards as guards

del sys.path[0]

OUTPUT_LIMIT = 2**20
LOGS_LIMIT = 2**16
VERDICT_LIMIT = 8 + sandbox_call.REASON_LIMIT
# imported before the forks when the snippet imports them; its own code runs in the forks alone
LIBRARIES = {"numpy", "pandas", "scipy", "sklearn", "sympy"} | set(sys.stdlib_module_names) - {
    "antigravity", "idlelib", "this", "tkinter", "turtle", "turtledemo",
}  # fmt: skip


class ParentGone(Exception):
    """The process that asks has ended."""


def read_exactly(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 2**20))
        if not part:
            raise ParentGone
        data += part
    return bytes(data)


def read_frame(connection: socket.socket, parent: int) -> bytes:
    while not select.select([connection], [], [], 1.0)[0]:
        if os.getppid() != parent:
            raise ParentGone
    (size,) = struct.unpack(">Q", read_exactly(connection, 8))
    return read_exactly(connection, size)


def write_frame(connection: socket.socket, data: bytes) -> None:
    connection.sendall(struct.pack(">Q", len(data)) + data)


# --- before the first call


def prepare(settings: dict[str, Any]) -> sandbox_call.Guarded:
    """Shut this process in as far as the system allows, then compile the snippet and import what it needs."""
    memory_map = os.open("/proc/self/statm", os.O_RDONLY) if os.path.exists("/proc/self/statm") else None
    imported_from = [*sys.path, *settings["libraries"]]
    sys.path.extend(settings["libraries"])
    readable = readable_paths(imported_from)
    active = ["limits", "process group"]
    base = settings["temporary"]
    if enclosed := guards.LINUX and guards.works(lambda: guards.enter_namespaces(readable, base)):
        guards.enter_namespaces(readable, base)
        active.append("namespaces")
    folder = guards.SCRATCH if enclosed else tempfile.mkdtemp(prefix="sandbox-", dir=base)
    rules = None
    if guards.LINUX and guards.works(lambda: guards.restrict_files(guards.landlock_rules(readable, folder))):
        rules = guards.landlock_rules(readable, folder)
        active.append("Landlock")
    uid = other_user(folder, imported_from)
    if uid is not None:
        active.append("user id")
    if guards.LINUX and guards.works(guards.refuse_system_calls):
        active.append("system calls")
    if guards.LINUX:  # one core, which also keeps numerical libraries at one thread
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[settings["number"] % len(cores)]})
    code = compile(settings["snippet"], "<snippet>", "exec", dont_inherit=True)
    import_libraries(settings["snippet"])
    gc.freeze()
    pages = 0 if memory_map is None else int(os.pread(memory_map, 64, 0).split()[0])
    mapped = pages * os.sysconf("SC_PAGE_SIZE")
    return sandbox_call.Guarded(code, settings["timeout"], settings["memory_bytes"], mapped, folder, uid, rules, active)


def readable_paths(imported_from: list[str]) -> list[str]:
    """What Python and its libraries are loaded from, and nothing else; each path as given and without links."""
    shared = [f"{prefix}/{lib}" for prefix in ("", "/usr", "/usr/local") for lib in ("lib", "lib32", "lib64")]
    shared += [f"{prefix}/lib" for prefix in (sys.base_prefix, sys.base_exec_prefix)]
    shared += ["/nix/store", "/etc/alternatives", "/etc/ld.so.cache", "/etc/localtime", "/usr/share/zoneinfo"]
    devices = ["/dev/null", "/dev/zero", "/dev/random", "/dev/urandom"]
    paths = [*shared, *devices, *imported_from]
    return paths + [os.path.realpath(path) for path in paths]


def other_user(folder: str, imported_from: list[str]) -> int | None:
    """A user id that snippets can run under, now the owner of `folder`; None where that can't be."""
    if os.geteuid() != 0:
        return None
    uid = guards.unused_uid()
    needed = [path for path in imported_from if os.path.isdir(path)]

    def try_out() -> None:
        os.chown(folder, uid, uid)
        guards.become(uid, [*needed, folder])

    if guards.works(try_out):
        return uid
    with contextlib.suppress(PermissionError):
        os.chown(folder, 0, 0)
    return None


def import_libraries(snippet: str) -> None:
    """Import the standard and well-known libraries that the snippet names, so that the calls need not."""
    for node in ast.walk(ast.parse(snippet)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        for name in names:
            if name.split(".")[0] in LIBRARIES:
                # the call that imports it again reports what is wrong; SystemExit: it was a library's __main__
                with contextlib.suppress(Exception, SystemExit):
                    importlib.import_module(name)


# --- around the fork: the deadline, the output, the end of every process


def serve_call(guarded: sandbox_call.Guarded, payload: bytes, connection: socket.socket, parent: int) -> bytes:
    """The reply to one call; when it is there, nothing of the call is left."""
    result, result_end = os.pipe()
    logs, logs_end = os.pipe()
    worker, started = os.getpid(), time.monotonic()
    child = os.fork()
    if child == 0:
        sandbox_call.run_call(guarded, worker, payload, result_end, logs_end)
    os.close(result_end)
    os.close(logs_end)
    output = Output(logs)
    verdict, reason = b"", ""
    try:
        verdict, reason = watch(result, output, started + guarded.timeout, connection, parent)
    finally:
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        output.drain()
        os.close(result)
        os.close(logs)
        empty(guarded.folder)
    if reason == TIMED_OUT:
        reason = f"no result within {guarded.timeout:g} s"
    elif output.printed > OUTPUT_LIMIT:
        reason = f"more than {OUTPUT_LIMIT // 2**20} MB of output"
    value, reason = (math.nan, reason) if reason else judged(verdict, status)
    text = reason.encode("utf-8", "backslashreplace")
    return struct.pack(">dI", value, len(text)) + text + bytes(output.kept)


TIMED_OUT = "timed out"


class Output:
    """What a call writes to stdout and stderr: counted, its beginning kept."""

    def __init__(self, fd: int):
        self.fd, self.kept, self.printed = fd, bytearray(), 0

    def read(self) -> bool:
        """False at the end."""
        data = os.read(self.fd, 2**16)
        self.printed += len(data)
        self.kept += data[: LOGS_LIMIT - len(self.kept)]
        return bool(data)

    def drain(self) -> None:
        """What is still in the pipe, without waiting for more."""
        os.set_blocking(self.fd, False)
        with contextlib.suppress(BlockingIOError):
            while self.printed <= OUTPUT_LIMIT and self.read():
                pass


def watch(result: int, output: Output, deadline: float, connection: socket.socket, parent: int) -> tuple[bytes, str]:
    """The bytes of the verdict, or the reason why there is none."""
    poller = select.poll()
    for fd in (result, output.fd, connection.fileno()):
        poller.register(fd, select.POLLIN)
    verdict = b""
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return b"", TIMED_OUT
        ready = [fd for fd, _ in poller.poll(1000 * min(left, 1.0))]
        if connection.fileno() in ready or os.getppid() != parent:  # nothing is sent during a call: it is the end
            raise ParentGone
        if output.fd in ready and not output.read():
            poller.unregister(output.fd)
        if output.printed > OUTPUT_LIMIT or len(verdict) > VERDICT_LIMIT:
            return verdict, ""
        if result in ready:
            data = os.read(result, 2**16)
            if not data:
                return verdict, ""
            verdict += data


def judged(verdict: bytes, status: int) -> tuple[float, str]:
    """The verdict's number, or NaN and the reason; `status` is how the process ended."""
    if verdict:
        value = struct.unpack(">d", verdict[:8])[0] if len(verdict) >= 8 else math.inf
        reason = verdict[8:].decode("utf-8", "replace")
        if len(verdict) > VERDICT_LIMIT or math.isfinite(value) == bool(reason):  # it is either a number or a reason
            return math.nan, "the snippet wrote into the channel of its result"
        return value, reason
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return math.nan, f"the snippet ended its process (status {code}) before evaluate returned"
    name = signal.Signals(-code).name
    if name == "SIGKILL":
        return math.nan, "the process was killed, or closed the channel of its result, before evaluate returned"
    return math.nan, f"the process ended with {name} before evaluate returned"


def empty(folder: str) -> None:
    """Delete all that is in `folder`, however deep and whatever its modes: folders are moved up one by one."""
    names = itertools.count()
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                if inner.is_dir(follow_symlinks=False):  # moving a folder takes the right to write in it
                    os.chmod(inner.path, 0o700)
                target = next(f"{folder}/{n}" for n in names if not os.path.lexists(f"{folder}/{n}"))
                os.rename(inner.path, target)
            os.rmdir(entry.path)


def main(arguments: list[str]) -> None:
    connection, parent = socket.socket(fileno=int(arguments[0])), int(arguments[1])
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    guarded = None
    try:
        guarded = prepare(json.loads(read_frame(connection, parent)))
        write_frame(connection, json.dumps({"guards": guarded.guards, "folder": guarded.folder}).encode())
        while True:
            payload = read_frame(connection, parent)
            write_frame(connection, serve_call(guarded, payload, connection, parent))
    except (ParentGone, BrokenPipeError, ConnectionResetError):
        pass
    finally:
        if guarded is not None and "namespaces" not in guarded.guards:
            os.rmdir(guarded.folder)


if __name__ == "__main__":
    main(sys.argv[1:])
