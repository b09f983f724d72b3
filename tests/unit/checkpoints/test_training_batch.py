"""A batch file that refers to groups of earlier ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.checkpoints.batches import ReplayDraw, batch_path
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.reasons import Reason
from rollmesh.errors import CheckpointError

from ...kit.checkpoint_samples import CURSOR, SECRET, make_batch, write_batch


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """A store whose second batch replays one group of the first."""
    store = CheckpointStore(tmp_path, SECRET)
    digest = write_batch(store, make_batch(1, ["e0-0", "e0-1"]), CURSOR)
    draw = ReplayDraw(
        share=0.34, by="uniform", batches=4, seed=0, max_staleness=4, first=1, sources={1: digest}, groups=[(1, "e0-1")]
    )
    write_batch(store, make_batch(2, ["e0-2", "e0-3"]), CURSOR, replay=draw)
    return store


def test_the_batch_of_a_step_has_the_replayed_groups_among_the_fresh_ones(store: CheckpointStore) -> None:
    batch = store.training_batch(2)
    assert [group.group_id for group in batch.groups] == ["e0-2", "e0-1", "e0-3"]
    assert batch.train_step == 2
    assert batch.groups[1].trajectories[0].trajectory_id == store.read_batch(1).groups[1].trajectories[0].trajectory_id


def test_the_file_has_the_fresh_groups_only(store: CheckpointStore) -> None:
    assert (
        [group.group_id for group in store.read_batch(2).groups] == store.batch_footer(2).group_ids == ["e0-2", "e0-3"]
    )
    assert [group.group_id for group in store.training_batch(1).groups] == ["e0-0", "e0-1"]


def test_a_step_whose_replayed_groups_are_gone_is_refused_with_the_file(store: CheckpointStore) -> None:
    path = batch_path(store.root, 1)
    path.unlink()
    with pytest.raises(
        CheckpointError, match=r"train step 2 replays groups of batch 1: .*00000001\.pb: missing"
    ) as caught:
        store.training_batch(2)
    assert caught.value.reason == Reason.MISSING
    write_batch(store, make_batch(1, ["e0-0", "e0-1"], seed=1), CURSOR)
    with pytest.raises(CheckpointError, match="batch 1, whose file has other trajectories now") as caught:
        store.training_batch(2)
    assert caught.value.reason == Reason.MISMATCH
