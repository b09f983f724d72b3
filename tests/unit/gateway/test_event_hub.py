"""Live events: snapshots, ticks, slow clients and too many clients."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rollmesh.gateway.events import EventHub, GatewayMetrics
from rollmesh.gateway.models.live import SnapshotEvent, TickEvent, Timeline, TimelineDelta
from rollmesh.gateway.models.overview import EndEvent
from rollmesh.runtime.metrics import Metrics

from .samples import built, look


def tick(time: float) -> TickEvent:
    return TickEvent(overview=built(look()), timeline=TimelineDelta(time=time, in_flight=0, left_out=0))


def snapshot() -> SnapshotEvent:
    timeline = Timeline(time=0.0, window_seconds=120.0, in_flight=0, left_out=0, rollouts=[])
    return SnapshotEvent(overview=built(look()), timeline=timeline)


@pytest.fixture
def hub() -> EventHub:
    return EventHub(snapshot, 2, GatewayMetrics(Metrics("gateway")))


async def following(stream: AsyncIterator[bytes]) -> tuple[str, int, Any]:
    """Kind, id and data of the next event; comments and retry lines are passed over."""
    while True:
        async with asyncio.timeout(60):
            text = (await anext(stream)).decode()
        fields = dict(line.split(": ", 1) for line in text.strip().splitlines() if not line.startswith(":"))
        assert text.endswith("\n\n")
        if "event" in fields:
            return fields["event"], int(fields["id"]), json.loads(fields["data"])


async def first_event(hub: EventHub, after: int | None) -> tuple[str, int]:
    """Kind and id of the first event of a client that leaves after it."""
    stream = hub.follow(after)
    kind, identity, _ = await following(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    return kind, identity


async def test_a_client_that_reads_slowly_misses_ticks_and_gets_a_snapshot(hub: EventHub) -> None:
    stream = hub.follow(None)
    _, first, _ = await following(stream)
    for number in range(100):
        hub.publish(tick(float(number)))
    kind, identity, _ = await following(stream)
    assert (kind, identity) == ("snapshot", first + 100)
    hub.publish(tick(1.0))
    assert (await following(stream))[:2] == ("tick", first + 101)


@pytest.mark.parametrize("is_of_this_process", [True, False])
async def test_a_client_that_comes_back_before_any_tick_gets_one_snapshot(
    hub: EventHub, is_of_this_process: bool
) -> None:
    _, first = await first_event(hub, None)
    stream = hub.follow(first if is_of_this_process else 0)
    assert (await following(stream))[:2] == ("snapshot", first)
    hub.publish(tick(1.0))
    assert (await following(stream))[:2] == ("tick", first + 1)


async def test_every_client_of_a_tick_gets_the_same_bytes(hub: EventHub) -> None:
    streams = [hub.follow(None), hub.follow(None)]
    for stream in streams:
        await following(stream)
    hub.publish(tick(1.0))
    first, second = [await anext(stream) for stream in streams]
    assert first is second


async def test_a_tick_that_was_published_before_the_end_reaches_a_connected_client(hub: EventHub) -> None:
    stream = hub.follow(None)
    _, first, _ = await following(stream)
    waiting = asyncio.create_task(following(stream))
    await asyncio.sleep(0)
    hub.publish(tick(7.0))
    hub.close(EndEvent(time=8.0, by="launcher"))
    async with asyncio.timeout(60):
        kind, identity, data = await waiting
    assert (kind, identity, data["timeline"]["time"]) == ("tick", first + 1, 7.0)
    assert (await following(stream))[0] == "end"
    async with asyncio.timeout(60):
        assert await anext(stream, None) is None
    assert hub.clients == 0


async def test_a_client_that_missed_ticks_gets_a_snapshot_before_the_end(hub: EventHub) -> None:
    stream = hub.follow(None)
    _, first, _ = await following(stream)
    for number in range(100):
        hub.publish(tick(float(number)))
    hub.close(EndEvent(time=8.0, by="launcher"))
    assert [(await following(stream))[:2] for _ in range(2)] == [("snapshot", first + 100), ("end", first + 100)]
