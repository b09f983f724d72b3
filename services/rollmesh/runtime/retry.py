"""Exponential back-off, and retries of calls that fail for a while."""

from __future__ import annotations

import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
E = TypeVar("E", bound=Exception)

_MOST_DOUBLINGS = 60
"""Maximum number of doublings; an outage of days would otherwise exceed the range of a float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays between attempts: doubled after every failure, up to a limit."""

    first_seconds: float
    longest_seconds: float = math.inf
    jitter: float = 0.0
    """Largest relative deviation of a delay; it spreads the retries of clients that fail together."""

    def seconds(self, failure_count: int) -> float:
        """Return the delay after ``failure_count`` failures, at least one."""
        doubled = self.first_seconds * 2.0 ** min(failure_count - 1, _MOST_DOUBLINGS)
        delay = min(doubled, self.longest_seconds)
        return delay * random.uniform(1 - self.jitter, 1 + self.jitter) if self.jitter else delay


async def retry(
    action: Callable[[], Awaitable[T]],
    error_type: type[E],
    backoff: Backoff,
    wait: Callable[[E, float], Awaitable[None]],
) -> T:
    """Return the result of ``action``, retried after every ``error_type``.

    ``wait`` receives the error and the delay. It returns at the time of the next attempt, or raises to end the retries.
    """
    failure_count = 0
    while True:
        try:
            return await action()
        except error_type as error:
            failure_count += 1
            await wait(error, backoff.seconds(failure_count))
