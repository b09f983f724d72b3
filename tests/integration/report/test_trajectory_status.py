"""``rollmesh explain`` without a train step: where a trajectory or a group is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollmesh.config.store import StoreConfig
from rollmesh.errors import DataError
from rollmesh.mesh import Cursor
from rollmesh.report.audit import open_checkpoints
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.trajectory_status import trajectory_statuses
from rollmesh.store import EmbeddedOptions, EmbeddedServer, TrajectoryStore
from rollmesh.types import Batch

from ..store.store_mesh import Mesh


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Mesh]:
    server = EmbeddedServer(tmp_path / "redis", EmbeddedOptions(maxmemory_bytes=1 << 26))
    server.start()
    try:
        async with await TrajectoryStore.connect(StoreConfig(), run="explained", url=server.url) as store:
            yield await Mesh.start(store)
    finally:
        server.kill()


async def test_a_trajectory_is_found_in_the_queue_in_the_ledger_or_in_a_batch_file(mesh: Mesh, audited: Any) -> None:
    checkpoints, store = open_checkpoints(RecordedRun(audited.folder)), mesh.store

    async def lines(name: str) -> list[str]:
        return [status.line() for status in await trajectory_statuses(store, checkpoints, name)]

    trained = checkpoints.batch_footer(4).group_ids[0]
    assert await lines(f"{trained}.1") == [f"{trained}.1: cut, batch of train step 4"]
    await store.training.reassert(mesh.trainer, 4, 4, [(4, checkpoints.batch_footer(4).group_ids)], [], Cursor())
    assert await lines(f"{trained}.1") == [f"{trained}.1: trained, batch of train step 4"]
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


@pytest.mark.parametrize("member", ["x", "", "\N{SUPERSCRIPT TWO}"])
async def test_the_number_of_a_member_has_digits_only(mesh: Mesh, audited: Any, member: str) -> None:
    checkpoints = open_checkpoints(RecordedRun(audited.folder))
    await mesh.admit(1)
    with pytest.raises(DataError, match="names are <group> or <group>.<member>"):
        await trajectory_statuses(mesh.store, checkpoints, f"e0-0.{member}")
