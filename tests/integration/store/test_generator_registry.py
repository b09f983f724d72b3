"""The registry of generators: read again only where it has changed, and waiters woken only where there is room."""

import asyncio

import pytest

from rollmesh.config.store import StoreConfig
from rollmesh.errors import NoGenerator
from rollmesh.store import EmbeddedOptions, EmbeddedServer, ReleaseReason, TrajectoryStore
from rollmesh.types import GeneratorRecord, GeneratorWork, Trajectory
from rollmesh.worker.active_trajectory import ActiveTrajectory, Parked
from rollmesh.worker.generator_pool import GeneratorPool, GeneratorSlot
from rollmesh.worker.routing import Placement

from ...kit.records import generator_record
from ...kit.waiting import reached
from .store_mesh import Mesh, earlier_state, policy, prompt, segment

TTL = 600.0


def record(name: str, *, version: int = 0, slots: int = 8, running: int = 0) -> GeneratorRecord:
    work = GeneratorWork(prefill_tokens=100, slot_seconds=2.25)
    return generator_record(name, policy_version=version, running_count=running, slot_count=slots, work=work)


def held(number: int, min_version: int = 0) -> ActiveTrajectory:
    name = f"e0-{number}"
    found = ActiveTrajectory(
        Trajectory(trajectory_id=f"{name}.0", group_id=name, member_index=0, prompt=prompt(number))
    )
    found.set_floors(start=min_version, call=0)
    return found


async def by_name(store: TrajectoryStore) -> dict[str, GeneratorRecord]:
    return {found.instance_id: found for found in await store.generators.live()}


async def settled() -> None:
    """Let every ready task run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_records_that_have_not_changed_are_not_read_again(
    store: TrajectoryStore, another_client: TrajectoryStore
) -> None:
    for number in range(20):
        await another_client.generators.register(record(f"g{number}"), TTL)
    before = await by_name(store)
    await another_client.generators.register(record("g7", running=3), TTL)
    after = await by_name(store)
    assert [name for name in after if after[name] is not before[name]] == ["g7"]
    assert after["g7"] == record("g7", running=3)
    reply = await store.connection.run("generators", (await store.leadership.desired()).registry_version)
    assert len(reply) == 3, "no record travels"


async def test_the_desired_state_says_that_the_registry_has_changed(store: TrajectoryStore) -> None:
    await Mesh.start(store)
    versions = [(await store.leadership.desired()).registry_version]
    before = await store.leadership.desired()
    for write in (
        lambda: store.generators.register(record("a"), TTL),
        lambda: store.generators.register(record("a"), TTL),
        lambda: store.generators.deregister("a"),
    ):
        await write()
        versions.append((await store.leadership.desired()).registry_version)
    assert versions == sorted(set(versions))
    assert await store.leadership.desired() == before, "nothing for a worker to reconcile to"


async def test_a_generator_that_has_left_or_expired_leaves_every_copy(
    store: TrajectoryStore, another_client: TrajectoryStore
) -> None:
    await store.generators.register(record("stays"), TTL)
    await store.generators.register(record("leaves"), TTL)
    await store.generators.register(record("dies"), 0.2)
    assert sorted(await by_name(another_client)) == ["dies", "leaves", "stays"]
    await store.generators.deregister("leaves")
    assert "leaves" not in await by_name(another_client)

    async def only_one_stays() -> bool:
        return list(await by_name(another_client)) == ["stays"]

    await reached(only_one_stays)


async def test_a_redis_that_came_back_in_an_earlier_state_is_read_again(own_server: EmbeddedServer) -> None:
    own_server.stop()
    server = EmbeddedServer(own_server.folder, EmbeddedOptions(appendfsync="always", maxmemory_bytes=1 << 26))
    await asyncio.to_thread(server.start)
    try:
        async with (
            await TrajectoryStore.connect(StoreConfig(), run="registry", url=server.url) as store,
            await TrajectoryStore.connect(StoreConfig(), run="registry", url=server.url) as fresh,
        ):
            await store.generators.register(record("a"), TTL)
            await store.generators.register(record("gone later"), TTL)
            come_back = earlier_state(server)
            await store.generators.deregister("gone later")
            await store.generators.register(record("forgotten"), TTL)
            await store.generators.register(record("a", version=5), TTL)
            assert sorted(await by_name(store)) == ["a", "forgotten"]
            await asyncio.to_thread(come_back)
            assert await by_name(store) == await by_name(fresh)
            await fresh.generators.register(record("a", version=6), TTL)
            assert await by_name(store) == await by_name(fresh)
            assert (await by_name(store))["a"].policy_version == 6
    finally:
        await asyncio.to_thread(server.kill)


async def test_a_generator_with_eight_slots_wakes_eight_of_five_hundred_waiters(store: TrajectoryStore) -> None:
    generators = GeneratorPool(store.generators)
    await store.generators.register(record("old"), TTL)
    await generators.refresh()
    seated: list[int] = []
    ends = [asyncio.Event() for _ in range(500)]

    async def call(number: int) -> None:
        with await generators.acquire(held(number, min_version=1)):
            seated.append(number)
            await ends[number].wait()

    calls = [asyncio.create_task(call(number)) for number in range(500)]
    await settled()
    assert generators.waiting_count == 500
    await store.generators.register(record("new", version=1), TTL)
    await generators.refresh()
    await settled()
    assert seated == list(range(8))
    ends[3].set()
    await settled()
    assert seated == list(range(9)), "the slot that is free again takes the next one"
    for end in ends:
        end.set()
    await asyncio.wait_for(asyncio.gather(*calls), 60)
    assert (sorted(seated), generators.waiting_count) == (list(range(500)), 0)


async def test_a_waiter_that_no_generator_can_take_does_not_hold_up_those_behind_it(store: TrajectoryStore) -> None:
    generators = GeneratorPool(store.generators)
    seated: list[str] = []

    async def call(waiter: ActiveTrajectory, name: str, pinned_version: int | None = None) -> None:
        with await generators.acquire(waiter, pinned_version):
            seated.append(name)

    evaluation = asyncio.create_task(call(held(0), "evaluation", pinned_version=9))
    await settled()
    rollout = asyncio.create_task(call(held(1, min_version=1), "rollout"))
    await settled()
    await store.generators.register(record("one", version=1, slots=1), TTL)
    await generators.refresh()
    await asyncio.wait_for(rollout, 60)
    assert seated == ["rollout"]
    evaluation.cancel()
    await asyncio.gather(evaluation, return_exceptions=True)
    assert generators.waiting_count == 0


async def test_a_waiter_that_has_to_stop_is_woken_without_a_generator(store: TrajectoryStore) -> None:
    generators = GeneratorPool(store.generators)
    parked, others = held(0), held(1)
    calls = [asyncio.create_task(generators.acquire(each)) for each in (parked, others)]
    await settled()
    parked.park(ReleaseReason.PAUSED)
    generators.wake()
    with pytest.raises(Parked):
        await asyncio.wait_for(calls[0], 60)
    assert generators.waiting_count == 1
    calls[1].cancel()
    await asyncio.gather(calls[1], return_exceptions=True)


async def test_a_registry_is_read_when_its_version_has_changed_and_from_time_to_time(store: TrajectoryStore) -> None:
    now = 0.0
    generators = GeneratorPool(store.generators, clock=lambda: now)

    async def seen(version: int) -> list[str]:
        await generators.follow(version)
        return sorted(generators.records)

    await store.generators.register(record("a"), TTL)
    first = (await store.leadership.desired()).registry_version
    assert await seen(first) == ["a"]
    await store.generators.register(record("b"), TTL)
    assert await seen(first) == ["a"]
    second = (await store.leadership.desired()).registry_version
    assert await seen(second) == ["a", "b"]
    await store.generators.register(record("c"), TTL)
    now = 10.0
    assert await seen(second) == ["a", "b", "c"], "records expire silently"


async def test_tokens_of_a_version_that_no_generator_serves_are_named_while_their_trajectory_waits(
    store: TrajectoryStore,
) -> None:
    generators = GeneratorPool(store.generators)
    await store.generators.register(record("behind", version=3), TTL)
    await generators.refresh()
    calls = [asyncio.create_task(generators.acquire(held(0, min_version=9)))]
    await settled()
    assert generators.unserved_version() is None, "generators know the version that new trajectories need"
    for number, version in ((1, 5), (2, 4)):
        ahead = held(number)
        ahead.add(segment(1, version))
        calls.append(asyncio.create_task(generators.acquire(ahead)))
    await settled()
    assert generators.unserved_version() == 5
    await store.generators.register(record("level", version=5), TTL)
    await generators.refresh()
    await settled()
    assert generators.unserved_version() is None
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def test_a_call_goes_to_the_generator_that_has_its_prompt_in_its_cache(store: TrajectoryStore) -> None:
    generators = GeneratorPool(store.generators)
    for name in "ab":
        await store.generators.register(record(name, slots=64), TTL)
    await generators.refresh()
    seats = [(await generators.acquire(held(number))).__enter__() for number in (0, 1, 1, 0)]
    assert [slot.record.instance_id for slot in seats] == ["a", "b", "b", "a"]


async def test_a_bounded_wait_ends_where_no_generator_serves_and_goes_on_where_one_is_only_avoided(
    store: TrajectoryStore,
) -> None:
    generators = GeneratorPool(store.generators)
    await store.generators.register(record("avoided", version=1), TTL)
    await generators.refresh()
    with pytest.raises(NoGenerator, match=r"0.01 s"):
        await generators.acquire(held(0, min_version=2), unserved_seconds=0.01)
    generators.avoid("avoided", 600.0)
    waiting = asyncio.create_task(generators.acquire(held(1, min_version=1), unserved_seconds=0.01))
    await asyncio.sleep(0.1)
    assert not waiting.done(), "the generator serves the version"
    generators.clear_avoidance("avoided")
    generators.wake()
    with await asyncio.wait_for(waiting, 60) as slot:
        assert slot.record.instance_id == "avoided"


LEASE_TTL = 600.0


async def granted(store: TrajectoryStore, token: str, *, ttl: float = LEASE_TTL, **options: bool) -> bool:
    return not await store.reloads.begin(token, at_once=2, ttl=ttl, **options)


async def test_no_more_leases_are_given_than_the_limit(store: TrajectoryStore, another_client: TrajectoryStore) -> None:
    asked = [granted((store, another_client)[n % 2], f"g{n}") for n in range(40)]
    assert sum(await asyncio.gather(*asked)) == 2


async def test_a_wait_names_the_holders_and_the_time_after_which_they_end(store: TrajectoryStore) -> None:
    assert await granted(store, "b", ttl=60.0) and await granted(store, "a")
    holders = await store.reloads.begin("c", at_once=2, ttl=LEASE_TTL)
    assert [holder.token for holder in holders] == ["b", "a"]
    assert 0 < holders[0].seconds_left <= 60.0 < holders[1].seconds_left <= LEASE_TTL


async def test_a_token_has_one_lease_and_only_it_ends_it_and_one_above_the_limit_counts(store: TrajectoryStore) -> None:
    assert await granted(store, "a") and await granted(store, "a") and await granted(store, "b")
    assert not await granted(store, "c")
    assert await granted(store, "a"), "a repeated call renews its lease, also at the limit"
    assert not await store.reloads.end("A") and not await store.reloads.end("")
    assert await granted(store, "urgent", above_limit=True)
    assert await store.reloads.end("a") and not await store.reloads.end("a")
    assert not await granted(store, "c"), "the urgent one still counts"
    assert await store.reloads.end("urgent")
    assert await granted(store, "c")


async def test_the_lease_of_a_killed_generator_ends_with_its_time_to_live(store: TrajectoryStore) -> None:
    assert await granted(store, "killed", ttl=0.2) and await granted(store, "alive")
    await reached(lambda: granted(store, "next"))
    assert not await granted(store, "one more")


async def test_a_clock_that_was_set_back_does_not_prolong_a_lease(store: TrajectoryStore) -> None:
    key = store.connection.keys.single("reloads")
    assert await granted(store, "killed", ttl=0.2) and await granted(store, "also killed", ttl=0.2)
    for token in ("killed", "also killed"):
        await store.connection.command("ZINCRBY", key, 3_600_000, token)
    await reached(lambda: granted(store, "next", ttl=0.2))


async def test_a_pool_that_places_by_tokens_counts_what_calls_begin_with_sample_and_take_along(
    store: TrajectoryStore,
) -> None:
    generators = GeneratorPool(store.generators, placement=Placement.TOKENS)
    for name in "ab":
        await store.generators.register(record(name, slots=64), TTL)
    await generators.refresh()

    async def seat(number: int, saved: int = 0) -> GeneratorSlot:
        waiter = held(number)
        waiter.add(segment(saved))
        return (await generators.acquire(waiter)).__enter__()

    first = await seat(0)
    first.grow(300)
    await seat(1)
    second = await seat(2, saved=400)
    seats = [second, await seat(3)]
    generators.leave(second)
    seats.append(await seat(4))
    assert [slot.record.instance_id for slot in (first, *seats)] == ["a", "b", "a", "b"]


async def test_the_required_version_was_announced_and_never_falls(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    for version in (1, 2):
        await store.policies.announce(mesh.trainer, policy(version))
    assert [await store.policies.require(version) for version in (7, 2, 2, 1)] == [False, True, False, False]
    assert (await store.policies.outlook()).required_version == 2
