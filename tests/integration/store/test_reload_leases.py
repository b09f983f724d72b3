"""Leases to load a policy: the limit holds, a repeated call changes nothing, and a dead generator's lease ends."""

from __future__ import annotations

import asyncio

from rollmesh.store import TrajectoryStore

from .store_mesh import Mesh, policy

TTL = 600.0


async def granted(store: TrajectoryStore, token: str, *, ttl: float = TTL, **options: bool) -> bool:
    return not await store.reloads.begin(token, at_once=2, ttl=ttl, **options)


async def test_no_more_leases_are_given_than_the_limit(store: TrajectoryStore, another_client: TrajectoryStore) -> None:
    asked = [granted((store, another_client)[n % 2], f"g{n}") for n in range(40)]
    assert sum(await asyncio.gather(*asked)) == 2


async def test_a_wait_names_the_holders_and_the_time_after_which_they_end(store: TrajectoryStore) -> None:
    assert await granted(store, "b", ttl=60.0) and await granted(store, "a")
    holders = await store.reloads.begin("c", at_once=2, ttl=TTL)
    assert [holder.token for holder in holders] == ["b", "a"]
    assert 0 < holders[0].seconds_left <= 60.0 < holders[1].seconds_left <= TTL


async def test_a_repeated_call_renews_its_lease_and_takes_no_second_one(store: TrajectoryStore) -> None:
    assert await granted(store, "a") and await granted(store, "a") and await granted(store, "b")
    assert not await granted(store, "c")
    assert await granted(store, "a"), "also at the limit"
    assert await store.reloads.end("a")
    assert await granted(store, "c")


async def test_only_the_token_that_holds_a_lease_ends_it(store: TrajectoryStore) -> None:
    assert await granted(store, "a") and await granted(store, "b")
    assert not await store.reloads.end("A") and not await store.reloads.end("")
    assert not await granted(store, "c")
    assert await store.reloads.end("b") and not await store.reloads.end("b")
    assert await granted(store, "c")


async def test_a_lease_above_the_limit_is_always_given_and_counts(store: TrajectoryStore) -> None:
    assert await granted(store, "a") and await granted(store, "b")
    assert await granted(store, "urgent", above_limit=True)
    assert await store.reloads.end("a")
    assert not await granted(store, "c"), "the urgent one still counts"
    assert await store.reloads.end("urgent")
    assert await granted(store, "c")


async def test_the_lease_of_a_killed_generator_ends_with_its_time_to_live(store: TrajectoryStore) -> None:
    assert await granted(store, "killed", ttl=0.2) and await granted(store, "alive")
    async with asyncio.timeout(60):
        while not await granted(store, "next"):
            await asyncio.sleep(0.02)
    assert not await granted(store, "one more")


async def test_a_clock_that_was_set_back_does_not_prolong_a_lease(store: TrajectoryStore) -> None:
    key = store.connection.keys.single("reloads")
    assert await granted(store, "killed", ttl=0.2) and await granted(store, "also killed", ttl=0.2)
    for token in ("killed", "also killed"):
        await store.connection.command("ZINCRBY", key, 3_600_000, token)
    async with asyncio.timeout(60):
        while not await granted(store, "next", ttl=0.2):
            await asyncio.sleep(0.02)


async def test_a_version_that_a_trajectory_needs_is_required_of_every_generator(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    for version in (1, 2):
        await store.policies.announce(mesh.trainer, policy(version))
    assert (await store.policies.outlook()).required_version == 0
    assert await store.policies.require(2)
    assert not await store.policies.require(2) and not await store.policies.require(1)
    assert not await store.policies.require(7), "it was never announced"
    outlook = await store.policies.outlook()
    assert (outlook.newest, outlook.pinned, outlook.required_version) == (policy(2), None, 2)
