"""The policy version that the KL is measured against: it is there before anything is trained, and it stays.

It may change when the run is continued. A step that is replayed keeps the one that its batch file names.
"""

from __future__ import annotations

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.reasons import PASSING
from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.errors import CheckpointError, ConfigError
from rollmesh.trainer.service.policy_catalog import PolicyCatalog


def check_reference(algorithm: AlgorithmConfig, shelf: PolicyCatalog) -> None:
    """Raise ConfigError when the run file's reference is not there; ``shelf`` knows all that is published.

    CheckpointError when that cannot be told for now: the disk is full, or the object store does not answer.
    """
    version, newest = algorithm.kl_reference_version, shelf.newest
    if algorithm.kl_coefficient == 0 or (newest is None and version == 0):
        return  # a new run publishes version 0 before it trains
    if newest is None or version > newest.policy_version:
        there = "a new run can name 0 only" if newest is None else f"the newest is {newest.policy_version}"
        raise _refused(version, f"no such policy version is published yet ({there})")
    try:
        shelf.open(version)
    except CheckpointError as error:
        if error.reason in PASSING:
            raise
        kept = "version 0, the newest (checkpoints.keep_last) and what was the reference so far"
        raise _refused(version, f"{error}; kept are {kept}") from error


def _refused(version: int, problem: str) -> ConfigError:
    return ConfigError(f"trainer.algorithm.kl_reference_version={version}: {problem}")


def references_in_use(algorithm: AlgorithmConfig, checkpoints: CheckpointStore, committed_step: int) -> frozenset[int]:
    """Versions that must not be pruned: the run file's, and those of steps that are replayed."""
    found = {algorithm.kl_reference_version} if algorithm.kl_coefficient > 0 else set()
    for step in checkpoints.batch_steps():
        if step > committed_step:
            found |= _named_by(checkpoints, step)
    return frozenset(found)


def _named_by(checkpoints: CheckpointStore, train_step: int) -> set[int]:
    try:
        settings = checkpoints.batch_footer(train_step).settings
    except CheckpointError:
        return set()  # refused or made again when its turn comes
    return set() if settings is None or settings.kl_reference_version is None else {settings.kl_reference_version}
