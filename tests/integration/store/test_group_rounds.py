"""Groups with rounds: the leader extends or closes a group whose round has ended, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from rollmesh.errors import Conflict, SessionLost
from rollmesh.group_outcome import GroupOutcome
from rollmesh.mesh import Cursor
from rollmesh.store import LeasedTrajectory, TrajectoryStore, WriteStatus
from rollmesh.types import FinishReason

from .store_mesh import Mesh, group, policy
from .stored_keys import read_truth


async def begin(store: TrajectoryStore, **changes: object) -> Mesh:
    return await Mesh.start(
        store, **{"has_rounds": True, "keeps_history": True, "most_members": 12, "max_staleness": 0, **changes}
    )


async def admit(mesh: Mesh, needed: int = 2, spare: int = 0, plan: str = "{}") -> str:
    """Open a group with rounds at the cursor."""
    before = await mesh.store.leadership.cursor()
    new = replace(group(before.index, needed, spare=spare), plan=plan)
    after = Cursor(index=before.index + 1)
    assert await mesh.store.leadership.admit(mesh.leader, [new], before, after) == 1
    return new.group_id


async def lease(mesh: Mesh, count: int = 64) -> list[LeasedTrajectory]:
    return await mesh.store.trajectories.lease(mesh.session, count)


async def complete(mesh: Mesh, *values: float | None) -> None:
    for leased, value in zip(await lease(mesh, len(values)), values, strict=True):
        await mesh.complete(leased, value)


async def undecided(mesh: Mesh) -> GroupOutcome:
    (found,) = await mesh.store.rounds.undecided()
    return found


async def fields_of(store: TrajectoryStore, group_id: str) -> set[str]:
    return {f.decode() for f in await store.connection.command("HKEYS", store.connection.keys.of("group", group_id))}


async def batch_of(mesh: Mesh, *group_ids: str) -> Sequence[tuple[str, int, float]]:
    await mesh.store.leadership.cut(mesh.leader, 1, list(group_ids))
    batch = await mesh.claim(1)
    trajectories = [t for each in batch.groups for t in each.trajectories]
    return [(t.trajectory_id, t.response_token_count, t.shaped_reward) for t in trajectories]


async def test_a_group_whose_round_has_ended_waits_open_until_it_is_extended_and_closed(store: TrajectoryStore) -> None:
    mesh = await begin(store)
    group_id = await admit(mesh)
    await complete(mesh, 1.0, 0.0)
    view = await store.mesh.view()
    assert (view.open_groups, view.undecided_groups, view.ready_groups, view.admitted_unconsumed) == (1, 1, 0, 1)
    found = await undecided(mesh)
    assert (found.group_id, found.round, found.launched, found.prompt_id) == (group_id, 0, 2, "0")
    assert [(m.member_index, m.round, m.outcome, m.token_count) for m in found.members] == [(0, 0, 1, 5), (1, 0, 0, 5)]
    assert await store.rounds.extend(mesh.leader, found, 4, 2, "{}")
    assert not await store.rounds.extend(mesh.leader, found, 4, 2, "{}"), "a retry launches nothing"
    assert not await store.rounds.close(mesh.leader, found), "a leader that was overtaken closes nothing"
    view = await store.mesh.view()
    assert (view.undecided_groups, view.pending) == (0, 2)
    assert (await read_truth(store)).problems == []
    await complete(mesh, 1.0, 1.0)
    second = await undecided(mesh)
    assert (second.round, [m.round for m in second.members]) == (1, [0, 0, 1, 1])
    assert await store.rounds.close(mesh.leader, second)
    assert not await store.rounds.close(mesh.leader, second)
    view = await store.mesh.view()
    assert (view.ready_groups, view.open_groups, view.undecided_groups) == (1, 0, 0)
    assert await batch_of(mesh, group_id) == [(f"{group_id}.{at}", 5, r) for at, r in enumerate((1.0, 0.0, 1.0, 1.0))]


async def test_a_group_of_a_batch_file_whose_round_ends_late_is_not_left_for_a_decision(store: TrajectoryStore) -> None:
    """The last score comes between the two scripts that apply a batch file."""
    mesh = await begin(store)
    group_id = await admit(mesh)
    first, last = await lease(mesh)
    await mesh.complete(first, 1.0)
    assert await mesh.finish(last.trajectory.trajectory_id, 0, 5) == WriteStatus.SAVED
    await store.connection.run("reassert_groups", mesh.trainer, 1, "digest", 1, group_id)
    assert await mesh.score(last.trajectory.trajectory_id, 0.0) == WriteStatus.SAVED
    assert (await store.mesh.view()).undecided_groups == 1
    await store.connection.run("forget_groups", mesh.trainer, group_id)
    assert (await store.mesh.view()).undecided_groups == 0


async def test_only_the_leader_decides_and_not_beyond_the_most_members(store: TrajectoryStore) -> None:
    mesh = await begin(store, most_members=3)
    await admit(mesh)
    await complete(mesh, 1.0, 0.0)
    found = await undecided(mesh)
    with pytest.raises(Conflict, match="2 more exceed the limit of 3"):
        await store.rounds.extend(mesh.leader, found, 4, 2, "{}")
    with pytest.raises(SessionLost):
        await store.rounds.extend("another", found, 3, 1, "{}")
    with pytest.raises(SessionLost):
        await store.rounds.close("another", found)
    with pytest.raises(Conflict, match="2 scored members, not 1"):
        await store.connection.run("close_group", mesh.leader, found.group_id, 0, 0, "1.0", "")
    assert (await store.mesh.view()).undecided_groups == 1
    assert await store.rounds.extend(mesh.leader, found, 3, 1, "{}")


async def test_a_trajectory_ends_at_its_kept_tokens_and_the_others_are_wasted(store: TrajectoryStore) -> None:
    mesh = await begin(store)
    group_id = await admit(mesh)
    await complete(mesh, 1.0, 1.0)
    await store.rounds.close(mesh.leader, await undecided(mesh), [1.0, 0.0], [5, 4])
    await store.leadership.cut(mesh.leader, 1, [group_id])
    batch = await mesh.claim(1)
    whole, cut = batch.groups[0].trajectories
    assert (whole.response_token_count, whole.cut_token_count, whole.finish_reason) == (5, 0, FinishReason.STOP)
    assert (cut.response_token_count, cut.cut_token_count, cut.finish_reason) == (4, 1, FinishReason.LENGTH)
    assert [len(s) for s in cut.segments] == [3, 1], "the second chunk of two tokens lost its last one"
    assert [s.behavior_logprobs is not None and len(s.behavior_logprobs) for s in cut.segments] == [3, 1]
    await store.training.confirm_batch_file(mesh.trainer, 1, "digest")
    await store.training.report_trained(mesh.trainer, 1)
    counts = await store.mesh.counts()
    assert (counts.dropped_tokens, counts.totals["shortened_total"]) == ({"shortened": 1}, 1)
    assert (await store.prompt_records.read(["0"]))["0"].token_sum == 10, "the history has the sampled lengths"


async def over_the_bound(mesh: Mesh) -> str:
    """A group in its second round, with tokens of policy 0, when the trainer is past them."""
    group_id = await admit(mesh, needed=2, plan='{"round": 0}')
    await complete(mesh, 1.0, 0.0)
    await mesh.store.rounds.extend(mesh.leader, await undecided(mesh), 5, 3, '{"round": 1}')
    await complete(mesh, 1.0, None, 1.0)
    await mesh.admit(1)
    for leased in (await lease(mesh))[1:]:
        await mesh.complete(leased, float(leased.trajectory.member_index))
    await mesh.train(1, ["e0-1"])
    await mesh.store.policies.announce(mesh.trainer, policy(1))
    return group_id


async def test_a_replayed_dead_letter_is_shaped_like_every_group(store: TrajectoryStore) -> None:
    mesh = await begin(store)
    await admit(mesh)
    first, _ = await lease(mesh)
    await store.trajectories.fail(mesh.session, [(first.trajectory.trajectory_id, "broke")])
    replay = await store.dead_letters.replay(first.trajectory.trajectory_id)
    assert await store.leadership.admit_replays(mesh.leader, 1) == 1
    for leased in await lease(mesh):
        if leased.trajectory.group_id == replay:
            assert leased.plan == {}
            await mesh.complete(leased, float(leased.trajectory.member_index))
    assert (await undecided(mesh)).group_id == replay


async def test_groups_of_a_run_without_rounds_have_no_field_and_no_key_more(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1)
    assert await fields_of(store, "e0-0") == {*("index", "needed", "launched", "scored", "terminal", "admitted_at")}
    first, second = await lease(mesh)
    assert (first.plan, second.plan) == ({}, {})
    await mesh.complete(first, 1.0)
    await mesh.complete(second, 0.0)
    added = await fields_of(store, "e0-0")
    assert not added & {"round", "closed", "first", "plan:0"}
    assert (await store.mesh.view()).ready_groups == 1
    assert await store.connection.command("EXISTS", store.connection.keys.single("undecided")) == 0
