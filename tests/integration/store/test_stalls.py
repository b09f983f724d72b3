"""A worker that stalls past its TTL finds the tokens of others: its own are never joined to them."""

import numpy as np
import pytest

from rollmesh.errors import DataError
from rollmesh.store import Append, Finish, Score, TokenDigest, TrajectoryStore, WriteStatus
from rollmesh.types import FinishReason, Segment

from .store_mesh import Mesh, digest_of, held, scored, segment
from .stored_keys import read_truth
from .test_recovery import other_server

NAME = "e0-0.0"
OURS, THEIRS = segment(100), segment(60, start=5_000)


async def saved(store: TrajectoryStore) -> list[int]:
    found = await store.inspection.inspect(NAME)
    return np.concatenate([s.token_ids for s in found.trajectory.segments]).tolist()


async def expire(mesh: Mesh) -> None:
    """Let one TTL pass over the worker's session, and the leader give back what it held."""
    keys, command = mesh.store.connection.keys, mesh.store.connection.command
    await command("ZADD", keys.single("sessions"), 1, mesh.session)
    await command("HSET", keys.single("meta"), "leader_since", 1)
    assert await mesh.store.leadership.reap(mesh.leader) == 1


async def stalled(store: TrajectoryStore) -> tuple[Mesh, str]:
    """Worker A has saved 100 tokens and stalled past its TTL; worker B has leased the trajectory."""
    mesh = await Mesh.start(store, groups=1, leased=1)
    assert await append(store, mesh.session, [], OURS) is WriteStatus.SAVED
    await expire(mesh)
    other = await store.sessions.open("B")
    assert len(await store.trajectories.lease(other, 1)) == 1
    return mesh, other


async def append(
    store: TrajectoryStore, session: str, before: list[Segment], new: Segment, incarnation: int = 0
) -> WriteStatus:
    offset = sum(map(len, before))
    item = Append(
        trajectory_id=NAME,
        token_offset=offset,
        segments=[new],
        incarnation=incarnation,
        digest=digest_of(before, offset),
    )
    return (await store.trajectories.append(session, [item]))[0].status


@pytest.mark.parametrize(
    ("before", "incarnation"),
    [(segment(60), 1), (THEIRS, 0), (segment(60), 0)],
    ids=["other tokens", "other incarnation", "both"],
)
async def test_a_write_that_follows_other_tokens_is_refused(
    store: TrajectoryStore, before: Segment, incarnation: int
) -> None:
    """This check separates two writers of one trajectory, independent of the lease."""
    _, other = await stalled(store)
    await store.trajectories.restart(other, [NAME])
    await append(store, other, [], THEIRS, incarnation=1)
    assert await append(store, other, [before], segment(1), incarnation) is WriteStatus.REFUSED
    for segments in ([], [segment(1)]):
        finish = Finish(
            trajectory_id=NAME,
            token_offset=60,
            segments=segments,
            finish_reason=FinishReason.STOP,
            incarnation=incarnation,
            digest=digest_of([before], 60),
        )
        assert (await store.trajectories.finish(other, [finish]))[0].status is WriteStatus.REFUSED
    assert await saved(store) == THEIRS.token_ids.tolist()
    assert (await read_truth(store)).members[NAME].state == "leased"


async def test_a_redis_that_forgot_saves_keeps_those_that_begin_the_worker_s_own(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1, leased=1)
    await append(store, mesh.session, [], segment(40))
    await other_server(store)
    # Of one save it has the first part only: whatever the worker's own cuts were.
    answers = await store.sessions.reregister(mesh.session, [held(NAME, segment(64), segment(36, start=64))])
    assert [(a.kept, a.saved_token_count) for a in answers] == [(True, 40)]
    await store.connection.command("HSET", store.connection.keys.single("meta"), "recovering_until", 1)
    await store.training.close_session(mesh.trainer)
    for theirs, why in (
        (segment(100, version=1), "tokens of another version are other tokens"),
        (segment(30), "the queue has more than the worker"),
    ):
        await store.trajectories.lease(mesh.session, 1)
        assert [a.kept for a in await store.sessions.reregister(mesh.session, [held(NAME, theirs)])] == [False], why


async def test_a_finished_trajectory_is_not_scored_for_the_tokens_of_another_worker(store: TrajectoryStore) -> None:
    _, other = await stalled(store)
    await store.trajectories.restart(other, [NAME])
    last = Finish(trajectory_id=NAME, token_offset=0, segments=[THEIRS], finish_reason=FinishReason.STOP, incarnation=1)
    assert (await store.trajectories.finish(other, [last]))[0].status is WriteStatus.SAVED
    await store.sessions.close(other)
    awake = await store.sessions.open("A")
    assert [a.kept for a in await store.sessions.reregister(awake, [held(NAME, OURS)])] == [False]
    score = Score(trajectory_id=NAME, outcome=scored(1.0), shaped_reward=1.0)
    assert (await store.trajectories.score(awake, [score]))[0].status is WriteStatus.LOST
    assert [t.incarnation for t in await store.trajectories.lease_scoring(awake, 1)] == [1]


async def test_an_offset_without_the_digest_of_the_tokens_before_it_is_a_clear_error(store: TrajectoryStore) -> None:
    item = Append(trajectory_id=NAME, token_offset=4, segments=[segment(2)], digest=TokenDigest())
    with pytest.raises(DataError, match="token_offset is 4, but digest covers 0 tokens"):
        await store.trajectories.append("session", [item])
