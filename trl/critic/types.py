"""The critic's vocabulary: what it is asked, what it answers, and the protocol every backend follows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Style = Literal["sentiment", "toxicity", "summary"]
Polarity = Literal["positive", "negative"]
Status = Literal["ok", "none", "unparsable", "failed", "skipped"]


@dataclass(frozen=True)
class Span:
    """A quotation from the critiqued text that the critic called good or bad."""

    text: str
    polarity: Polarity
    label: str | None = None
    """Kind of flaw, in the summary style (for example "Irrelevant")."""


@dataclass(frozen=True)
class Critique:
    """A critic's answer to one request.

    ``ok``: at least one span. ``none``: the critic explicitly found nothing. ``unparsable``: a reply
    without the expected form (a refusal, prose). ``failed``: no reply. ``skipped``: not asked.
    """

    spans: tuple[Span, ...]
    status: Status
    reply: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class CritiqueRequest:
    """One text to be critiqued; ``document`` and ``score`` are used by the summary style."""

    text: str
    document: str | None = None
    score: float | None = None
    start: int = 0
    """Offset in ``text`` where the response begins; for backends that score words, what to leave out."""


class Critic(Protocol):
    """Anything that answers a batch of requests in order, one critique per request."""

    def critique(self, requests: Sequence[CritiqueRequest]) -> list[Critique]: ...
