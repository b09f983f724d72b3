"""Background tasks, and the end of tasks."""

from __future__ import annotations

import asyncio
import gc

import pytest

from rollmesh.runtime.tasks import (
    AwaitedTaskCancelled,
    BackgroundTasks,
    cancel_and_wait,
    cancelled_awaits_as_errors,
    raise_first_error,
)


async def test_background_tasks_survive_a_garbage_collection_and_leave_when_they_end():
    tasks, go, done = BackgroundTasks(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await go.wait()
        done.set()

    tasks.start(work(), "work")
    await asyncio.sleep(0)
    gc.collect()
    assert [task.get_name() for task in tasks] == ["work"]
    go.set()
    await done.wait()
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
