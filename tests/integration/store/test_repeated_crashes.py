"""Calls in a row that rely on one server, between two of which Redis comes back with an earlier state."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollmesh.errors import StoreUnavailable
from rollmesh.mesh import Cursor
from rollmesh.store import EmbeddedServer, TrajectoryStore

from .store_mesh import Mesh, policy

TTL = 60.0
"""Seconds of a session, and so of a recovery, that no machine that stalls exceeds."""


def as_it_is_now(server: EmbeddedServer, tmp_path: Path) -> Callable[[], None]:
    """Return a function that kills the server, which then comes back with the state that it has now."""
    files, older = server.folder / "appendonlydir", tmp_path / "older"
    shutil.copytree(files, older)

    def come_back() -> None:
        server.kill()
        shutil.rmtree(files)
        shutil.copytree(older, files)
        server.start()

    return come_back


@pytest.mark.parametrize("at", ["second group", "payload"])
async def test_a_claim_during_which_redis_comes_back_returns_no_mix_of_two_states(
    durable_server: EmbeddedServer,
    durable_store: TrajectoryStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    at: str,
) -> None:
    monkeypatch.setattr("rollmesh.store.limits.MAX_KEYS_PER_SCRIPT", 1)  # a call for each group
    monkeypatch.setattr("rollmesh.store.training._TOKENS_PER_CLAIM", 4 if at == "payload" else 1 << 15)
    mesh = await Mesh.start(durable_store, session_ttl_seconds=TTL)
    await mesh.admit(2)
    leased = await durable_store.trajectories.lease(mesh.session, 64)
    for item in leased[:-1]:
        await mesh.complete(item, float(item.trajectory.member_index))
    last = leased[-1].trajectory.trajectory_id
    await mesh.append(last, 0, 3)
    come_back = as_it_is_now(durable_server, tmp_path)
    await mesh.finish(last, 3, 2)
    await mesh.score(last, 1.0)
    await durable_store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])
    run, commands, reads = durable_store.connection.run, durable_store.connection.commands, Counter[str]()

    async def die_before_the_second_group(name: str, *arguments: Any) -> Any:
        reads[name] += 1
        if at == "second group" and name == "claim" and reads[name] == 2:
            come_back()
        return await run(name, *arguments)

    async def die_before_a_payload(batch: Any, label: str = "") -> Any:
        reads["payload"] += bool(batch)
        if at == "payload" and reads["payload"] == 2:
            come_back()
        return await commands(batch, label)

    monkeypatch.setattr(durable_store.connection, "run", die_before_the_second_group)
    monkeypatch.setattr(durable_store.connection, "commands", die_before_a_payload)
    with pytest.raises(StoreUnavailable, match="came back during a claim"):
        await durable_store.training.claim(mesh.trainer, 1, 1)


async def test_a_redis_that_dies_again_during_a_re_assertion_gets_all_of_it_again(
    durable_server: EmbeddedServer, durable_store: TrajectoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would count the steps as trained, and their groups, which it still has as ready, would be cut again."""
    mesh = await Mesh.start(durable_store, session_ttl_seconds=TTL)
    await mesh.admit(3)
    await mesh.complete_all()
    come_back = as_it_is_now(durable_server, tmp_path)
    await durable_store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])
    batch = await durable_store.training.claim(mesh.trainer, 1, 1)
    assert batch is not None
    await durable_store.training.confirm_batch_file(mesh.trainer, 1, "digest")
    await durable_store.training.report_trained(mesh.trainer, 1)
    run, crashes = durable_store.connection.run, ["once"]

    async def die_before_the_end(name: str, *arguments: str | int | float | bytes) -> Any:
        if name == "reassert_done" and crashes:
            crashes.pop()
            come_back()
        return await run(name, *arguments)

    come_back()
    monkeypatch.setattr(durable_store.connection, "run", die_before_the_end)
    assertion = (mesh.trainer, 0, 1, [(1, [g.group_id for g in batch.groups])], [policy(0)], Cursor(index=3))
    with pytest.raises(StoreUnavailable, match="came back again"):
        await durable_store.training.reassert(*assertion)
    assert (await durable_store.training.reassert(*assertion)).trained_step == 1
    assert [g.group_id for g in (await durable_store.mesh.view()).ready] == ["e0-2"]


async def test_a_redis_that_comes_back_before_it_has_the_outcomes_of_a_batch_file_takes_them_with_the_file(
    durable_server: EmbeddedServer, durable_store: TrajectoryStore, tmp_path: Path
) -> None:
    """Else it would take the groups, which it has as open, for ones that end again, and count them nowhere."""
    mesh = await Mesh.start(durable_store, session_ttl_seconds=TTL, keeps_history=True)
    await mesh.admit(2)
    come_back = as_it_is_now(durable_server, tmp_path)
    await mesh.complete_all()
    await durable_store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])
    await durable_store.training.claim(mesh.trainer, 1, 1)
    outcomes = await durable_store.prompt_records.unsaved(mesh.trainer, 1)
    await durable_store.training.confirm_batch_file(mesh.trainer, 1, "digest")
    confirmed_by = await durable_store.recovery.server_run_id()
    come_back()
    with pytest.raises(StoreUnavailable, match="came back after the batch file"):
        await durable_store.prompt_records.save(mesh.trainer, 1, outcomes, confirmed_by)
    file = (1, ["e0-0", "e0-1"])
    await durable_store.training.reassert(mesh.trainer, 0, 0, [file], [policy(0)], Cursor(index=2), outcomes=[outcomes])
    await durable_store.prompt_records.save(mesh.trainer, 1, outcomes, await durable_store.recovery.server_run_id())
    records = await durable_store.prompt_records.read(["0", "1"])
    assert {prompt: record.groups for prompt, record in records.items()} == {"0": 1, "1": 1}
