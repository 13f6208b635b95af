"""Limits on calls to an endpoint that hold for the whole run: a rate per minute, and a budget.

A run of several processes divides each limit between them, so no process needs to hear from another, on one
machine or many. `RANK` and `WORLD_SIZE`, which every launcher sets, say how.
"""

import logging
import os
import time
from collections import deque
from dataclasses import dataclass

logger = logging.getLogger(__name__)


def run_share(total: int) -> int:
    """This process's part of a whole-run limit; the parts of all processes add up to it."""
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    return total // world + (rank < total % world)


def estimate_tokens(text: str) -> int:
    """Tokens of a text where the server does not count them: one per four bytes of UTF-8, rounded up."""
    return -(-len(text.encode(errors="replace")) // 4)


@dataclass
class Reservation:
    """A place in the rate limit: when the request may be sent (monotonic seconds), and what it counts for."""

    at: float
    tokens: int


class RateLimit:
    """At most so many requests and tokens in any minute, first come, first served.

    A request counts from the moment that it was allowed. Not thread-safe: one event loop uses it.

    Args:
        requests: per period; None: no limit.
        tokens: prompt and reply tokens per period; None: no limit. A request that needs more than that alone
            waits for an empty period.
        period: seconds.
    """

    def __init__(self, requests: int | None = None, tokens: int | None = None, *, period: float = 60.0) -> None:
        for name, value in (("requests", requests), ("tokens", tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} per minute is {value}; expected 1 or more")
        self._requests, self._tokens, self._period = requests, tokens, period
        self._taken: deque[Reservation] = deque()

    @classmethod
    def of_run(cls, requests_per_minute: int | None, tokens_per_minute: int | None) -> "RateLimit":
        """This process's share of the run's limits. Raises ValueError if that is nothing."""
        parts = [None if limit is None else run_share(limit) for limit in (requests_per_minute, tokens_per_minute)]
        if 0 in parts:
            raise ValueError(
                f"requests_per_minute is {requests_per_minute} and tokens_per_minute {tokens_per_minute}; "
                f"expected 1 or more for each of the {os.environ.get('WORLD_SIZE', 1)} process(es)"
            )
        return cls(*parts)

    def reserve(self, tokens: int, latest: float) -> Reservation | None:
        """The next place for a request of ``tokens``; None, and nothing taken, if it is later than ``latest``."""
        at = time.monotonic()
        if self._requests is None and self._tokens is None:
            return Reservation(at, tokens)
        while self._taken and self._taken[0].at <= at - self._period:
            self._taken.popleft()
        if self._taken:
            at = max(at, self._taken[-1].at)
        count, used = len(self._taken), sum(taken.tokens for taken in self._taken)
        for oldest in self._taken:
            if oldest.at > at - self._period and self._fits(count, used, tokens):
                break
            at = max(at, oldest.at + self._period)
            count, used = count - 1, used - oldest.tokens
        if at > latest:
            return None
        self._taken.append(Reservation(at, tokens))
        return self._taken[-1]

    def _fits(self, count: int, used: int, tokens: int) -> bool:
        return (self._requests is None or count < self._requests) and (
            self._tokens is None or used + tokens <= self._tokens
        )


class BudgetSpent(RuntimeError):
    """The request was not sent: it could take the run over its budget."""


class Budget:
    """What requests may still cost. Not thread-safe: one event loop uses it.

    Every request on the wire counts, retries too. Money is what the replies say they used; a request that
    brought no reply counts as free, and one on its way as its estimate.

    Args:
        requests: most requests; None: no limit.
        usd: most dollars; None: no limit.
        prices: dollars per million prompt tokens and per million reply tokens.
    """

    def __init__(
        self,
        requests: int | None = None,
        usd: float | None = None,
        prices: tuple[float, float] | None = None,
    ) -> None:
        if usd is not None and prices is None:
            raise ValueError(f"budget_usd is {usd} but prices is None; give dollars per million tokens in and out")
        for name, value in (("budget_requests", requests), ("budget_usd", usd)):
            if value is not None and value < 0:
                raise ValueError(f"{name} is {value}; expected 0 or more")
        if prices is not None and (len(prices) != 2 or min(prices) < 0):
            raise ValueError(f"prices is {prices}; expected dollars per million tokens in and out, 0 or more")
        self._requests, self._usd, self._prices = requests, usd, prices
        self.requests = 0
        self._spent = self._held = 0.0
        self._said = False

    @classmethod
    def of_run(cls, requests: int | None, usd: float | None, prices: tuple[float, float] | None) -> "Budget":
        """This process's share of the run's budget."""
        return cls(
            None if requests is None else run_share(requests),
            None if usd is None else usd / int(os.environ.get("WORLD_SIZE", "1")),
            prices,
        )

    def cost(self, tokens_in: int, tokens_out: int) -> float | None:
        """Dollars; None without prices."""
        if self._prices is None:
            return None
        return (tokens_in * self._prices[0] + tokens_out * self._prices[1]) / 1e6

    def take(self, estimate: float | None) -> None:
        """Count a request that is about to be sent, for an estimated cost.

        Raises BudgetSpent if that is more than is left.
        """
        cost = estimate or 0.0
        if self._requests is not None and self.requests >= self._requests:
            self._refuse(f"{self._requests} requests")
        if self._usd is not None and self._spent + self._held + cost > self._usd:
            self._refuse(f"{self._usd:g} dollars ({self._spent:.4g} spent)")
        self.requests += 1
        self._held += cost

    def settle(self, estimate: float | None, cost: float | None, *, sent: bool = True) -> None:
        """What a request that was taken for ``estimate`` really cost; one that was not ``sent`` is given back."""
        self.requests -= not sent
        self._held -= estimate or 0.0
        self._spent += cost or 0.0

    def _refuse(self, what: str) -> None:
        if not self._said:
            self._said = True
            logger.warning("the budget of %s is spent: from here on samples go without", what)
        raise BudgetSpent(f"the budget of {what} is spent")
