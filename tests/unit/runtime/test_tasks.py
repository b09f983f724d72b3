"""Background tasks, retries and the end of tasks."""

from __future__ import annotations

import asyncio
import gc

import pytest

from rollmesh.errors import Conflict, StoreUnavailable
from rollmesh.runtime.tasks import (
    AwaitedTaskCancelled,
    BackgroundTasks,
    Backoff,
    cancel_and_wait,
    cancelled_awaits_as_errors,
    raise_first_error,
    retry,
)


async def test_background_tasks_survive_a_garbage_collection_and_leave_when_they_end():
    tasks, go = BackgroundTasks(), asyncio.Event()

    async def work() -> None:
        await go.wait()

    tasks.start(work(), "work")
    await asyncio.sleep(0)
    gc.collect()
    assert [task.get_name() for task in tasks] == ["work"]
    go.set()
    await asyncio.gather(*tasks)
    assert not tasks


async def test_cancelled_tasks_have_ended_on_return():
    tasks, ended = BackgroundTasks(), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    tasks.start(work())
    tasks.start(work())
    await asyncio.sleep(0)
    await tasks.cancel()
    assert ended == [True, True]


async def test_the_end_of_tasks_returns_results_and_errors_in_order():
    async def result() -> int:
        return 3

    async def failure() -> None:
        raise ValueError("broken")

    tasks = [asyncio.ensure_future(each) for each in (result(), failure(), asyncio.Event().wait())]
    await asyncio.sleep(0)
    ended = await cancel_and_wait(*tasks)
    assert ended[0] == 3
    assert isinstance(ended[1], ValueError)
    assert isinstance(ended[2], asyncio.CancelledError)
    raise_first_error([ended[0], ended[2]])
    with pytest.raises(ValueError, match="broken"):
        raise_first_error(ended)


async def test_a_cancelled_await_is_an_error_unless_the_task_itself_is_cancelled():
    inner = asyncio.get_running_loop().create_future()

    async def work() -> None:
        with cancelled_awaits_as_errors():
            await inner

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    inner.cancel()
    with pytest.raises(AwaitedTaskCancelled):
        await task
    inner = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    await cancel_and_wait(task)
    assert task.cancelled()


async def test_a_time_limit_around_a_cancelled_await_stays_a_time_limit():
    with pytest.raises(TimeoutError):
        with cancelled_awaits_as_errors():
            async with asyncio.timeout(0):
                await asyncio.Event().wait()
    with pytest.raises(AwaitedTaskCancelled):  # the limit above is not a cancellation of this task
        with cancelled_awaits_as_errors():
            raise asyncio.CancelledError


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
