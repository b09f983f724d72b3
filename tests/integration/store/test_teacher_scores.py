"""A teacher's scores in the queue: saved with the outcome, once, and with the trajectory from there on."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rollmesh.mesh import Cursor
from rollmesh.store import TrajectoryStore, WriteStatus
from rollmesh.types import TeacherColumn

from .store_mesh import Mesh, column, column_bytes, group


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
