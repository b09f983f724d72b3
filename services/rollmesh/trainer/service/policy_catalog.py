"""The policy versions of a run: train steps, verified folders, the KL reference, the base of adapters."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.describe import read_adapter_settings
from rollmesh.checkpoints.manifest import MANIFEST_FILE
from rollmesh.checkpoints.policies import VerifiedPolicy
from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.errors import CheckpointError, ConfigError, Reason
from rollmesh.runtime.logging import get_logger
from rollmesh.trainer.learner.frozen_policies import BASE_VERSION
from rollmesh.trainer.learner.method_binding import needs_reference
from rollmesh.trainer.learner.policy_state import adapter_identity
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import PolicyRecord


@dataclass(eq=False)
class PolicyCatalog:
    """Copy of the policy registry for the train step. Every rank has its own.

    The executor's thread reads it while policies are announced, so its mappings are replaced and never changed.
    """

    _checkpoints: CheckpointStore
    _records: dict[int, PolicyRecord] = field(default_factory=dict, init=False)
    _pruned: dict[int, int] = field(default_factory=dict, init=False)
    _verified: dict[int, VerifiedPolicy] = field(default_factory=dict, init=False)

    def update(self, records: Iterable[PolicyRecord]) -> None:
        """Add records of policies. Records are immutable."""
        self._records = self._records | {r.policy_version: r for r in records}

    def remember(self, train_steps: Mapping[int, int]) -> None:
        """Store the train steps of versions that wrote tokens of a batch. Their records may be pruned."""
        self._pruned = {**self._pruned, **train_steps}

    @property
    def remembered(self) -> Mapping[int, int]:
        """Train steps of the versions without a record."""
        return {version: step for version, step in self._pruned.items() if version not in self._records}

    @property
    def records(self) -> tuple[PolicyRecord, ...]:
        """All known policies, ascending by version."""
        return tuple(self._records[version] for version in sorted(self._records))

    @property
    def train_steps(self) -> Mapping[int, int]:
        """Train step of every known policy version."""
        return self.snapshot()[1]

    def snapshot(self) -> tuple[tuple[PolicyRecord, ...], Mapping[int, int]]:
        """Return all records and the train step of every known version, of one moment."""
        records = self.records
        return records, self._pruned | {record.policy_version: record.train_step for record in records}

    @property
    def newest(self) -> PolicyRecord | None:
        """Record with the highest version; None without records."""
        return self._records[max(self._records)] if self._records else None

    def version_of(self, train_step: int) -> int:
        """Return the newest version with this train step, or else the version that the next publication will have."""
        versions = [v for v, record in self._records.items() if record.train_step == train_step]
        return max(versions) if versions else max(self._records, default=-1) + 1

    def folder(self, policy_version: int) -> Path | None:
        """Return the folder of a version; None if unknown, pruned or rejected. Raises CheckpointError for an outage."""
        if policy_version not in self._records:
            return None
        try:
            return self.open(policy_version)
        except CheckpointError as error:
            if error.outside:
                raise
            get_logger("policy_catalog").warning(
                "policy_not_usable", policy_version=policy_version, reason=error.reason
            )
            return None

    def open(self, policy_version: int) -> Path:
        """Return the verified folder of a version; raise CheckpointError with the reason if there is none."""
        return self.policy(policy_version).folder

    def policy(self, policy_version: int) -> VerifiedPolicy:
        """Return a version, verified once while its folder stays; raise CheckpointError if there is none."""
        if policy_version not in (kept := self._kept()):
            record = self._records.get(policy_version)
            if record is None:
                raise CheckpointError(f"policy version {policy_version} is not registered", reason=Reason.MISSING)
            kept[policy_version] = self._checkpoints.open(record)
        self._verified = kept
        return kept[policy_version]

    def _kept(self) -> dict[int, VerifiedPolicy]:
        """Return the verified versions whose folders exist: the others were pruned."""
        return {v: p for v, p in self._verified.items() if (p.folder / MANIFEST_FILE).is_file()}

    def base(self, policy_version: int) -> PolicyRecord:
        """Return a version as the base of adapters; raise CheckpointError with the reason if it is damaged."""
        if policy_version not in self._kept() and policy_version in self._records:
            self._checkpoints.check_copy(self._records[policy_version])
        self.policy(policy_version)
        return self._records[policy_version]


def check_reference(algorithm: AlgorithmConfig, catalog: PolicyCatalog) -> None:
    """Raise ConfigError if the run file's reference is missing, CheckpointError if that cannot be told for now."""
    version, newest = algorithm.kl_reference_version, catalog.newest
    if not needs_reference(algorithm) or (newest is None and version == 0):
        return  # a new run publishes version 0 before it trains
    field = f"trainer.algorithm.kl_reference_version={version}"
    if newest is None or version > newest.policy_version:
        allowed = "a new run can use 0 only" if newest is None else f"the newest is {newest.policy_version}"
        raise ConfigError(f"{field}: this policy version is not published yet ({allowed})")
    try:
        catalog.open(version)
    except CheckpointError as error:
        if error.outside:
            raise
        kept = "version 0, the newest versions (checkpoints.keep_last) and the previous reference"
        raise ConfigError(f"{field}: {error}; the kept versions are {kept}") from error


def references_in_use(algorithm: AlgorithmConfig, checkpoints: CheckpointStore, committed_step: int) -> frozenset[int]:
    """Return the versions that must not be pruned: the run file's reference, and those of replayed steps."""
    found: set[int | None] = {algorithm.kl_reference_version} if needs_reference(algorithm) else set()
    for step in checkpoints.batch_steps():
        try:
            if step > committed_step:
                found.add(checkpoints.batch_footer(step).settings.kl_reference_version)
        except CheckpointError as error:
            if error.outside:  # the reference of this step would be pruned
                raise
            # The training loop rejects or rewrites the file when it reaches this step.
    return frozenset(version for version in found if version is not None)


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


def check_published(trainer: PolicyTrainer, catalog: PolicyCatalog) -> None:
    """Raise ConfigError if the newest policy is no adapter of the trainer's settings: no state may have told it."""
    newest = catalog.newest
    if newest is None or newest.policy_version == BASE_VERSION:
        return
    policy = catalog.policy(newest.policy_version)
    published = None if policy.base is None else adapter_identity(read_adapter_settings(policy.folder))
    trainer.tensors_to_fill({} if published is None else {"adapter": published})
