"""What scorers of configured rewards get and give."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

LOWEST, HIGHEST = -1.0, 1.0
"""Every single reward is clipped to this range."""


@dataclass(frozen=True)
class Sample:
    """One response with what it answers."""

    response: str
    prompt: str = ""
    system_instruction: str = ""
    references: Mapping[str, Any] = field(default_factory=dict)
    example: Mapping[str, Any] = field(default_factory=dict)
    """The row as the services and snippets get it, with camelCase keys."""
    step: int = 0
    extracted: bool = True
    """False: the regular expression found nothing in the response, and ``response`` is empty for that."""

    @property
    def content(self) -> dict[str, Any]:
        """The response as the services and snippets get it."""
        return {"role": "model", "parts": [{"text": self.response}]}


@dataclass(frozen=True)
class Verdict:
    """A scorer's judgement of one sample: a number, or NaN and why there is none."""

    value: float
    error: str | None = None
    stages: Mapping[str, str] = field(default_factory=dict)
    """What happened on the way, in order: substituted expression, judge's reply, logs and so on."""


def failure(reason: str, stages: Mapping[str, str] | None = None) -> Verdict:
    """The verdict that there is none."""
    return Verdict(math.nan, reason, stages or {})


class Scorer(Protocol):
    """Anything that scores a batch in order. Called by several threads."""

    def score(self, samples: Sequence[Sample]) -> list[Verdict]: ...

    def close(self) -> None: ...


def clipped(value: float) -> float:
    """``value`` within [-1, 1]; NaN stays NaN."""
    return value if math.isnan(value) else max(LOWEST, min(HIGHEST, value))
