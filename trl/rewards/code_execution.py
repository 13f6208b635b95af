"""codeExecutionRewardScorer: the user's own ``evaluate(example, response)``, run in the sandbox."""

from collections.abc import Sequence

from trl.rewards.sandbox import Sandbox
from trl.rewards.scoring import Sample, Verdict


class CodeExecutionReward:
    """Runs one snippet on every response. Raises ValueError for a snippet with a syntax error.

    Args:
        timeout: seconds for one evaluation; None: the sandbox's own 100.
    """

    def __init__(self, snippet: str, timeout: float | None = None) -> None:
        self._sandbox = Sandbox(snippet) if timeout is None else Sandbox(snippet, timeout=timeout)

    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        outcomes = self._sandbox.evaluate([(dict(sample.example), sample.content) for sample in samples])
        return [
            Verdict(outcome.value, outcome.reason, {"logs": outcome.logs} if outcome.logs else {})
            for outcome in outcomes
        ]

    def close(self) -> None:
        self._sandbox.close()
