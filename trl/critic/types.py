"""The critic's vocabulary: what it is asked, what it answers, and the protocol every backend follows."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from trl.failures import GoneError

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
class Call:
    """What getting a critique from an endpoint took."""

    requests: int
    """Sent, with retries; 0: answered from the cache, like another text of its batch, or not asked."""
    cached: bool = False
    latency: float = 0.0
    """Seconds from asking to the answer, with waiting and retries."""
    tokens_in: int = 0
    tokens_out: int = 0
    usd: float | None = None
    """None: the prices are not known."""


@dataclass(frozen=True)
class Critique:
    """A critic's answer to one request.

    ``ok``: at least one span. ``none``: the critic explicitly found nothing. ``unparsable``: a reply
    without the expected form (a refusal, prose). ``failed``: no reply. ``skipped``: not asked, since the score
    is above the threshold or the budget is spent.
    """

    spans: tuple[Span, ...]
    status: Status
    reply: str | None = None
    error: str | None = None
    call: Call | None = field(default=None, compare=False)
    """Of critics behind an endpoint."""


@dataclass(frozen=True)
class CritiqueRequest:
    """One text to be critiqued; ``document`` and ``score`` are used by the summary style."""

    text: str
    document: str | None = None
    score: float | None = None
    start: int = 0
    """Offset in ``text`` where the response begins; for backends that score words, what to leave out."""


class CriticGoneError(GoneError):
    """The critic will not answer any more; training on would be without it."""


class Critic(Protocol):
    """Anything that answers a batch of requests in order, one critique per request."""

    def critique(self, requests: Sequence[CritiqueRequest]) -> list[Critique]: ...
