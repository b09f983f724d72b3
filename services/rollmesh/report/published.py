"""The checkpoints that segments name: where they are, and whether one that cannot be opened was pruned or damaged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.policies import UnsoundPolicy
from rollmesh.checkpoints.reasons import Reason
from rollmesh.errors import CheckpointError
from rollmesh.types import PolicyRecord


class PublishedPolicies:
    """Every policy version of a checkpoint store, as the registry announced it where the registry is known."""

    def __init__(
        self,
        store: CheckpointStore,
        registry: Iterable[PolicyRecord] | None,
        train_steps: Mapping[int, int],
        keep_last: int | None,
    ) -> None:
        """``registry`` None: the queue was not reachable; ``train_steps`` has the train step of each version.

        ``keep_last`` is the run's ``checkpoints.keep_last``; None: the run file cannot be read.
        """
        self._store = store
        self._keep_last = keep_last
        self._registry = None if registry is None else {record.policy_version: record for record in registry}
        self._train_steps = train_steps
        self._complete = _complete(store)

    def announced(self, version: int) -> bool | None:
        """Tell whether the registry has the version, so that ``open`` compares digests; None without a registry."""
        return None if self._registry is None else version in self._registry

    def outlived(self, version: int) -> bool:
        """Tell whether the trainer prunes the version: so many newer ones are there as it keeps."""
        newer = sum(other > version for other in _complete(self._store))
        return self._keep_last is not None and newer >= self._keep_last

    def open(self, version: int) -> Path | None:
        """Return the verified folder of a version; None where it is gone.

        Raises CheckpointError for one that is damaged, or is not the one that the registry announced.
        """
        announced, found = (self._registry or {}).get(version), self._complete.get(version)
        record = announced or found
        if record is not None:
            try:
                return self._store.open(record).folder
            except CheckpointError as error:
                # A folder that is still there afterwards was not pruned: a file of it is missing.
                if error.reason != Reason.MISSING or _complete(self._store).get(version) == record:
                    raise
        if found is not None and announced is not None:
            raise CheckpointError(
                f"{found.path} claims this version; the registry announced {announced.path}, which is gone",
                reason=Reason.MISMATCH,
            )
        unsound = next((u for u in self._store.unsound_policies() if self._may_be(u, version, record)), None)
        if unsound is not None:
            raise CheckpointError(unsound.reason, reason=Reason.TAMPERED)
        return None

    def _may_be(self, unsound: UnsoundPolicy, version: int, record: PolicyRecord | None) -> bool:
        if record is not None:
            return unsound.path == record.path
        if unsound.policy_version is not None:
            return unsound.policy_version == version
        return unsound.train_step == self._train_steps.get(version)


def _complete(store: CheckpointStore) -> dict[int, PolicyRecord]:
    return {record.policy_version: record for record in store.complete_policies()}
