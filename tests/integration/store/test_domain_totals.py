"""Totals of every domain of the prompts, on a real server, and through a restore of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollmesh.mesh import Cursor
from rollmesh.prompt_history import DomainTotals, PromptOutcome
from rollmesh.store import TrajectoryStore

from .store_mesh import Mesh, copy_of_keys, group, limits, policy, put_back

DOMAINS = ("algebra", "code")


async def admit(mesh: Mesh, count: int) -> None:
    """Open groups at the cursor, of every domain in turn, and lease all members."""
    before = await mesh.store.leadership.cursor()
    after = Cursor(index=before.index + count)
    opened = [group(index) for index in range(before.index, after.index)]
    named = [replace(g, prompt=replace(g.prompt, domain=DOMAINS[g.index % 2])) for g in opened]
    await mesh.store.leadership.admit(mesh.leader, named, before, after)
    while await mesh.store.trajectories.lease(mesh.session, 64):
        pass


async def end(mesh: Mesh, *group_ids: str, version: int = 0) -> None:
    """End groups with two members of 4 and 6 tokens, the first of them right."""
    for group_id in group_ids:
        for member, (tokens, reward) in enumerate(((4, 1.0), (6, 0.0))):
            await mesh.finish(f"{group_id}.{member}", 0, tokens, version)
            assert await mesh.score(f"{group_id}.{member}", reward) == 1


async def reassert(mesh: Mesh, files: dict[int, tuple[list[str], list[PromptOutcome]]], cursor: int) -> None:
    await mesh.store.training.reassert(
        mesh.trainer,
        committed_step=len(files),
        trained_step=len(files),
        batches=[(step, groups) for step, (groups, _) in files.items()],
        policies=[policy(0)],
        cursor=Cursor(index=cursor),
        outcomes=[outcomes for _, outcomes in files.values()],
    )


async def waiting_replays(mesh: Mesh) -> list[str]:
    connection = mesh.store.connection
    return [key.decode() for key in await connection.command("HKEYS", connection.keys.single("replays"))]


async def open_replay(mesh: Mesh) -> None:
    """Open the replay that waits, and lease its members."""
    assert await mesh.store.leadership.admit_replays(mesh.leader, 8) == 1
    while await mesh.store.trajectories.lease(mesh.session, 64):
        pass


def totals(algebra: tuple[int, int], code: tuple[int, int]) -> dict[str, DomainTotals]:
    """Totals from (groups drawn, groups ended) of each domain."""
    return {
        name: DomainTotals(drawn=drawn, completed=2 * ended, solved=ended, tokens=10 * ended)
        for name, (drawn, ended) in zip(DOMAINS, (algebra, code), strict=True)
        if drawn
    }


async def test_a_domain_counts_groups_at_admission_and_trajectories_once_their_group_has_ended(
    store: TrajectoryStore,
) -> None:
    mesh = await Mesh.start(store, keeps_history=True)
    assert await store.prompt_records.domain_totals() == {}
    await admit(mesh, 3)
    await end(mesh, "e0-0")
    assert await store.prompt_records.domain_totals() == totals((2, 1), (1, 0))


@pytest.mark.parametrize("known", [0, 1, 3, 6])
async def test_a_restored_redis_counts_every_draw_and_every_end_once(store: TrajectoryStore, known: int) -> None:
    """Redis comes back with a state in which ``known`` of six groups were open, and none had ended.

    Three of the six are in batch files. Of the others, those that Redis has lost are drawn and end a second time.
    """
    mesh = await Mesh.start(store, keeps_history=True)
    await admit(mesh, known)
    restored = await copy_of_keys(store)
    await admit(mesh, 6 - known)
    await end(mesh, *(f"e0-{i}" for i in range(6)))
    batches = {1: ["e0-0", "e0-3"], 2: ["e0-1"]}
    files = {step: (ids, await mesh.train(step, ids)) for step, ids in batches.items()}
    assert await store.prompt_records.domain_totals() == totals((3, 3), (3, 3))
    await put_back(store, restored)
    for _ in range(2):
        await reassert(mesh, files, cursor=6)
    await admit(mesh, 6 - known)
    await end(mesh, "e0-2", "e0-4", "e0-5")
    again = [sum(i >= known and i % 2 == domain for i in (2, 4, 5)) for domain in range(2)]
    algebra, code = (3 + count for count in again)
    assert await store.prompt_records.domain_totals() == totals((algebra, algebra), (code, code))


async def test_an_empty_redis_counts_a_group_that_began_again_as_drawn_once(store: TrajectoryStore) -> None:
    """e0-0 is ready, begins again over the staleness bound after its outcome is in a batch file, and ends again."""
    mesh = await Mesh.start(store, keeps_history=True, max_staleness=0)
    await admit(mesh, 2)
    await end(mesh, "e0-0", "e0-1")
    first = await mesh.train(1, ["e0-1"])
    await store.policies.announce(mesh.trainer, policy(1))
    assert await store.restarted.restart(mesh.leader, ["e0-0"]) == 1
    for item in await store.trajectories.lease(mesh.session, 8):
        await mesh.complete(item, float(item.trajectory.member_index), version=1)
    second = await mesh.train(2, ["e0-0"])
    assert [o.group_id for o in (*first, *second)] == ["e0-0", "e0-1", "e0-0~0"]
    before = await store.prompt_records.domain_totals()
    assert (before["algebra"].drawn, before["algebra"].completed) == (1, 4)
    await put_back(store, {})
    await store.limits.init_run(limits(keeps_history=True))
    await reassert(mesh, {1: (["e0-1"], first), 2: (["e0-0"], second)}, cursor=2)
    assert await store.prompt_records.domain_totals() == before


@pytest.mark.parametrize("is_trained", [True, False])
async def test_a_replay_that_waits_in_the_restored_redis_is_drawn_once_and_ends_once(
    store: TrajectoryStore, is_trained: bool
) -> None:
    """The outcome of the replay is in a file, its group in a batch or in none."""
    mesh = await Mesh.start(store, keeps_history=True, max_attempts=1, max_staleness=4)
    await admit(mesh, 3)
    await store.trajectories.fail(mesh.session, [("e0-0.0", "broke")])
    replay = await store.dead_letters.replay("e0-0.0")
    assert await waiting_replays(mesh) == [replay]
    assert (await store.prompt_records.domain_totals())["algebra"].drawn == 3
    waiting = await copy_of_keys(store)
    await end(mesh, "e0-1")
    first = await mesh.train(1, ["e0-1"])
    await open_replay(mesh)
    await end(mesh, replay)
    await end(mesh, "e0-2")
    batch = [replay if is_trained else "e0-2"]
    second = await mesh.train(2, batch)
    assert sorted(o.group_id for o in second) == [replay, "e0-2"]
    before = await store.prompt_records.domain_totals()
    assert (before["algebra"].drawn, before["algebra"].completed) == (3, 4)
    await put_back(store, waiting)
    await reassert(mesh, {1: (["e0-1"], first), 2: (batch, second)}, cursor=2)
    assert await waiting_replays(mesh) == ([] if is_trained else [replay])
    if is_trained:
        await end(mesh, "e0-2")
    else:
        await open_replay(mesh)
        await end(mesh, replay)
        assert replay not in [o.group_id for o in await store.prompt_records.unsaved(mesh.trainer, 3)]
    assert await store.prompt_records.domain_totals() == before


async def test_a_group_that_ends_again_after_a_restore_is_drawn_once_by_the_next_restore(
    store: TrajectoryStore,
) -> None:
    """e0-0 is open in the restored state and its first outcome in file 1; it ends again and is in file 2."""
    mesh = await Mesh.start(store, keeps_history=True)
    await admit(mesh, 2)
    opened = await copy_of_keys(store)
    await end(mesh, "e0-0", "e0-1")
    first = await mesh.train(1, ["e0-1"])
    assert [o.group_id for o in first] == ["e0-0", "e0-1"]
    await put_back(store, opened)
    await reassert(mesh, {1: (["e0-1"], first)}, cursor=2)
    await end(mesh, "e0-0")
    second = await mesh.train(2, ["e0-0"])
    assert [o.group_id for o in second] == ["e0-0~0"]
    before = await store.prompt_records.domain_totals()
    assert before == totals((1, 1), (1, 1))
    await put_back(store, {})
    await store.limits.init_run(limits(keeps_history=True))
    await reassert(mesh, {1: (["e0-1"], first), 2: (["e0-0"], second)}, cursor=2)
    after = await store.prompt_records.domain_totals()
    assert {name: found.drawn for name, found in after.items()} == {name: 1 for name in DOMAINS}


async def test_a_replayed_dead_letter_counts_as_drawn_once_through_a_restore(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, keeps_history=True, max_attempts=1)
    await admit(mesh, 1)
    await store.trajectories.fail(mesh.session, [("e0-0.0", "broke")])
    unasked = await copy_of_keys(store)
    replay = await store.dead_letters.replay("e0-0.0")
    await open_replay(mesh)
    replayed = await copy_of_keys(store)
    await end(mesh, replay)
    file = {1: ([replay], await mesh.train(1, [replay]))}
    before = await store.prompt_records.domain_totals()
    assert before["algebra"].drawn == 2
    for restored in (unasked, replayed):
        await put_back(store, restored)
        await reassert(mesh, file, cursor=1)
        assert await store.prompt_records.domain_totals() == before
