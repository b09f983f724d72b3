"""Folders of the policies that are still kept, as the train step asks for them."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pytest

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import Manifest
from rollmesh.checkpoints.policies import VerifiedPolicy
from rollmesh.checkpoints.reasons import Reason
from rollmesh.errors import CheckpointError
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.types import PolicyRecord

from ....kit.checkpoint_samples import SECRET, publish


def test_a_version_that_was_verified_and_then_pruned_has_no_folder(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, SECRET)
    records = [publish(checkpoints, version) for version in range(3)]
    catalog = PolicyCatalog(checkpoints)
    catalog.update(records)
    verified = catalog.folder(1)
    assert verified is not None
    assert verified.is_dir()
    checkpoints.prune(records, keep_last=1, keep_versions=(), session="abc")
    assert catalog.folder(1) is None
    assert catalog.folder(2) == checkpoints.open(records[2]).folder
    assert catalog.folder(7) is None


class AwayStore(CheckpointStore):
    """A store whose policies cannot be read at the moment."""

    reason = Reason.UNREACHABLE

    def open(self, record: PolicyRecord, *, like: Manifest | None = None) -> VerifiedPolicy:
        raise CheckpointError("not now", reason=self.reason)


@pytest.mark.parametrize("reason", [Reason.UNREACHABLE, Reason.DISK_FULL])
def test_a_version_that_cannot_be_read_at_the_moment_is_not_taken_for_one_that_is_gone(
    tmp_path: Path, reason: Reason
) -> None:
    checkpoints = AwayStore(tmp_path, SECRET)
    checkpoints.reason = reason
    catalog = PolicyCatalog(checkpoints)
    catalog.update([publish(checkpoints, 0)])
    with pytest.raises(CheckpointError) as caught:
        catalog.folder(0)
    assert caught.value.passing
    checkpoints.reason = Reason.TAMPERED
    assert catalog.folder(0) is None


def test_a_version_is_verified_once_while_it_stays(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, SECRET)
    catalog = PolicyCatalog(checkpoints)
    catalog.update([publish(checkpoints, 0)])
    folder = catalog.folder(0)
    assert folder is not None
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
