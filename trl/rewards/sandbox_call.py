"""One call of a snippet, in a process that is forked for it by ``sandbox_worker.py``: guards first, then `evaluate`.

The standard library only; `trl.rewards.sandbox` says what the guards stop.
"""

import contextlib
import fcntl
import json
import math
import numbers
import os
import reprlib
import resource
import struct
import sys
import traceback
import types
from dataclasses import dataclass
from typing import NoReturn

import sandbox_guards as guards

RESULT = 3  # file descriptor
REASON_LIMIT = 1000  # bytes
OS_HINT = " (in the sandbox there is no network, no new process and no file outside the current folder)"


@dataclass
class Guarded:
    """What this worker's calls run under."""

    code: types.CodeType
    timeout: float
    memory_bytes: int  # beyond `mapped`, what the interpreter and the libraries take
    mapped: int
    folder: str
    uid: int | None
    rules: int | None
    guards: list[str]


def run_call(guarded: Guarded, worker: int, payload: bytes, result: int, logs: int) -> NoReturn:
    """The verdict goes into `result`, and the process ends."""
    nan = struct.pack(">d", math.nan)
    frame, out_of_memory = b"", nan + f"MemoryError: more than {guarded.memory_bytes // 2**20} MB".encode()
    try:
        confine(guarded, worker, result, logs)
        value, reason = evaluate(guarded.code, payload)
        with contextlib.suppress(Exception):  # the snippet may have put anything there
            sys.stdout.flush()
            sys.stderr.flush()
        frame = struct.pack(">d", value) + reason.encode("utf-8", "backslashreplace")[:REASON_LIMIT]
    except MemoryError:
        frame = out_of_memory
    except OSError as error:
        frame = nan + f"the sandbox could not be set up: {error}".encode()
    finally:
        with contextlib.suppress(OSError):
            os.write(RESULT, frame)
        os._exit(0)


def confine(guarded: Guarded, worker: int, result: int, logs: int) -> None:
    """All guards, in an order in which none takes away what the next one needs."""
    os.setsid()
    kept = [os.open("/dev/null", os.O_RDONLY), logs, logs, result]  # 0, 1, 2 and RESULT
    kept += [] if guarded.rules is None else [guarded.rules]
    for target, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 64) for fd in kept]):
        os.dup2(fd, target)
    os.closerange(len(kept), 65536)
    os.umask(0o077)
    os.chdir(guarded.folder)
    os.environ.clear()
    set_limits(guarded)
    if guarded.uid is not None:
        guards.become(guarded.uid)
    if guards.LINUX:
        guards.drop_capabilities()
        guards.die_with(worker)
    if guarded.rules is not None:
        guards.restrict_files(RESULT + 1)
        os.close(RESULT + 1)
    if "system calls" in guarded.guards:
        guards.refuse_system_calls()


def set_limits(guarded: Guarded) -> None:
    seconds = math.ceil(guarded.timeout) + 1
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: guards.SCRATCH_BYTES,
        resource.RLIMIT_NOFILE: 256,
        resource.RLIMIT_CORE: 0,
    }
    if guards.LINUX:  # macOS refuses it
        limits[resource.RLIMIT_AS] = guarded.mapped + guarded.memory_bytes
    if guarded.uid is not None:  # counted per user: another's processes would count as the snippet's
        limits[resource.RLIMIT_NPROC] = 64
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))


def evaluate(code: types.CodeType, payload: bytes) -> tuple[float, str]:
    """The snippet's body, then its `evaluate`, both fresh for this call."""
    try:
        example, response = json.loads(payload)
        module = types.ModuleType("snippet")
        sys.modules["snippet"] = module
        exec(code, module.__dict__)
        function = module.__dict__.get("evaluate")
        if not callable(function):
            return math.nan, "the snippet defines no function named evaluate"
        return as_number(function(example, response))
    except MemoryError:
        raise
    except BaseException as error:  # noqa: BLE001 - other people's code raises anything
        return math.nan, described(error)


def as_number(value: object) -> tuple[float, str]:
    """A finite real number; anything else is NaN and the reason."""
    plain = (bool, bytes, complex, float, int, str, type(None))
    shown = f"{reprlib.repr(value)} ({type(value).__name__})" if type(value) in plain else type(value).__name__
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return math.nan, f"evaluate returned {shown}, not a finite number"
    number = float(value)
    return (number, "") if math.isfinite(number) else (math.nan, f"evaluate returned {number}, not a finite number")


def described(error: BaseException) -> str:
    """Type, message and line of what the snippet raised."""
    if isinstance(error, SystemExit):
        text = "the snippet called sys.exit"
    else:
        try:
            text = str(error)
        except Exception as second:  # noqa: BLE001 - its own __str__
            text = f"(its message can't be shown: {type(second).__name__})"
        text = f"{type(error).__name__}: {text[: REASON_LIMIT // 2]}" + (OS_HINT if isinstance(error, OSError) else "")
    frames = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == "<snippet>"]
    return text + (f" (line {frames[-1]} of the snippet)" if frames else "")
