"""``rollmesh explain`` without a train step: where a trajectory or a group is."""

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmesh.config.store import StoreConfig
from rollmesh.errors import CheckpointError, DataError
from rollmesh.mesh import Cursor
from rollmesh.report.audit import open_checkpoints
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.trajectory_status import trajectory_statuses
from rollmesh.store import EmbeddedOptions, EmbeddedServer, TrajectoryStore
from rollmesh.types import Batch, OutcomeKind, RewardOutcome

from ..store.store_mesh import Mesh, group


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    server = EmbeddedServer(tmp_path / "redis", EmbeddedOptions(maxmemory_bytes=1 << 26))
    server.start()
    try:
        async with await TrajectoryStore.connect(StoreConfig(), run="explained", url=server.url) as store:
            yield await Mesh.start(store, keeps_history=True, has_rounds=True, most_members=4)
    finally:
        server.kill()


async def test_a_trajectory_is_found_in_the_queue_in_the_ledger_or_in_a_batch_file(mesh: Mesh, audited: Any) -> None:
    checkpoints, store = open_checkpoints(RecordedRun(audited.folder)), mesh.store

    async def lines(name: str) -> list[str]:
        return [status.line() for status in await trajectory_statuses(store, checkpoints, name)]

    trained, rewarded = checkpoints.batch_footer(4).group_ids[0], "outcome 1, which is its reward"
    assert await lines(f"{trained}.1") == [f"{trained}.1: cut, batch of train step 4; {rewarded}"]
    await store.training.reassert(mesh.trainer, 4, 4, [(4, checkpoints.batch_footer(4).group_ids)], [], Cursor())
    assert await lines(f"{trained}.1") == [f"{trained}.1: trained, batch of train step 4; {rewarded}"]
    assert await lines(trained) == [f"{trained}: trained, batch of train step 4"]
    # This queue has groups of these names too, and they come first.
    await mesh.admit(2)
    await store.trajectories.lease(mesh.session, 1)
    await mesh.append("e0-0.0", 0, 4)
    assert await lines("e0-0") == ["e0-0.0: leased, 4 tokens saved", "e0-0.1: pending, 0 tokens saved"]
    assert await lines("e0-0.1") == ["e0-0.1: pending, 0 tokens saved"]
    await store.leadership.evict(mesh.leader, ["e0-0"], "straggler_timeout")
    assert await lines("e0-0.0") == ["e0-0: dropped; reason straggler_timeout, 4 saved tokens of the group"]
    with pytest.raises(DataError, match="e7-9.0: neither in the queue, nor in a batch file"):
        await lines("e7-9.0")


async def test_a_trajectory_that_a_damaged_batch_file_may_have_is_not_called_unknown(mesh: Mesh, audited: Any) -> None:
    checkpoints = open_checkpoints(RecordedRun(audited.folder))
    lost, found = checkpoints.batch_footer(2).group_ids[0], checkpoints.batch_footer(1).group_ids[0]
    (path,) = (checkpoints.root / "batches").glob("*2.pb")
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(CheckpointError, match=re.escape(str(path))):
        await trajectory_statuses(mesh.store, checkpoints, f"{lost}.0")
    (status,) = await trajectory_statuses(mesh.store, checkpoints, f"{found}.0")
    assert status.train_step == 1


async def test_a_member_that_its_batch_does_not_have_is_not_called_trained(mesh: Mesh, audited: Any) -> None:
    def without_last(batch: Batch) -> Batch:
        first, *others = batch.groups
        return replace(batch, groups=(replace(first, trajectories=first.trajectories[:-1]), *others))

    audited.replace_batch(4, without_last)
    checkpoints = open_checkpoints(RecordedRun(audited.folder))
    name = checkpoints.batch_footer(4).group_ids[0]
    for member in (1, 99):
        (found,) = await trajectory_statuses(mesh.store, checkpoints, f"{name}.{member}")
        assert (found.state, found.train_step) == ("not trained", 4)
        assert "the batch has its group without it" in found.line()


async def test_a_dead_letter_is_found_before_the_drop_or_the_batch_of_its_group(mesh: Mesh, audited: Any) -> None:
    checkpoints, store = open_checkpoints(RecordedRun(audited.folder)), mesh.store
    assert "e0-0" in checkpoints.batch_footer(1).group_ids
    await mesh.admit(1)
    await store.trajectories.lease(mesh.session, 1)
    assert await store.trajectories.fail(mesh.session, [("e0-0.0", "no answer")]) == 1
    await store.leadership.evict(mesh.leader, ["e0-0"], "stale")
    (found,) = await trajectory_statuses(store, checkpoints, "e0-0.0")
    assert found.line() == "e0-0.0: dead; dead letter, reason no answer"
    for member in ("x", "", "\N{SUPERSCRIPT TWO}"):  # the number of a member has digits only
        with pytest.raises(DataError, match="names are <group> or <group>.<member>"):
            await trajectory_statuses(store, checkpoints, f"e0-0.{member}")


async def test_a_queued_trajectory_shows_its_round_and_its_reward_before_and_after_shaping(
    mesh: Mesh, audited: Any
) -> None:
    """The second round launches one more member, then the group shaper changes two rewards and one answer."""
    checkpoints, store = open_checkpoints(RecordedRun(audited.folder)), mesh.store

    async def histories() -> list[tuple[str, ...]]:
        return [found.history for found in await trajectory_statuses(store, checkpoints, "e0-0")]

    planned = replace(group(0), plan='{"hint": 0.5}')
    assert await store.leadership.admit(mesh.leader, [planned], Cursor(), Cursor(index=1)) == 1
    begun = 'launched in round 0 with the plan {"hint": 0.5}, its group '
    assert await histories() == [(f"{begun}is in round 0",)] * 2
    for item, value in zip(await store.trajectories.lease(mesh.session, 2), (1.0, 0.0), strict=True):
        await mesh.complete(item, value)
    waits = f"{begun}waits for the decision after round 0"
    assert await histories() == [(waits, "outcome 1, which is its reward"), (waits, "outcome 0, which is its reward")]
    (undecided,) = await store.rounds.undecided()
    assert await store.rounds.extend(mesh.leader, undecided, 3, 1, "{}")
    (third,) = await store.trajectories.lease(mesh.session, 2)
    assert (await histories())[2] == ("launched in round 1, its group is in round 1",)
    await mesh.complete(third, 1.0)
    (undecided,) = await store.rounds.undecided()
    assert await store.rounds.close(mesh.leader, undecided, [0.75, 0.0, 0.5], [5, 5, 2])
    closed = "its group is closed after round 1"
    assert await histories() == [
        (f'launched in round 0 with the plan {{"hint": 0.5}}, {closed}', "outcome 1, reward 0.75 after shaping"),
        (f'launched in round 0 with the plan {{"hint": 0.5}}, {closed}', "outcome 0, which is its reward"),
        (
            f"launched in round 1, {closed}",
            "outcome 1, reward 0.5 after shaping",
            "the group shaper left out its last 3 tokens",
        ),
    ]
    (last,) = await trajectory_statuses(store, checkpoints, "e0-0.2")
    assert (last.round, last.plan, last.outcome, last.reward) == (1, {}, 1.0, 0.5)
    await store.leadership.cut(mesh.leader, 1, ["e0-0"])
    (cut,) = await trajectory_statuses(store, checkpoints, "e0-0.2")
    assert (cut.train_step, cut.history) == (1, last.history)


async def test_a_trajectory_of_a_batch_file_shows_its_outcome_beside_its_reward(mesh: Mesh, audited: Any) -> None:
    def shaped(batch: Batch) -> Batch:
        first, *others = batch.groups
        member, *rest = first.trajectories
        right = RewardOutcome(kind=OutcomeKind.SCORED, value=1.0)
        changed = replace(member, outcome=right, shaped_reward=0.25, cut_token_count=7)
        return replace(batch, groups=(replace(first, trajectories=(changed, *rest)), *others))

    audited.replace_batch(4, shaped)
    checkpoints = open_checkpoints(RecordedRun(audited.folder))
    name = f"{checkpoints.batch_footer(4).group_ids[0]}.0"
    (found,) = await trajectory_statuses(mesh.store, checkpoints, name)
    assert (found.outcome, found.reward) == (1.0, 0.25)
    assert found.history == (
        "outcome 1, reward 0.25 after shaping",
        "the group shaper left out its last 7 tokens",
    )
