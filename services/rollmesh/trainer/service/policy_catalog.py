"""Which policy versions exist, their train steps, and verified folders of those still kept."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import MANIFEST_FILE
from rollmesh.checkpoints.reasons import Reason
from rollmesh.errors import CheckpointError
from rollmesh.runtime.logging import get_logger
from rollmesh.types import PolicyRecord


class PolicyCatalog:
    """The registry as the train step sees it; every rank has its own copy."""

    def __init__(self, checkpoints: CheckpointStore) -> None:
        self._checkpoints = checkpoints
        self._records: dict[int, PolicyRecord] = {}
        self._pruned: dict[int, int] = {}
        self._verified: dict[int, Path] = {}
        self._log = get_logger("shelf")

    def update(self, records: Iterable[PolicyRecord]) -> None:
        """Learn of policies; records never change."""
        self._records |= {r.policy_version: r for r in records}

    def remember(self, train_steps: Mapping[int, int]) -> None:
        """Learn the train steps of versions that wrote tokens of a batch, though no record of them may be left."""
        self._pruned |= train_steps

    @property
    def remembered(self) -> Mapping[int, int]:
        """Train steps of versions of which no record is left."""
        return {version: step for version, step in self._pruned.items() if version not in self._records}

    @property
    def records(self) -> tuple[PolicyRecord, ...]:
        """All known policies, ascending by version."""
        return tuple(self._records[version] for version in sorted(self._records))

    @property
    def train_steps(self) -> Mapping[int, int]:
        """Train step of every known policy version."""
        return self._pruned | {version: record.train_step for version, record in self._records.items()}

    @property
    def newest(self) -> PolicyRecord | None:
        """The policy with the highest version."""
        return self._records[max(self._records)] if self._records else None

    def version_of(self, train_step: int) -> int:
        """The policy version that has this train step, or that it will get when it is published next."""
        versions = [v for v, record in self._records.items() if record.train_step == train_step]
        return max(versions) if versions else max(self._records, default=-1) + 1

    def folder(self, policy_version: int) -> Path | None:
        """Verified folder of a version; None when it is not known, pruned or refused (logged)."""
        if policy_version not in self._records:
            return None
        try:
            return self.open(policy_version)
        except CheckpointError as error:
            self._log.warning("policy_not_usable", policy_version=policy_version, reason=error.reason)
            return None

    def open(self, policy_version: int) -> Path:
        """Verified folder of a version; raises CheckpointError with the reason why there is none.

        Verified once and looked for each time: pruning takes what was verified before.
        """
        verified = self._verified.pop(policy_version, None)
        if verified is None or not (verified / MANIFEST_FILE).is_file():
            record = self._records.get(policy_version)
            if record is None:
                raise CheckpointError(f"policy version {policy_version} is not registered", reason=Reason.MISSING)
            verified = self._checkpoints.open(record).folder
        self._verified[policy_version] = verified
        return verified
