"""Background tasks, retries and the end of tasks."""

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


async def test_the_first_error_of_ended_tasks_is_raised_and_a_cancellation_is_none():
    async def failure(error: Exception) -> None:
        raise error

    broken = (asyncio.ensure_future(failure(error)) for error in (KeyError("broken"), ValueError("later")))
    tasks = [asyncio.ensure_future(asyncio.Event().wait()), *broken]
    await asyncio.sleep(0)
    ended = await cancel_and_wait(*tasks)
    raise_first_error(ended[:1])
    with pytest.raises(KeyError, match="broken"):
        raise_first_error(ended)


async def test_a_retry_repeats_one_kind_of_error_with_growing_delays():
    waits: list[float] = []

    async def action() -> None:
        raise Conflict("taken") if len(waits) == 3 else StoreUnavailable("down")

    async def wait(error: StoreUnavailable, seconds: float) -> None:
        waits.append(seconds)

    with pytest.raises(Conflict, match="taken"):
        await retry(action, StoreUnavailable, Backoff(first_seconds=1.0), wait)
    assert waits == [1.0, 2.0, 4.0]


def test_jitter_spreads_every_delay_by_its_share():
    delays = [Backoff(first_seconds=1.0, longest_seconds=4.0, jitter=0.5).seconds(9) for _ in range(200)]
    assert 2.0 <= min(delays) < 2.8 and 5.2 < max(delays) <= 6.0
