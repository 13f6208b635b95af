"""codeExecutionRewardScorer: the user's own ``evaluate(example, response)``, run in the sandbox."""

from collections.abc import Sequence

from trl.rewards.sandbox import Sandbox, usable_cores
from trl.rewards.scoring import Sample, Verdict

SECONDS = 100.0
"""What one evaluation may take."""


class CodeExecutionReward:
    """Runs one snippet on every response. Raises ValueError for a snippet with a syntax error.

    Args:
        timeout: seconds for one evaluation; None: 100.
        sharers: snippets that run side by side, each in its part of the cores.
    """

    def __init__(self, snippet: str, timeout: float | None = None, *, sharers: int = 1) -> None:
        workers = max(1, usable_cores() // sharers)
        self._sandbox = Sandbox(snippet, timeout=SECONDS if timeout is None else timeout, workers=workers)

    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        outcomes = self._sandbox.evaluate([(dict(sample.example), sample.content) for sample in samples])
        return [
            Verdict(outcome.value, outcome.reason, {"logs": outcome.logs} if outcome.logs else {})
            for outcome in outcomes
        ]

    def close(self) -> None:
        self._sandbox.close()
