"""The base of a run's adapters: policy version 0, which every adapter of the run is trained and served above."""

from __future__ import annotations

from pathlib import Path

from rollmesh.checkpoints.adapter_settings import read_adapter_settings
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.reasons import Reason
from rollmesh.config import RunConfig
from rollmesh.config.model import AdapterConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.errors import CheckpointError, ConfigError
from rollmesh.trainer.learner.frozen_policies import BASE_VERSION
from rollmesh.trainer.service.policy_catalog import PolicyCatalog


def model_folder(config: RunConfig, checkpoints: CheckpointStore) -> Path:
    """Return the folder to load at startup: the verified version 0 for an adapter, once it is written, else model.path.

    So a model folder that changes during a run does not change the base. Raises CheckpointError if version 0 is
    damaged.
    """
    if config.model.adapter is None:
        return resolve_model(config.model.path)
    for record in checkpoints.complete_policies():
        if record.policy_version == BASE_VERSION:
            try:
                checkpoints.check_copy(record)
                return checkpoints.open(record).folder
            except CheckpointError as error:
                raise damaged_base(str(error), error.reason) from error
    for policy in checkpoints.unsound_policies():
        if policy.announced and policy.train_step == 0:
            raise damaged_base(f"{policy.path}: {policy.reason}", Reason.TORN)
    return resolve_model(config.model.path)


def damaged_base(problem: str, reason: str) -> CheckpointError:
    """Return the error of a base without which no generator can serve an adapter of the run."""
    return CheckpointError(
        f"policy version {BASE_VERSION}, the base of all adapters of the run: {problem}; restore its folder from a "
        "copy, or start a new run",
        reason=reason,
    )


def check_published(adapter: AdapterConfig, catalog: PolicyCatalog) -> None:
    """Raise ConfigError if the newest policy is no adapter of these settings, whose layers are by name.

    The launcher compares run files. This check covers trainers that are started without it.
    """
    newest = catalog.newest
    if newest is None or newest.policy_version == BASE_VERSION:
        return
    policy = catalog.policy(newest.policy_version)
    if policy.base is None:
        raise ConfigError(
            f"model.adapter: policy version {newest.policy_version} of this run has full weights; remove model.adapter "
            "to continue the run, or start a new run (another name and folder)"
        )
    found = read_adapter_settings(policy.folder)
    for name in ("rank", "alpha", "target"):
        published, configured = getattr(found, name), getattr(adapter, name)
        if published != configured:
            raise ConfigError(
                f"model.adapter.{name}={configured}: policy version {newest.policy_version} of this run has "
                f"{published}; set it as it was, or start a new run (another name and folder)"
            )
