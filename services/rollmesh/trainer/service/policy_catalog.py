"""Catalog of the policy versions: their train steps, and verified folders of the versions that are kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import MANIFEST_FILE
from rollmesh.checkpoints.policies import BasePolicy, VerifiedPolicy
from rollmesh.checkpoints.reasons import Reason
from rollmesh.errors import CheckpointError
from rollmesh.runtime.logging import get_logger
from rollmesh.types import PolicyRecord


class PolicyCatalog:
    """Copy of the policy registry for the train step. Every rank has its own.

    The executor's thread reads it while policies are announced, so its mappings are replaced and never changed.
    """

    def __init__(self, checkpoints: CheckpointStore) -> None:
        self._checkpoints = checkpoints
        self._records: dict[int, PolicyRecord] = {}
        self._pruned: dict[int, int] = {}
        self._verified: dict[int, VerifiedPolicy] = {}
        self._log = get_logger("policy_catalog")

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
        """Return the verified folder of a version; None if it is unknown, pruned or rejected (logged).

        Raises CheckpointError if it cannot be read at the moment: the result would depend on the outage.
        """
        if policy_version not in self._records:
            return None
        try:
            return self.open(policy_version)
        except CheckpointError as error:
            if error.outside:
                raise
            self._log.warning("policy_not_usable", policy_version=policy_version, reason=error.reason)
            return None

    def open(self, policy_version: int) -> Path:
        """Return the verified folder of a version; raise CheckpointError with the reason if there is none."""
        return self.policy(policy_version).folder

    def policy(self, policy_version: int) -> VerifiedPolicy:
        """Return a verified version; raise CheckpointError with the reason if there is none.

        A version is verified once. Each call checks that its folder exists, because it may have been pruned since.
        """
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

    def base(self, policy_version: int) -> BasePolicy:
        """Return a version as the base of adapters; raise CheckpointError with the reason if it is damaged."""
        if policy_version not in self._kept() and policy_version in self._records:
            self._checkpoints.check_copy(self._records[policy_version])
        manifest = self.policy(policy_version).manifest
        return BasePolicy(record=self._records[policy_version], manifest=manifest)
