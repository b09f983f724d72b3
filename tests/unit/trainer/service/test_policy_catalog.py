"""The catalog of versions and the KL reference: what is gone, and what only cannot be read now."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import Manifest
from rollmesh.checkpoints.policies import VerifiedPolicy
from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.errors import CheckpointError, ConfigError, Reason
from rollmesh.trainer.service.policy_catalog import PolicyCatalog, check_reference, references_in_use
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


ALGORITHM = AlgorithmConfig(kl_coefficient=0.1, kl_reference_version=0)

TBA = AlgorithmConfig(advantage="tba", advantage_options={"beta": 0.01})


class Failing:
    """A checkpoint store that refuses for a reason."""

    def __init__(self, reason: Reason) -> None:
        self.reason = reason

    def open(self, record: PolicyRecord) -> Any:
        raise CheckpointError(f"{Path(record.path)}: no", reason=self.reason)

    def batch_steps(self) -> list[int]:
        return [1, 2]

    def batch_footer(self, train_step: int) -> Any:
        raise CheckpointError(f"batch {train_step}: no", reason=self.reason)


def catalog(reason: Reason) -> PolicyCatalog:
    found = PolicyCatalog(Failing(reason))  # type: ignore[arg-type]
    found.update([PolicyRecord(policy_version=0, train_step=0, path="policies/0", manifest_digest="00")])
    return found


@pytest.mark.parametrize("reason", [Reason.UNREACHABLE, Reason.DISK_FULL])
def test_a_store_that_is_unreachable_for_now_is_no_wrong_setting(reason: Reason) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_reference(ALGORITHM, catalog(reason))
    assert caught.value.reason == reason


@pytest.mark.parametrize("algorithm", [ALGORITHM, TBA])
def test_a_damaged_reference_is_a_wrong_setting_and_the_damage_is_named(algorithm: AlgorithmConfig) -> None:
    with pytest.raises(ConfigError, match=r"kl_reference_version=0: policies/0: no; the kept versions are version 0"):
        check_reference(algorithm, catalog(Reason.TAMPERED))


def test_a_run_that_reads_no_reference_needs_none() -> None:
    check_reference(AlgorithmConfig(kl_reference_version=7), catalog(Reason.TAMPERED))


def test_the_references_in_use_are_unknown_while_a_batch_file_is_unreachable() -> None:
    damaged: Any = Failing(Reason.TORN)
    assert references_in_use(ALGORITHM, damaged, 1) == {0}
    unreachable: Any = Failing(Reason.UNREACHABLE)
    with pytest.raises(CheckpointError, match="batch 2: no"):
        references_in_use(ALGORITHM, unreachable, 1)
