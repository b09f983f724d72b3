"""Calls that are refused leave the queue as it was, and lists of any length do not break a script half-way."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.errors import Conflict, SessionLost
from rollmesh.store import Finish, TrajectoryStore
from rollmesh.store.scripts import RunUnknown
from rollmesh.types import FinishReason

from .dump import changed, dump
from .store_mesh import Mesh, limits, segment
from .stored_keys import read_truth

MANY = 9_000
"""More words than Lua can hand on at once."""


@pytest.mark.parametrize(
    ("script", "arguments", "error"),
    [
        ("init_run", (0, "train_steps", 200, "group_size", 3), Conflict),
        ("open_trainer_session", ("fenced", "trainer", "lineage"), SessionLost),
        ("reregister", ("stranger", "worker", "e0-0.0", 0, 3, "0" * 16), SessionLost),
        ("pin_policy", (7, "", ""), Conflict),
    ],
)
async def test_a_refused_call_changes_nothing(
    store: TrajectoryStore, script: str, arguments: tuple[Any, ...], error: type[Exception]
) -> None:
    await store.limits.init_run(limits())
    await store.connection.run("open_trainer_session", "fenced", "older", "")
    await store.connection.run("open_trainer_session", "newest", "newer", "")
    before = await dump(store)
    with pytest.raises(error):
        await store.connection.run(script, *arguments)
    assert changed(before, await dump(store)) == []


async def test_nothing_is_asserted_again_of_a_run_that_redis_does_not_know(store: TrajectoryStore) -> None:
    for script, arguments in (
        ("reassert_groups", ("trainer", 1, "digest", 1, "e0-0")),
        ("reassert_done", ("trainer", 1, 1, 1, 0, 4, "server")),
    ):
        with pytest.raises(RunUnknown):
            await store.connection.run(script, *arguments)
    assert await dump(store) == {}


async def test_a_rollout_of_many_saves_begins_again_and_goes(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    await store.trajectories.lease(mesh.session, 2)
    for trajectory_id in ("e0-0.0", "e0-0.1"):
        await mesh.append(trajectory_id, 0, 3)
    key = store.connection.keys.of("trajectory", "e0-0.1")
    saves = [word for at in range(MANY) for word in (f"d{at}", "digest")]
    await store.connection.command("HSET", key, "links", " ".join(map(str, range(MANY))), *saves)
    assert await store.trajectories.restart(mesh.session, ["e0-0.0", "e0-0.1"]) == [1, 1]
    assert (await store.mesh.counts()).totals["restarted_tokens_total"] == 6
    assert not [f for f in await store.connection.command("HKEYS", key) if f.startswith(b"d")]
    await mesh.append("e0-0.1", 0, 3)
    await store.connection.command("HSET", key, "links", " ".join(map(str, range(MANY))))
    assert await store.leadership.evict(mesh.leader, ["e0-0"], "stale") == 1
    assert (await read_truth(store)).problems == []


async def test_a_turn_of_many_segments_is_saved_whole(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    await store.trajectories.lease(mesh.session, 2)
    items = [
        Finish(trajectory_id=i, token_offset=0, segments=[segment(1)] * number, finish_reason=FinishReason.STOP)
        for i, number in (("e0-0.0", 1), ("e0-0.1", MANY))
    ]
    results = await store.trajectories.finish(mesh.session, items)
    assert [(r.status, r.saved_token_count) for r in results] == [(1, 1), (1, MANY)]
    assert await store.connection.command("LLEN", store.connection.keys.of("segments", "e0-0.1")) == MANY
    assert (await read_truth(store)).problems == []
