"""Published policy checkpoints, for re-scoring: verified folders, and a distinction of pruned and damaged ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.found_policies import UnsoundPolicy
from rollmesh.checkpoints.policies import VerifiedPolicy
from rollmesh.checkpoints.reasons import Reason
from rollmesh.errors import CheckpointError
from rollmesh.types import PolicyRecord


class PublishedPolicies:
    """Policy versions of a checkpoint store, checked against the registry if it is available."""

    def __init__(
        self,
        store: CheckpointStore,
        registry: Iterable[PolicyRecord] | None,
        train_steps: Mapping[int, int],
        keep_last: int | None,
    ) -> None:
        """Read the complete policies of ``store``.

        ``registry`` is None when the queue was unreachable; ``train_steps`` contains the train step of each version;
        ``keep_last`` is ``checkpoints.keep_last``, or None without a readable run file.
        """
        self._store = store
        self._keep_last = keep_last
        self._registry = None if registry is None else {record.policy_version: record for record in registry}
        self._train_steps = train_steps
        self._complete = _complete(store)

    def announced(self, version: int) -> bool | None:
        """Tell whether the registry contains the version and ``open`` compares digests; None without a registry."""
        return None if self._registry is None else version in self._registry

    def is_prunable(self, version: int) -> bool:
        """Tell whether the trainer prunes the version: at least ``keep_last`` newer versions exist."""
        newer = sum(other > version for other in _complete(self._store))
        return self._keep_last is not None and newer >= self._keep_last

    def open(self, version: int) -> VerifiedPolicy | None:
        """Return a verified version; None if it is missing.

        Raises CheckpointError for a damaged folder, or one that differs from the announcement in the registry.
        """
        announced, complete = (self._registry or {}).get(version), self._complete.get(version)
        record = announced or complete
        if record is not None:
            try:
                return self._store.open(record)
            except CheckpointError as error:
                # A folder that still exists was not pruned: one of its files is missing.
                if error.reason != Reason.MISSING or _complete(self._store).get(version) == record:
                    raise
        if complete is not None and announced is not None:
            raise CheckpointError(
                f"{complete.path} claims this version; the registry announced {announced.path}, which is missing",
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
