"""Measured times of the queue model: the moving averages of the store's ``lib/times.lua``."""

from __future__ import annotations

_UPDATE_WEIGHT = 0.25
_MOST_UPDATES = 1000


class ModelTimes:
    """Time of groups until they are ready, and time of the trainer for an update, in seconds."""

    def __init__(self, groups_per_batch: int) -> None:
        self._ready_weight = 1 / (2 * groups_per_batch)
        self._spent: float | None = None
        self._cut_at: float | None = None
        self._began: float | None = None
        self._announced_at = 0.0
        self.resumed_at = 0.0
        """Time at which the last pause ended; the driver sets it."""
        self.ready_seconds: float | None = None
        self.ready_updates: float | None = None
        self.update_seconds: float | None = None

    def ended(self, now: float, admitted_at: float | None) -> None:
        """Add the time of a group that ends; a group that began again has none."""
        if admitted_at is not None:
            self._spent = (self._spent or 0.0) + now - max(admitted_at, self.resumed_at)

    def ready(self) -> None:
        """Count the time since the last ready group for the group that becomes ready."""
        if self._spent is not None:
            self.ready_seconds = _average(self.ready_seconds, self._spent, self._ready_weight)
            if self.update_seconds:
                updates = min(self._spent // self.update_seconds, _MOST_UPDATES)
                self.ready_updates = _average(self.ready_updates, updates, self._ready_weight)
        self._spent = None

    def cut(self, now: float) -> None:
        """Note the time of a cut."""
        self._cut_at = now

    def trained(self) -> None:
        """Note the report of a trained batch; its update began after its cut and the announcement before it."""
        if self._cut_at is not None:
            self._began = max(self._cut_at, self._announced_at)

    def announced(self, now: float) -> None:
        """Note the announcement of a policy, which ends an update; that of a rollback has none to end."""
        if self._began is not None:
            self.update_seconds = _average(self.update_seconds, now - self._began, _UPDATE_WEIGHT)
        self._began, self._announced_at = None, now


def _average(before: float | None, sample: float, weight: float) -> float:
    return sample if before is None else before + weight * (sample - before)
