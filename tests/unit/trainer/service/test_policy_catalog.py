"""Versions, references and replayed batches: what is gone, and what only cannot be read now."""

import gc
import weakref
from pathlib import Path

import pytest

from rollmesh.checkpoints.batches import BatchFooter, StoredBatch
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import Manifest
from rollmesh.checkpoints.policies import VerifiedPolicy
from rollmesh.config.old_logprob_methods import ReplayConfig
from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.errors import CheckpointError, ConfigError, Reason
from rollmesh.trainer.service.batch_source import ReplaySource
from rollmesh.trainer.service.policy_catalog import PolicyCatalog, check_reference, references_in_use
from rollmesh.trainer.service.trainer_progress import Progress
from rollmesh.types import PolicyRecord

from ....kit.checkpoint_samples import CURSOR, SECRET, make_batch, publish, write_batch


def test_a_version_that_was_verified_and_then_pruned_has_no_folder(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, SECRET)
    records = [publish(checkpoints, version) for version in range(3)]
    catalog = PolicyCatalog(checkpoints)
    catalog.update(records)
    verified = catalog.folder(1)
    assert verified.is_dir()
    checkpoints.prune(records, keep_last=1, keep_versions=(), session="abc")
    assert catalog.folder(1) is None
    assert catalog.folder(2) == checkpoints.open(records[2]).folder
    assert catalog.folder(7) is None


class AwayStore(CheckpointStore):
    """A store that refuses what it is asked for, for a reason while there is one."""

    reason: Reason | None = None

    def _refuse(self, what: str) -> None:
        if self.reason is not None:
            raise CheckpointError(f"{what}: no", reason=self.reason)

    def open(self, record: PolicyRecord, *, like: Manifest | None = None) -> VerifiedPolicy:
        self._refuse(record.path)
        return super().open(record, like=like)

    def stored_batch(self, train_step: int) -> StoredBatch:
        self._refuse(f"batch {train_step}")
        return super().stored_batch(train_step)

    def batch_footer(self, train_step: int) -> BatchFooter:
        self._refuse(f"batch {train_step}")
        return super().batch_footer(train_step)


@pytest.mark.parametrize("reason", [Reason.UNREACHABLE, Reason.DISK_FULL])
def test_a_version_that_cannot_be_read_at_the_moment_is_not_taken_for_one_that_is_gone(
    tmp_path: Path, reason: Reason
) -> None:
    store = AwayStore(tmp_path, SECRET)
    found = catalog(store, reason)
    with pytest.raises(CheckpointError) as caught:
        found.folder(0)
    assert caught.value.passing
    store.reason = Reason.TAMPERED
    assert found.folder(0) is None


def test_a_version_is_verified_once_while_it_stays(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, SECRET)
    catalog = PolicyCatalog(checkpoints)
    catalog.update([publish(checkpoints, 0)])
    folder = catalog.folder(0)
    (folder / "model.safetensors").write_bytes(b"changed")
    assert catalog.folder(0) == folder, "reading gigabytes again for every look-up would cost too much"
    assert PolicyCatalog(checkpoints).folder(0) is None


def test_the_catalog_holds_no_more_versions_than_the_store_keeps(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, SECRET)
    catalog = PolicyCatalog(checkpoints)
    held = []
    for version in range(6):
        catalog.update([publish(checkpoints, version)])
        held.append(weakref.ref(catalog.policy(version).manifest))
        checkpoints.prune(catalog.records, keep_last=2, keep_versions={0}, session="abc")
    catalog.policy(5)
    gc.collect()
    assert [version for version in range(6) if held[version]() is not None] == [0, 4, 5]


def test_versions_without_a_record_keep_their_train_step_but_are_not_known_as_policies(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, SECRET)
    catalog = PolicyCatalog(checkpoints)
    records = [publish(checkpoints, version) for version in range(2)]
    catalog.remember({9: 7, 0: records[0].train_step})
    catalog.update(records)
    assert catalog.train_steps == {9: 7} | {r.policy_version: r.train_step for r in records}
    assert catalog.remembered == {9: 7}
    assert catalog.records == tuple(records)


VERSIONS = dict.fromkeys(range(10), 0)
ALGORITHM = AlgorithmConfig(kl_coefficient=0.1, kl_reference_version=0)

TBA = AlgorithmConfig(advantage="tba", advantage_options={"beta": 0.01})


@pytest.fixture
def away(tmp_path: Path) -> AwayStore:
    """A store with version 0 and two batch files, each with two groups."""
    store = AwayStore(tmp_path, SECRET)
    for step in (1, 2):
        write_batch(store, make_batch(step, [f"e0-{2 * step}", f"e0-{2 * step + 1}"]), CURSOR, VERSIONS)
    return store


def catalog(store: AwayStore, reason: Reason) -> PolicyCatalog:
    found = PolicyCatalog(store)
    found.update([publish(store, 0)])
    store.reason = reason
    return found


@pytest.mark.parametrize("reason", [Reason.UNREACHABLE, Reason.DISK_FULL])
def test_a_store_that_is_unreachable_for_now_is_no_wrong_setting(away: AwayStore, reason: Reason) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_reference(ALGORITHM, catalog(away, reason))
    assert caught.value.reason == reason


@pytest.mark.parametrize("algorithm", [ALGORITHM, TBA])
def test_a_damaged_reference_is_a_wrong_setting_and_the_damage_is_named(
    away: AwayStore, algorithm: AlgorithmConfig
) -> None:
    with pytest.raises(
        ConfigError, match=r"kl_reference_version=0: policies/00000000-abc: no; the kept versions are version 0"
    ):
        check_reference(algorithm, catalog(away, Reason.TAMPERED))


def test_a_run_that_reads_no_reference_needs_none(away: AwayStore) -> None:
    check_reference(AlgorithmConfig(kl_reference_version=7), catalog(away, Reason.TAMPERED))


def test_the_references_in_use_are_unknown_while_a_batch_file_is_unreachable(away: AwayStore) -> None:
    away.reason = Reason.TORN
    assert references_in_use(ALGORITHM, away, 1) == {0}
    away.reason = Reason.UNREACHABLE
    with pytest.raises(CheckpointError, match="batch 2: no"):
        references_in_use(ALGORITHM, away, 1)


def source(store: CheckpointStore, batches: int = 4, max_staleness: int = 20) -> ReplaySource:
    config = ReplayConfig(batches=batches)
    return ReplaySource(config, store, PolicyCatalog(store), Progress(), 7, max_staleness)


def test_a_store_that_cannot_be_reached_ends_the_draw_and_never_changes_it(away: AwayStore) -> None:
    fresh, replay = make_batch(3, ["e0-6", "e0-7"]), source(away)
    away.reason = Reason.UNREACHABLE
    with pytest.raises(CheckpointError) as caught:
        replay.draw(fresh)
    assert caught.value.passing
    away.reason = None
    assert replay.draw(fresh) == source(away).draw(fresh)


def test_replayed_groups_that_cannot_be_reached_are_read_at_the_next_attempt(away: AwayStore) -> None:
    fresh = make_batch(3, ["e0-6", "e0-7"])
    write_batch(away, fresh, CURSOR, VERSIONS, replay=source(away).draw(fresh))
    stored, replay = away.stored_batch(3), source(away)
    away.reason = Reason.UNREACHABLE
    with pytest.raises(CheckpointError) as caught:
        replay.complete(stored)
    assert caught.value.passing
    away.reason = None
    assert len(replay.complete(stored).groups) == 4


def test_batches_that_the_staleness_bound_rules_out_are_not_read(away: AwayStore) -> None:
    draw = source(away, batches=4, max_staleness=1).draw(make_batch(3, ["e0-6", "e0-7"]))
    assert draw is not None and (draw.first, set(draw.sources)) == (2, {2})
