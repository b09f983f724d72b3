"""Leases on a real server: the pool, the order, lost answers, and how they end."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from rollmesh.errors import Conflict, DataError, StoreUnavailable
from rollmesh.mesh import Cursor, Desired
from rollmesh.store import Append, FirstToken, ReleaseReason, TrajectoryStore, WriteStatus
from rollmesh.store.redis_connection import Argument

from .store_mesh import Mesh, copy_of_keys, environment_segment, group, policy, put_back


async def test_a_resting_id_without_a_record_is_forgotten_by_the_next_lease(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1, leased=2)
    await mesh.append("e0-0.0", 0, 4)
    await store.trajectories.release(mesh.session, ["e0-0.0"], ReleaseReason.RESTED)
    await store.connection.command("ZADD", store.connection.keys.single("resting"), 0, "e0-7.0", 0, "e0-0.9")
    await store.leadership.set_desired(mesh.leader, Desired(pool_size=64, rest_before_step=1))
    leased = await store.trajectories.lease(mesh.session, 4)
    assert [item.trajectory.trajectory_id for item in leased] == ["e0-0.0"]


async def lease_without_an_answer(mesh: Mesh, limit: int) -> None:
    """Lease from a Redis that is gone after the script and before the prompts."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(StoreUnavailable):
        patch.setattr(mesh.store.connection, "commands", AsyncMock(side_effect=StoreUnavailable("gone")))
        await mesh.store.trajectories.lease(mesh.session, limit)


async def test_a_lease_whose_answer_was_lost_is_answered_by_the_next_one(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=2)
    await lease_without_an_answer(mesh, 3)
    again = await mesh.lease_ids(1)
    assert again == ["e0-0.0", "e0-0.1", "e0-1.0"], "all that the queue counts as held by this session"
    assert await mesh.lease_ids(3) == ["e0-1.1"]


async def test_a_lost_lease_is_forgotten_once_the_worker_has_stated_what_it_holds(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1)
    await lease_without_an_answer(mesh, 1)
    await store.sessions.reregister(mesh.session, [], "worker")
    other = await store.sessions.open("other")
    assert [i.trajectory.trajectory_id for i in await store.trajectories.lease(other, 1)] == ["e0-0.0"]
    assert await mesh.lease_ids(2) == ["e0-0.1"]


async def test_a_group_that_was_skipped_keeps_the_prompt_that_is_in_the_queue(
    store: TrajectoryStore, another_client: TrajectoryStore
) -> None:
    mesh = await Mesh.start(store, groups=1)
    await store.connection.command("HSET", store.connection.keys.single("meta"), "cursor_index", 0)
    changed = group(0, prompt_tokens=9)
    assert await another_client.leadership.admit(mesh.leader, [changed], Cursor(), Cursor(index=1)) == 0
    leased = (await another_client.trajectories.lease(mesh.session, 1))[0].trajectory
    assert leased.prompt.token_ids.tolist() == [0, 1, 2, 3] and not leased.prompt.token_ids.flags.writeable


async def test_a_run_with_a_history_reads_a_prompt_once_and_another_one_after_it_was_drawn_again(
    store: TrajectoryStore, another_client: TrajectoryStore
) -> None:
    mesh = await Mesh.start(store, keeps_history=True)
    empty = await copy_of_keys(store)
    sent, read = another_client.connection.commands, list[str]()

    async def counted(commands: Sequence[Sequence[Argument]], *label: str) -> Any:
        read.extend(str(words[1]) for words in commands)
        return await sent(commands, *label)

    async def leased_prompt() -> str:
        leased = await another_client.trajectories.lease(mesh.session, 2)
        await store.trajectories.release(mesh.session, [item.trajectory.trajectory_id for item in leased], "drained")
        (prompt,) = {item.trajectory.prompt.prompt_id for item in leased}
        return prompt

    another_client.connection.commands = counted  # type: ignore[method-assign,assignment]
    for row in ("row 5", "row 7"):
        await put_back(store, empty)
        drawn = group(0)
        drawn = replace(drawn, prompt=replace(drawn.prompt, prompt_id=row), record_name=row)
        assert await store.leadership.admit(mesh.leader, [drawn], Cursor(), Cursor(index=1)) == 1
        read.clear()
        assert [await leased_prompt() for _ in range(3)] == [row] * 3
        assert read == [store.connection.keys.of("prompt", "e0-0")]
    read.clear()
    (first,) = await another_client.trajectories.lease(mesh.session, 1)
    for _ in range(2):
        fork = await another_client.trajectories.fork(mesh.session, first.trajectory.trajectory_id, "nonce")
        assert fork.leased is not None and fork.leased.trajectory.prompt.prompt_id == "row 7"
    assert read == []
    await mesh.finish("e0-0.0", 0, 2)
    await store.sessions.close(mesh.session)
    (orphan,) = await another_client.trajectories.lease_scoring(await store.sessions.open("heir"), 1)
    assert orphan.trajectory.prompt.prompt_id == "row 7"
    assert store.connection.keys.of("prompt", "e0-0") not in read


async def test_an_empty_prompt_is_refused_before_anything_is_admitted(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    with pytest.raises(DataError, match="'0' is empty"):
        await store.leadership.admit(mesh.leader, [group(0, prompt_tokens=0)], Cursor(), Cursor(index=1))
    assert await store.leadership.cursor() == Cursor()


async def test_a_lease_whose_group_is_dropped_before_its_tokens_are_read_is_no_lease(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = await Mesh.start(store, groups=1, leased=1)
    item = Append(trajectory_id="e0-0.0", token_offset=0, segments=[environment_segment(30_000)])
    await store.trajectories.append(mesh.session, [item])
    await store.trajectories.release(mesh.session, ["e0-0.0"], ReleaseReason.DRAINED)
    commands = store.connection.commands

    async def evicted_before_the_chunks(calls: list[tuple[str, ...]], what: str = "") -> list[object]:
        if calls and calls[0][0] == "GET" and ":c:" in calls[0][1]:
            await store.leadership.evict(mesh.leader, ["e0-0"], "stale")
        return await commands(calls, what)

    monkeypatch.setattr(store.connection, "commands", evicted_before_the_chunks)
    assert await store.trajectories.lease(mesh.session, 1) == []


async def test_a_paused_mesh_leases_nothing(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1)
    for pause in (store.settings.set_user_paused, store.settings.set_launcher_paused):
        await pause(True)
        assert await store.trajectories.lease(mesh.session, 1) == []
        await pause(False)
    assert len(await store.trajectories.lease(mesh.session, 1)) == 1


async def test_the_time_of_the_first_lease_stays_with_the_trajectory(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1)
    before = time.time()
    first = {t.trajectory.trajectory_id: t.first_lease_time for t in await store.trajectories.lease(mesh.session, 2)}
    assert len(first) == 2
    assert all(before - 1.0 <= since <= time.time() + 1.0 for since in first.values())
    assert await mesh.append("e0-0.0", 0, 4) == WriteStatus.SAVED
    await store.trajectories.release(mesh.session, list(first), ReleaseReason.DRAINED)
    while time.time() <= max(first.values()) + 0.002:  # the server's clock has moved on by then
        await asyncio.sleep(0)
    again = {t.trajectory.trajectory_id: t.first_lease_time for t in await store.trajectories.lease(mesh.session, 2)}
    assert again == first
    await mesh.finish("e0-0.0", 4, 4)
    await store.sessions.close(mesh.session)
    (orphan,) = await store.trajectories.lease_scoring(await store.sessions.open("heir"), 1)
    assert {orphan.trajectory.trajectory_id: orphan.first_lease_time}.items() <= first.items()


async def begin(mesh: Mesh, version: int, *trajectory_ids: str, session: str | None = None) -> list[WriteStatus]:
    items = [FirstToken(trajectory_id=i, policy_version=version) for i in trajectory_ids]
    return [
        result.status for result in await mesh.store.trajectories.report_first_tokens(session or mesh.session, items)
    ]


async def age(mesh: Mesh) -> dict[str, int | None]:
    """Smallest train step of every open group."""
    return {g.group_id: g.min_train_step for g in (await mesh.store.mesh.view()).stalest_open}


async def two_versions(store: TrajectoryStore, groups: int = 1, needed: int = 2) -> Mesh:
    mesh = await Mesh.start(store, pool_size=1 << 14, group_size=needed)
    await store.policies.announce(mesh.trainer, policy(1))
    await mesh.admit(groups, needed)
    return mesh


async def test_a_first_token_is_reported_by_the_holder_and_of_an_announced_version_only(store: TrajectoryStore) -> None:
    mesh = await two_versions(store)
    await store.trajectories.lease(mesh.session, 1)
    another = await store.sessions.open("another")
    assert await begin(mesh, 0, "e0-0.0", session=another) == [WriteStatus.LOST]
    assert await begin(mesh, 0, "e0-0.1", "e9-9.0") == [WriteStatus.LOST] * 2
    with pytest.raises(Conflict, match="policy version 7 has not been announced"):
        await begin(mesh, 7, "e0-0.0")
    assert await age(mesh) == {"e0-0": None}


@pytest.mark.parametrize("by", ["release", "close_session"])
async def test_many_unsaved_first_tokens_go_back_in_bounded_calls(store: TrajectoryStore, by: str) -> None:
    """Each reads every member of its group: a call ends after so many, and the next one continues."""
    mesh = await two_versions(store, groups=24, needed=64)
    ids: list[str] = []
    while leased := await store.trajectories.lease(mesh.session, 64):
        ids += [item.trajectory.trajectory_id for item in leased]
    first = [f"e0-{index}.0" for index in range(24)]
    await begin(mesh, 0, *first)
    assert set((await age(mesh)).values()) <= {0, None}
    if by == "release":
        assert await store.trajectories.release(mesh.session, first) == 24
        assert (await store.mesh.view()).pending == 24
    else:
        await store.sessions.close(mesh.session)
        assert (await store.mesh.view()).pending == len(ids) == 24 * 64
    seen = await store.mesh.view()
    assert seen.unclaimed_by_step == ()
    assert seen.leased + seen.pending == 24 * 64
