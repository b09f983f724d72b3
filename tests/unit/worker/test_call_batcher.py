import asyncio

import pytest

from rollmesh.worker.saving import CallBatcher


async def test_what_arrives_during_a_call_waits_and_travels_together():
    calls, gate = [], asyncio.Event()

    async def call(items):
        calls.append(items)
        await gate.wait()
        return items

    lane = CallBatcher(call, limit=100)
    first = asyncio.create_task(lane.submit("a"))
    while not calls:
        await asyncio.sleep(0)
    rest = [asyncio.create_task(lane.submit(name)) for name in "bcd"]
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(first, *rest) == ["a", "b", "c", "d"]
    assert calls == [["a"], ["b", "c", "d"]]


async def test_a_call_takes_at_most_the_limit():
    calls = []

    async def call(items):
        calls.append(len(items))
        await asyncio.sleep(0)
        return items

    lane = CallBatcher(call, limit=3)  # items of one moment travel together
    assert await asyncio.gather(*(lane.submit(i) for i in range(10))) == list(range(10))
    assert calls == [3, 3, 3, 1]


async def test_an_error_reaches_every_item_of_its_call_and_the_batcher_continues():
    async def call(items):
        if "bad" in items:
            raise ValueError("no")
        return items

    lane = CallBatcher(call, limit=10)
    results = await asyncio.gather(lane.submit("bad"), lane.submit("fellow"), return_exceptions=True)
    assert [type(r) for r in results] == [ValueError, ValueError]
    assert await lane.submit("good") == "good"


async def test_a_caller_that_gives_up_before_the_call_takes_nothing_along():
    calls = []

    async def call(items):
        calls.append(items)
        return items

    lane = CallBatcher(call, limit=10)
    tasks = [asyncio.create_task(lane.submit(name)) for name in ("stays", "leaves")]
    await asyncio.sleep(0)
    tasks[1].cancel()
    assert await tasks[0] == "stays"
    with pytest.raises(asyncio.CancelledError):
        await tasks[1]
    assert calls == [["stays"]]


async def test_an_item_submitted_in_the_moment_a_runner_ends_is_not_forgotten():
    async def call(items):
        return items

    lane = CallBatcher(call, limit=10)

    async def submit_in_a_chain(number):
        for _ in range(200):
            assert await lane.submit(number) == number
            if number:
                await asyncio.sleep(0)

    async with asyncio.timeout(60):
        await asyncio.gather(*(submit_in_a_chain(number) for number in range(3)))
