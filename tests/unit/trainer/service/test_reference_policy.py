"""The reference of the KL at the start of a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollmesh.checkpoints.reasons import Reason
from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.errors import CheckpointError, ConfigError
from rollmesh.trainer.service.policy_catalog import PolicyCatalog, check_reference, references_in_use
from rollmesh.types import PolicyRecord

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
