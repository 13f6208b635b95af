"""The process in which regular expressions run: started by ``patterns.py`` as a script, never imported.

It reads one JSON line per search from stdin, ``[what, pattern, text]``, and writes ``["found", result]`` or
``["error", reason]`` as a JSON line. A search that takes more than its processor time ends the process by SIGPROF, on
which Python's engine, busy in C, could not act. The process ends when stdin does, so it does not outlive its parent.
"""

import json
import re
import resource
import signal
import sys
from collections import deque

SECONDS = 1.0
"""Of processor time for one search, with compiling the pattern."""
MEMORY = 2**30
"""Bytes of address space."""


def main() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or hard > MEMORY:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))
    for line in sys.stdin:
        what, pattern, text = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            reply = ["found", _contains(pattern, text) if what == "contains" else _last_match(pattern, text)]
        except (re.error, RecursionError, OverflowError) as error:
            reply = ["error", f"the regular expression can't be used: {error}"]
        except MemoryError:
            reply = ["error", "the regular expression took too much memory"]
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)


def _contains(pattern: str, text: str) -> bool:
    return re.search(pattern, text) is not None


def _last_match(pattern: str, text: str) -> str | None:
    last = deque(re.finditer(pattern, text), maxlen=1)
    return last[0][1 if last[0].re.groups else 0] if last else None


if __name__ == "__main__":
    main()
