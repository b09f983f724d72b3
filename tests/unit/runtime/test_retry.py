"""Back-off and retries."""

from __future__ import annotations

import pytest

from rollmesh.errors import Conflict, StoreUnavailable
from rollmesh.runtime.tasks import Backoff, retry


def test_delays_double_up_to_the_limit_also_after_days_of_failures():
    backoff = Backoff(first_seconds=0.5, longest_seconds=3.0)
    assert [backoff.seconds(count) for count in (1, 2, 3, 4, 100_000)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_jitter_spreads_every_delay_by_its_share():
    backoff = Backoff(first_seconds=1.0, longest_seconds=4.0, jitter=0.5)
    for count, delay in ((1, 1.0), (9, 4.0)):
        delays = [backoff.seconds(count) for _ in range(200)]
        assert 0.5 * delay <= min(delays) < 0.7 * delay
        assert 1.3 * delay < max(delays) <= 1.5 * delay


async def test_a_retry_repeats_one_kind_of_error_with_growing_delays():
    waits: list[tuple[str, float]] = []

    async def action() -> int:
        if len(waits) < 3:
            raise StoreUnavailable(f"down {len(waits)}")
        return 7

    async def wait(error: StoreUnavailable, seconds: float) -> None:
        waits.append((str(error), seconds))

    assert await retry(action, StoreUnavailable, Backoff(first_seconds=1.0), wait) == 7
    assert waits == [("down 0", 1.0), ("down 1", 2.0), ("down 2", 4.0)]


async def test_another_error_and_an_error_of_the_wait_end_the_retries():
    async def conflict() -> None:
        raise Conflict("taken")

    async def outage() -> None:
        raise StoreUnavailable("down")

    async def stop(error: Exception, seconds: float) -> None:
        raise TimeoutError(f"{error} for {seconds:g} s")

    with pytest.raises(Conflict, match="taken"):
        await retry(conflict, StoreUnavailable, Backoff(first_seconds=1.0), stop)
    with pytest.raises(TimeoutError, match="down for 1 s"):
        await retry(outage, StoreUnavailable, Backoff(first_seconds=1.0), stop)
