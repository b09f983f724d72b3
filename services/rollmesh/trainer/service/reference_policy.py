"""The reference policy of the KL term, and of advantages that read one.

It must exist before training starts, and it is never pruned.

The reference may change when the run is continued. A replayed step keeps the reference in its batch file.
"""

from __future__ import annotations

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.errors import CheckpointError, ConfigError
from rollmesh.trainer.learner.method_binding import needs_reference
from rollmesh.trainer.service.policy_catalog import PolicyCatalog


def check_reference(algorithm: AlgorithmConfig, catalog: PolicyCatalog) -> None:
    """Raise ConfigError if the run file's reference is missing; ``catalog`` has every published policy.

    Raises CheckpointError if the check is not possible now: the disk is full, or the object store is unreachable.
    """
    version, newest = algorithm.kl_reference_version, catalog.newest
    if not needs_reference(algorithm) or (newest is None and version == 0):
        return  # a new run publishes version 0 before it trains
    if newest is None or version > newest.policy_version:
        allowed = "a new run can use 0 only" if newest is None else f"the newest is {newest.policy_version}"
        raise _config_error(version, f"this policy version is not published yet ({allowed})")
    try:
        catalog.open(version)
    except CheckpointError as error:
        if error.outside:
            raise
        kept = "version 0, the newest versions (checkpoints.keep_last) and the previous reference"
        raise _config_error(version, f"{error}; the kept versions are {kept}") from error


def _config_error(version: int, problem: str) -> ConfigError:
    return ConfigError(f"trainer.algorithm.kl_reference_version={version}: {problem}")


def references_in_use(algorithm: AlgorithmConfig, checkpoints: CheckpointStore, committed_step: int) -> frozenset[int]:
    """Return the versions that must not be pruned: the run file's reference, and those of replayed steps."""
    found = {algorithm.kl_reference_version} if needs_reference(algorithm) else set()
    for step in checkpoints.batch_steps():
        if step > committed_step:
            found |= _reference_of_step(checkpoints, step)
    return frozenset(found)


def _reference_of_step(checkpoints: CheckpointStore, train_step: int) -> set[int]:
    try:
        version = checkpoints.batch_footer(train_step).settings.kl_reference_version
    except CheckpointError as error:
        if error.outside:  # the reference of this step would be pruned
            raise
        return set()  # the training loop rejects or rewrites the file when it reaches this step
    return set() if version is None else {version}
