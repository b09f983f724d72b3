"""Uploads that Redis has forgotten when a script links them: the whole call has no effect, and is sent again."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.errors import SessionLost
from rollmesh.mesh import Cursor
from rollmesh.store import Append, Finish, TrajectoryStore, WriteStatus
from rollmesh.types import FinishReason

from .dump import dump
from .lost_uploads import Forgetful
from .store_mesh import Mesh, environment_segment, group, segment
from .stored_keys import read_truth

BIG = 30_000
"""Tokens of a segment, or a prompt, over the limit for what travels inline."""


async def two_leased(store: TrajectoryStore) -> Mesh:
    mesh = await Mesh.start(store, pool_size=4)
    await mesh.admit(3)
    assert len(await store.trajectories.lease(mesh.session, 2)) == 2
    return mesh


async def test_a_save_whose_second_upload_is_gone_changes_nothing_and_is_sent_again(store: TrajectoryStore) -> None:
    mesh = await two_leased(store)
    redis = Forgetful(store, "append", store.connection.keys.of("chunk", "e0-0.1:*"))
    items = [
        Append(trajectory_id="e0-0.0", token_offset=0, segments=[segment(3), environment_segment(BIG)]),
        Append(trajectory_id="e0-0.1", token_offset=0, segments=[segment(2), environment_segment(BIG + 1)]),
    ]
    results = await store.trajectories.append(mesh.session, items)
    assert [(r.status, r.saved_token_count) for r in results] == [(1, BIG + 3), (1, BIG + 3)]
    assert redis.refused == 1
    counts = await store.mesh.counts()
    assert counts.totals["saved_tokens_total"] == 2 * (BIG + 3)
    assert not any(goes for _, goes in (await dump(store)).values()), "every upload is linked"
    assert (await read_truth(store)).problems == []


async def test_a_finish_whose_second_upload_is_gone_changes_nothing_and_counts_once(store: TrajectoryStore) -> None:
    mesh = await two_leased(store)
    redis = Forgetful(store, "finish", store.connection.keys.of("chunk", "e0-0.1:*"))
    items = [
        Finish(trajectory_id=i, token_offset=0, segments=[segment(3), *more], finish_reason=FinishReason.STOP)
        for i, more in (("e0-0.0", []), ("e0-0.1", [environment_segment(BIG)]))
    ]
    results = await store.trajectories.finish(mesh.session, items)
    assert [r.status for r in results] == [WriteStatus.SAVED, WriteStatus.SAVED]
    assert redis.refused == 1
    counts = await store.mesh.counts()
    assert (counts.trajectories["leased"], counts.trajectories["finished"]) == (0, 2)
    assert counts.totals["finished_total"] == sum(counts.finished_lengths.values()) == 2
    for trajectory_id, value in (("e0-0.0", 0.0), ("e0-0.1", 1.0)):
        assert await mesh.score(trajectory_id, value) == WriteStatus.SAVED
    # The pool has room for all that waits: nothing that is not held counts as leased.
    assert len(await store.trajectories.lease(await store.sessions.open("another"), 4)) == 4
    truth = await read_truth(store)
    assert (truth.problems, truth.groups["e0-0"]) == ([], "ready")


async def test_an_admission_whose_second_prompt_is_gone_changes_nothing_and_is_sent_again(
    store: TrajectoryStore, another_client: TrajectoryStore
) -> None:
    mesh = await Mesh.start(store)
    redis = Forgetful(store, "admit", store.connection.keys.of("upload", "e0-2:*"))
    groups = [group(0), group(1, prompt_tokens=BIG), group(2, prompt_tokens=BIG)]
    assert await store.leadership.admit(mesh.leader, groups, Cursor(), Cursor(index=3)) == 3
    assert redis.refused == 1
    assert [g.admission_index for g in (await store.mesh.view()).stalest_open] == [1, 2, 3]
    assert (await store.mesh.counts()).totals["admitted_total"] == 3
    prompts = [len(t.trajectory.prompt.token_ids) for t in await another_client.trajectories.lease(mesh.session, 6)]
    assert prompts == [4, 4, BIG, BIG, BIG, BIG]
    assert (await read_truth(store)).problems == []


async def test_the_late_upload_of_an_overtaken_leader_is_not_the_prompt_of_its_group(
    store: TrajectoryStore, another_client: TrajectoryStore
) -> None:
    """A new leader draws another row for the group, and the old one uploads its own between upload and script."""
    mesh = await Mesh.start(store, keeps_history=True)
    old = mesh.leader
    await store.leadership.resign(old)
    mesh.leader = str(await store.leadership.acquire("new"))
    ours, theirs = group(0, prompt_tokens=BIG), group(0, prompt_tokens=BIG + 1)
    run, overtaken = store.connection.run, list[str]()

    async def late(name: str, *arguments: Any) -> Any:
        if name == "admit":
            with pytest.raises(SessionLost) as refused:
                await another_client.leadership.admit(old, [theirs], Cursor(), Cursor(index=1))
            overtaken.append(str(refused.value))
        return await run(name, *arguments)

    store.connection.run = late  # type: ignore[method-assign,assignment]
    assert await store.leadership.admit(mesh.leader, [ours], Cursor(), Cursor(index=1)) == 1
    assert len(overtaken) == 1
    leased = await another_client.trajectories.lease(mesh.session, 2)
    assert [len(item.trajectory.prompt.token_ids) for item in leased] == [BIG, BIG]
