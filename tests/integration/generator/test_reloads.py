"""Reloads in turns, and versions that are passed over: generators over real Redis and real policy folders."""

import asyncio
import signal

from structlog.testing import capture_logs

from rollmesh.mesh import Desired
from rollmesh.runtime.grpc import create_channel
from rollmesh.store.policy_registry import PolicyRegistry
from rollmesh.store.redis_connection import Connection
from rollmesh.types import FinishReason
from rollmesh.v1 import generation_service_pb2 as pb
from rollmesh.v1 import generation_service_pb2_grpc as stubs

from .generator_run import make_call


async def waits(run, index=0) -> bool:
    return await run.metric("rollmesh_generator_reload_waiting", index) == 1


async def take_turn_of_another(run):
    """Above the limit: the turn of a first load ends only after its generator serves."""
    assert await run.store.reloads.begin("another generator", at_once=1, ttl=600.0, above_limit=True) == []


async def test_the_log_tells_the_load_at_the_start_of_a_generator_from_later_ones(make_run):
    run = await make_run()
    with capture_logs() as lines:
        for version in range(2):
            await run.publish(version)
            if not version:
                run.start()
            await run.serving(version)
    loads = [line for line in lines if line["event"] == "policy_in_service"]
    assert [(line["policy_version"], line["at_start"]) for line in loads] == [(0, True), (1, False)]


async def test_generators_load_one_after_another_and_the_others_go_on(make_run, monkeypatch):
    run = await make_run(reload_at_once=1)
    await run.publish(0)
    for index in range(3):
        run.start(index)
    await run.serving(0, count=3)
    await take_turn_of_another(run)
    held: set[str] = set()
    most = 0
    call = Connection.run

    async def watched(self, name, *arguments):
        nonlocal most
        if name == "end_reload":  # before the call: Redis may grant the next turn before this one's answer is read
            held.discard(arguments[0])  # the turn of a first load may have begun before this watch
        reply = await call(self, name, *arguments)
        if name == "begin_reload" and reply[0]:
            held.add(arguments[0])
        most = max(most, len(held))
        return reply

    monkeypatch.setattr(Connection, "run", watched)
    await run.publish(1)
    for index in range(3):
        await run.until(f"generator {index} to wait for its turn", lambda index=index: waits(run, index))
    assert (most, {record.policy_version for record in await run.store.generators.live()}) == (0, {0})
    assert await run.store.reloads.end("another generator")
    await run.serving(1, count=3)
    assert most == 1
    assert sum([await run.metric("rollmesh_generator_reloads_total", n) for n in range(3)]) == 6
    assert min([await run.metric("rollmesh_generator_reload_wait_seconds_sum", n) for n in range(3)]) > 0


async def test_a_generator_killed_while_it_loads_hands_its_turn_on_and_the_next_one_serves_until_then(make_run):
    run = await make_run(reload_at_once=1, on_new_version="drain", session_ttl_seconds=15.0)  # a lease must end
    await run.publish(0)
    newer = await run.prepare(1)
    killed = run.start_process(0)
    (first,) = await run.serving(0)
    # It is paused, so its drain for this call holds the turn until the process is killed.
    async with create_channel(first.address) as channel:
        await stubs.GenerationServiceStub(channel).Pause(pb.PauseRequest())
    begun = run.stream(first, make_call())
    await run.until_status(first, "a held call", lambda status: status.waiting_count == 1)
    await run.announce(newer)
    await run.out_of_rotation("reload")
    assert not begun.task.done()
    run.start(1)  # it serves nothing, so it loads at once and above the limit
    (second,) = await run.serving(1)
    newest = await run.prepare(2)
    await run.announce(newest)
    await run.until("the second one to wait for its turn", lambda: waits(run, 1))
    served = run.stream(second, make_call("meanwhile", max_new_token_count=20), min_version=1)
    assert await served.end() is FinishReason.LENGTH
    assert served.versions == {1}
    killed.send_signal(signal.SIGKILL)
    (after,) = await run.serving(2)
    assert after.address == second.address
    assert not await waits(run, 1)
    await asyncio.gather(begun.task, return_exceptions=True)


async def test_a_generator_that_cannot_go_on_with_its_version_does_not_wait_for_its_turn(make_run):
    run = await make_run(reload_at_once=1)
    record = await run.begin()
    await take_turn_of_another(run)
    await run.publish(1)
    await run.until("the generator to wait", lambda: waits(run))
    await run.store.policies.pin(1, owner="evaluation", instance_id=record.instance_id)
    await run.serving(1)
    await run.publish(2)
    await run.store.policies.pin(None, owner="evaluation", instance_id=record.instance_id)
    await run.until("the generator to wait again", lambda: waits(run))
    leader = await run.store.leadership.acquire("test")
    await run.store.leadership.set_desired(leader, Desired(pool_size=8, start_at_version=2))
    await run.serving(2)
    await run.publish(3)
    await run.until("the generator to wait once more", lambda: waits(run))
    assert await run.store.reloads.end("another generator")
    await run.serving(3)


async def test_versions_are_passed_over_until_a_trajectory_needs_one(make_run, monkeypatch):
    run = await make_run(reload_every_versions=4)
    await run.begin()

    looks = 0
    outlook = PolicyRegistry.outlook

    async def counted(self, instance_id=None):
        nonlocal looks
        looks += 1
        return await outlook(self, instance_id)

    monkeypatch.setattr(PolicyRegistry, "outlook", counted)

    async def look_twice() -> None:
        before = looks

        async def looked() -> bool:
            return looks >= before + 2

        await run.until("the generator to look for a version", looked)

    for version in (1, 2):
        await run.publish(version)
        await look_twice()
    assert [record.policy_version for record in await run.store.generators.live()] == [0]
    assert await run.store.policies.require(1)
    await run.serving(2)
    await run.publish(3)
    await look_twice()
    await run.publish(4)
    await run.serving(4)
    assert await run.metric("rollmesh_generator_reloads_total") == 3
