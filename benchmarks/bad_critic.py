"""An LLM endpoint on this machine that misbehaves in every way: python -m benchmarks.bad_critic PORT.

Of 16 requests, 8 get a critique that quotes the end of the text; the others a 429, a 500, a reply cut in mid-body by a
reset, a reply after ``SLOW`` seconds, one of 5 MB, one that is no JSON, one that is empty, one without content.
"""

import itertools
import sys
import threading
from typing import Any

from tests.fake_openai import Answer, FakeOpenAI, completion, error

PROMPT = "Which words?\n{}\nIdentified Positive Text Span:\n"
SLOW = 1.0
FAULTS = (
    error(429, retry_after="0"),
    error(500),
    Answer(200, completion("x" * 1000).body, cut_after=100, reset=True),
    completion("late", delay=SLOW),
    Answer(200, b'{"padding": "' + b"x" * 5_000_000 + b'"}'),
    Answer(200, b"{not json"),
    Answer(200, b""),
    completion(None),
)


def quote_the_end(body: dict[str, Any]) -> Answer:
    """A critique that finds the last word of the text bad."""
    before, after = PROMPT.strip().split("{}")
    word = str(body["messages"][0]["content"]).strip().removeprefix(before).removesuffix(after).split()[-1]
    return completion(f"None identified\n\nIdentified Negative Text Span:\n[Span 1]: {word}", usage=(100, 20))


def main() -> None:
    turns = itertools.cycle(fault for each in FAULTS for fault in (None, each))

    def answer(body: dict[str, Any]) -> Answer:
        if body["messages"][0]["content"] == "Say OK.":
            return completion("OK")
        return next(turns) or quote_the_end(body)

    with FakeOpenAI(answer, port=int(sys.argv[1])):
        threading.Event().wait()


if __name__ == "__main__":
    main()
