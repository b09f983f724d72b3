"""Background tasks, retries and the end of tasks."""

from __future__ import annotations

import asyncio
import gc

import pytest

from rollmesh.runtime.tasks import (
    AwaitedTaskCancelled,
    BackgroundTasks,
    Backoff,
    cancel_and_wait,
    cancelled_awaits_as_errors,
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
