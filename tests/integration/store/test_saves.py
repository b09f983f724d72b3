"""Saves of tokens, outcomes and teachers' scores on a real server."""

import asyncio
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollmesh.errors import Conflict, SessionLost
from rollmesh.mesh import Cursor
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.store import Append, ReleaseReason, TrajectoryStore, WriteStatus
from rollmesh.types import FinishReason, TeacherColumn
from rollmesh.worker.active_trajectory import ActiveTrajectory, LetGo
from rollmesh.worker.saving import Saver
from rollmesh.worker.worker_session import WorkerSession

from .store_mesh import Forgetful, Mesh, column, column_bytes, digest_of, environment_segment, group, segment
from .stored_keys import read_truth


async def test_a_worker_without_the_lease_cannot_write(store: TrajectoryStore) -> None:
    await Mesh.start(store, groups=1, leased=1)
    stranger = await store.sessions.open("stranger")
    item = Append(trajectory_id="e0-0.0", token_offset=0, segments=[segment(2)])
    assert (await store.trajectories.append(stranger, [item]))[0].status == WriteStatus.LOST
    assert await store.trajectories.release(stranger, ["e0-0.0"], "failed") == 0
    assert await store.trajectories.fail(stranger, [("e0-0.0", "no")]) == 0
    with pytest.raises(SessionLost):
        await store.trajectories.lease("0" * 32, 1)


async def test_a_repeated_finish_or_score_changes_nothing_and_another_one_is_refused(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1, leased=1)
    assert await mesh.finish("e0-0.0", 0, 1) == WriteStatus.SAVED
    assert await mesh.finish("e0-0.0", 0, 1) == WriteStatus.DUPLICATE
    assert await mesh.finish("e0-0.0", 0, 2) == WriteStatus.REFUSED
    assert await mesh.score("e0-0.0", 1.0) == WriteStatus.SAVED
    assert await mesh.score("e0-0.0", 1.0) == WriteStatus.DUPLICATE
    assert await mesh.score("e0-0.0", 0.5) == WriteStatus.REFUSED


async def test_tokens_of_an_unannounced_version_leave_the_whole_call_without_effect(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1, leased=2)
    items = [
        Append(trajectory_id="e0-0.0", token_offset=0, segments=[segment(2)]),
        Append(trajectory_id="e0-0.1", token_offset=0, segments=[segment(2, version=9)]),
    ]
    with pytest.raises(Conflict, match="version 9"):
        await store.trajectories.append(mesh.session, items)
    assert (await read_truth(store)).members["e0-0.0"].tokens == 0


async def test_large_segments_and_prompts_survive_outside_the_inline_limit(
    store: TrajectoryStore, another_client: TrajectoryStore
) -> None:
    mesh = await Mesh.start(store)
    big_group = group(0, prompt_tokens=40_000)
    await store.leadership.admit(mesh.leader, [big_group], Cursor(), Cursor(index=1))
    leased = await another_client.trajectories.lease(mesh.session, 2)
    assert np.array_equal(leased[0].trajectory.prompt.token_ids, big_group.prompt.token_ids)
    big = [segment(5), environment_segment(30_000)]
    item = Append(trajectory_id="e0-0.0", token_offset=0, segments=big)
    assert (await store.trajectories.append(mesh.session, [item]))[0].status == WriteStatus.SAVED
    assert (await store.trajectories.append(mesh.session, [item]))[0].status == WriteStatus.DUPLICATE
    chunks = await store.connection.command("KEYS", store.connection.keys.of("chunk", "*"))
    assert len(chunks) == 1
    assert await store.connection.command("TTL", chunks[0]) == -1
    await store.trajectories.release(mesh.session, ["e0-0.0"], "drained")
    partial = (await store.trajectories.lease(mesh.session, 1))[0].trajectory
    assert partial.response_token_count == 30_005
    assert np.array_equal(partial.segments[1].token_ids, big[1].token_ids)
    await store.leadership.evict(mesh.leader, ["e0-0"], "stale")
    assert await store.connection.command("KEYS", store.connection.keys.of("chunk", "*")) == []


async def test_a_trajectory_has_one_trace_for_its_whole_life(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1)
    first = [t.trajectory.traceparent for t in await store.trajectories.lease(mesh.session, 2)]
    assert len(set(first)) == 2
    assert all(re.fullmatch("00-[0-9a-f]{32}-[0-9a-f]{16}-01", trace) for trace in first)
    await store.trajectories.release(mesh.session, ["e0-0.0", "e0-0.1"], ReleaseReason.DRAINED)
    mesh.session = await store.sessions.open("another worker")
    again = await store.trajectories.lease(mesh.session, 2)
    assert [t.trajectory.traceparent for t in again] == first
    for leased in again:
        await mesh.complete(leased, float(leased.trajectory.member_index))
    await store.leadership.cut(mesh.leader, 1, ["e0-0"])
    batch = await mesh.claim(1)
    assert [t.traceparent for t in batch.groups[0].trajectories] == first


async def test_a_snapshot_rests_with_its_trajectory_until_that_is_scored(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1, leased=2)
    await mesh.append("e0-0.0", 0, 3)
    for snapshot in (b"older", b"newer\x00"):
        assert await store.trajectories.keep_snapshot(mesh.session, "e0-0.0", snapshot)
    stranger = await store.sessions.open("stranger")
    assert not await store.trajectories.keep_snapshot(stranger, "e0-0.0", b"stranger's")
    await store.trajectories.release(mesh.session, ["e0-0.0"], ReleaseReason.DRAINED)
    assert not await store.trajectories.keep_snapshot(mesh.session, "e0-0.0", b"late")
    assert [t.snapshot for t in await store.trajectories.lease(mesh.session, 1)] == [b"newer\x00"]
    await mesh.finish("e0-0.0", 3, 1)
    await store.sessions.close(mesh.session)
    mesh.session = stranger
    assert [t.snapshot for t in await store.trajectories.lease_scoring(stranger, 1)] == [b"newer\x00"]
    await mesh.score("e0-0.0", 1.0)
    assert not await store.connection.command("HEXISTS", store.connection.keys.of("trajectory", "e0-0.0"), "snapshot")
    await store.trajectories.lease(stranger, 1)
    await mesh.append("e0-0.1", 0, 3)
    await store.trajectories.keep_snapshot(stranger, "e0-0.1", b"of tokens that are gone")
    await store.trajectories.restart(stranger, ["e0-0.1"])
    assert not await store.connection.command("HEXISTS", store.connection.keys.of("trajectory", "e0-0.1"), "snapshot")
    assert await store.trajectories.keep_snapshot(stranger, "e0-0.1", b"of new tokens", incarnation=1)


async def test_the_mark_of_a_session_is_saved_with_the_tokens_before_it_or_not_at_all(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1, leased=1)
    stranger = await store.sessions.open("stranger", "here:1")
    key = store.connection.keys.of("trajectory", "e0-0.0")

    async def append(session: str, tokens: int, mark: bytes) -> WriteStatus:
        item = Append(
            trajectory_id="e0-0.0", token_offset=0, segments=[segment(tokens)], mark=(mark, "ses-1", "a name")
        )
        return (await store.trajectories.append(session, [item, item]))[0].status

    async def stored() -> list[bytes | None]:
        return list(await store.connection.command("HMGET", key, "tokens", "snapshot", "agent"))

    assert await append(stranger, 2, b"a stranger's") == WriteStatus.LOST
    assert await stored() == [b"0", None, None]
    assert await append(mesh.session, 2, b"first") == WriteStatus.SAVED
    assert await stored() == [b"2", b"first", b"ses-1"]
    assert await append(mesh.session, 3, b"of other tokens") == WriteStatus.REFUSED
    assert await append(mesh.session, 2, b"sent again") == WriteStatus.DUPLICATE
    assert await stored() == [b"2", b"sent again", b"ses-1"]
    found = [await store.sessions.find_agent(name) for name in ("ses-1", "a name")]
    assert [place is not None and place.lives for place in found] == [True, True]
    (other,) = await store.trajectories.lease(stranger, 1)
    with pytest.raises(Conflict, match="another session in progress has the name a name"):
        await store.trajectories.keep_snapshot(stranger, other.trajectory.trajectory_id, b"mark", "ses-2", "a name")
    assert await store.trajectories.keep_snapshot(stranger, other.trajectory.trajectory_id, b"mark", "ses-2", "mine")
    for address in ("here:1", ""):  # another process may have the address of one that is gone
        place = await store.sessions.find_agent("mine")
        assert place is not None and place.address == address
        await store.sessions.close(stranger)


async def test_a_snapshot_of_a_slow_step_is_not_stored_in_the_next_incarnation(store: TrajectoryStore) -> None:
    """The group began again during a step of the environment, and the same worker has leased the trajectory again."""
    mesh = await Mesh.start(store, groups=1)
    session = WorkerSession(store.sessions, "worker", 1.0, RolloutMetrics(Metrics("rollout")))
    await session.open()
    mesh.session = session.current
    (leased,) = await store.trajectories.lease(mesh.session, 1)
    slow = ActiveTrajectory(leased.trajectory, incarnation=leased.incarnation)
    await mesh.append(slow.trajectory_id, 0, 3)
    assert await store.trajectories.restart(mesh.session, [slow.trajectory_id]) == [1]
    saver, key = Saver(store.trajectories, session), store.connection.keys.of("trajectory", slow.trajectory_id)
    await saver.keep_snapshot(slow, b"of the first incarnation")
    assert not await store.connection.command("HEXISTS", key, "snapshot")
    slow.lose("its group began again")
    with pytest.raises(LetGo):
        await saver.keep_snapshot(slow, b"of the first incarnation")


@pytest.mark.parametrize("more", [0, 2])
async def test_a_save_whose_waiter_has_left_costs_the_trajectory_nothing(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch, more: int
) -> None:
    """The queue has the tokens, and the task that would have noted it is gone."""
    await Mesh.start(store, groups=1)
    session = WorkerSession(store.sessions, "worker", 1.0, RolloutMetrics(Metrics("rollout")))
    await session.open()
    (leased,) = await store.trajectories.lease(session.current, 1)
    append, saved, left = store.trajectories.append, asyncio.Event(), asyncio.Event()

    async def late(*call: Any) -> Any:
        answer = await append(*call)
        saved.set()
        await left.wait()
        return answer

    monkeypatch.setattr(store.trajectories, "append", late)
    active, saver = ActiveTrajectory(leased.trajectory), Saver(store.trajectories, session)
    active.add(segment(3))
    leaving = asyncio.create_task(saver.save(active))
    await saved.wait()
    await cancel_and_wait(leaving)
    left.set()
    active.add(segment(more, start=3))
    if more:
        await saver.save(active)
    await saver.finish(active, FinishReason.STOP)
    stored = (await read_truth(store)).members[active.trajectory_id]
    assert (stored.state, stored.digest) == ("finished", digest_of(active.segments, 3 + more))


BIG = 30_000
"""Tokens of a segment, or a prompt, over the limit for what travels inline."""


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


def same(ours: TeacherColumn | None, theirs: TeacherColumn) -> bool:
    return column_bytes(ours) == column_bytes(theirs)


async def finished(store: TrajectoryStore, tokens: int, **limits: object) -> Mesh:
    """One group of two finished answers."""
    mesh = await Mesh.start(store, groups=0 if limits else 1, **limits)
    if limits:
        new = replace(group(0), plan="{}")
        assert await store.leadership.admit(mesh.leader, [new], Cursor(), Cursor(index=1)) == 1
    await store.trajectories.lease(mesh.session, 2)
    for member in range(2):
        await mesh.finish(f"e0-0.{member}", 0, tokens)
    return mesh


@pytest.mark.parametrize(("tokens", "top_k"), [(3, 0), (5, 2), (40_000, 8)])
async def test_scores_of_any_size_reach_the_batch_and_are_gone_with_it(
    store: TrajectoryStore, tokens: int, top_k: int
) -> None:
    mesh = await finished(store, tokens)
    before = (await store.mesh.view()).saved_bytes_total
    scores = column(tokens, top_k)
    assert await mesh.score("e0-0.0", 1.0, scores) == WriteStatus.SAVED
    assert await mesh.score("e0-0.1", 0.0, scores) == WriteStatus.SAVED
    assert (await store.mesh.view()).saved_bytes_total - before == 2 * len(column_bytes(scores))
    await store.leadership.cut(mesh.leader, 1, ["e0-0"])
    batch = await mesh.claim(1)
    assert all(same(t.teacher, scores) for t in batch.groups[0].trajectories)
    (shown,) = [await store.inspection.inspect("e0-0.0")]
    assert shown is not None
    assert shown.trajectory is not None
    assert same(shown.trajectory.teacher, scores)
    await store.training.confirm_batch_file(mesh.trainer, 1, "d1")
    assert await store.connection.command("EXISTS", store.connection.keys.of("trajectory", "e0-0.0")) == 0


async def test_the_same_score_is_saved_once_and_other_scores_are_refused(store: TrajectoryStore) -> None:
    mesh = await finished(store, 5)
    scores = column(5)
    assert await mesh.score("e0-0.0", 1.0, scores) == WriteStatus.SAVED
    saved = (await store.mesh.view()).saved_bytes_total
    assert await mesh.score("e0-0.0", 1.0, scores) == WriteStatus.DUPLICATE
    assert await mesh.score("e0-0.0", 1.0) == WriteStatus.REFUSED
    assert await mesh.score("e0-0.0", 1.0, column(5, digest="cd" * 32)) == WriteStatus.REFUSED
    assert (await store.mesh.view()).saved_bytes_total == saved


async def test_the_scores_end_with_the_tokens_that_the_group_shaper_kept(store: TrajectoryStore) -> None:
    mesh = await finished(store, 5, has_rounds=True, keeps_history=True)
    scores = column(5, 2)
    for member in range(2):
        await mesh.score(f"e0-0.{member}", float(member), scores)
    (undecided,) = await store.rounds.undecided()
    assert await store.rounds.close(mesh.leader, undecided, [0.0, 1.0], [3, 5])
    await store.leadership.cut(mesh.leader, 1, ["e0-0"])
    short, whole = (t.teacher for t in (await mesh.claim(1)).groups[0].trajectories)
    assert short is not None
    assert short.logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert short.top_ids is not None
    assert short.top_logprobs is not None
    assert short.top_ids.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert short.top_logprobs.tolist() == [[-1.0, -2.0], [-2.0, -3.0], [-3.0, -4.0]]
    assert whole is not None
    assert np.array_equal(whole.logprobs, scores.logprobs)
