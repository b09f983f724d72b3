"""The draw of replayed groups while the store of the batch files cannot be reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.checkpoints.batches import StoredBatch
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.config.old_logprob_methods import ReplayConfig
from rollmesh.errors import CheckpointError, Reason
from rollmesh.trainer.service.batch_source import ReplaySource
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.trainer.service.trainer_progress import Progress

from ....kit.checkpoint_samples import CURSOR, SECRET, make_batch, write_batch

VERSIONS = dict.fromkeys(range(10), 0)


class AwayStore(CheckpointStore):
    """A store that cannot be reached while ``away``."""

    away = False

    def stored_batch(self, train_step: int) -> StoredBatch:
        if self.away:
            raise CheckpointError("the store cannot be reached", reason=Reason.UNREACHABLE)
        return super().stored_batch(train_step)


@pytest.fixture
def store(tmp_path: Path) -> AwayStore:
    store = AwayStore(tmp_path, SECRET)
    for step in (1, 2):
        write_batch(store, make_batch(step, [f"e0-{2 * step}", f"e0-{2 * step + 1}"]), CURSOR, VERSIONS)
    return store


def source(store: CheckpointStore, batches: int = 4, max_staleness: int = 20) -> ReplaySource:
    config = ReplayConfig(batches=batches)
    return ReplaySource(config, store, PolicyCatalog(store), Progress(), 7, max_staleness)


def test_a_store_that_cannot_be_reached_ends_the_draw_and_never_changes_it(store: AwayStore) -> None:
    fresh, replay = make_batch(3, ["e0-6", "e0-7"]), source(store)
    store.away = True
    with pytest.raises(CheckpointError) as caught:
        replay.draw(fresh)
    assert caught.value.passing
    store.away = False
    assert replay.draw(fresh) == source(store).draw(fresh)


def test_replayed_groups_that_cannot_be_reached_are_read_at_the_next_attempt(store: AwayStore) -> None:
    fresh = make_batch(3, ["e0-6", "e0-7"])
    write_batch(store, fresh, CURSOR, VERSIONS, replay=source(store).draw(fresh))
    stored, replay = store.stored_batch(3), source(store)
    store.away = True
    with pytest.raises(CheckpointError) as caught:
        replay.complete(stored)
    assert caught.value.passing
    store.away = False
    assert len(replay.complete(stored).groups) == 4


def test_batches_that_the_staleness_bound_rules_out_are_not_read(store: AwayStore) -> None:
    draw = source(store, batches=4, max_staleness=1).draw(make_batch(3, ["e0-6", "e0-7"]))
    assert draw is not None and (draw.first, set(draw.sources)) == (2, {2})
