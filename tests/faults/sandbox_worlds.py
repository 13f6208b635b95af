"""Runs hostile snippets as a process with fewer rights than the tests have, and writes what came of each.

    python -m tests.faults.sandbox_worlds WORLD CALLS.json RESULT.json

WORLD: "ordinary user" (no capability to speak of, whatever the user id), "container" (as Docker's defaults: no mount,
no namespaces), "old kernel" (neither these nor Landlock), "no filter" (system calls can't be filtered).
"""

import ctypes
import json
import os
import struct
import sys
import time
from pathlib import Path

from tests.faults.hostile_snippets import RUNNER
from trl.rewards.sandbox import Sandbox

LIBC = ctypes.CDLL(None, use_errno=True)
UNSHARE, MOUNT, LANDLOCK = (272, 165, 444) if os.uname().machine == "x86_64" else (97, 40, 444)


def drop_capabilities() -> None:
    """All of them; root keeps CAP_SETFCAP, which a user namespace of user id 0 takes and of any other doesn't."""
    kept = 1 << 31 if os.geteuid() == 0 else 0
    assert LIBC.prctl(38, 1, 0, 0, 0) == 0
    assert LIBC.capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", kept, kept, 0, 0, 0, 0)) == 0


def refuse(*numbers: int) -> None:
    """EPERM for these system calls, from now on and in every process started from here."""
    code = [(0x20, 0, 0, 0)]
    for number in numbers:
        code += [(0x15, 0, 1, number), (0x06, 0, 0, 0x00050001)]
    install([*code, (0x06, 0, 0, 0x7FFF0000)])


def refuse_filters() -> None:
    """EPERM for prctl(PR_SET_SECCOMP)."""
    prctl = 157 if os.uname().machine == "x86_64" else 167
    allow = (0x06, 0, 0, 0x7FFF0000)
    code = [(0x20, 0, 0, 0), (0x15, 0, 3, prctl), (0x20, 0, 0, 16), (0x15, 0, 1, 22), (0x06, 0, 0, 0x00050001), allow]
    install(code)


def install(code: list[tuple[int, int, int, int]]) -> None:
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in code))
    assert LIBC.prctl(38, 1, 0, 0, 0) == 0
    assert LIBC.prctl(22, 2, struct.pack("HxxxxxxP", len(code), ctypes.addressof(program)), 0, 0) == 0


WORLDS = {
    "ordinary user": drop_capabilities,
    "container": lambda: refuse(UNSHARE, MOUNT),
    "old kernel": lambda: refuse(UNSHARE, MOUNT, LANDLOCK),
    "no filter": refuse_filters,
}


def main(world: str, calls_file: str, result_file: str) -> None:
    WORLDS[world]()
    asked = json.loads(Path(calls_file).read_text())
    calls = [(example | {"parent": os.getpid()}, {"parts": [{"text": text}]}) for example, text in asked]
    with Sandbox(RUNNER, timeout=1.0, memory_bytes=200 * 2**20, workers=4) as sandbox:
        guards, begin = sandbox.guards, time.monotonic()
        outcomes = sandbox.evaluate(calls)
        seconds = time.monotonic() - begin
    found = [[outcome.value, outcome.reason] for outcome in outcomes]
    Path(result_file).write_text(json.dumps({"guards": guards, "seconds": seconds, "outcomes": found}))


if __name__ == "__main__":
    main(*sys.argv[1:])
