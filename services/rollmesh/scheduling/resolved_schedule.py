"""Resolved schedule: every number and rule that ``decide`` needs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class AdmissionRule(StrEnum):
    """Limit on open groups, within the staleness capacity."""

    BATCH = "batch"
    """One batch of groups at a time: the next B open after the last B are cut (and, at staleness 0, trained)."""
    POOL = "pool"
    """Enough groups for a full pool, with at most the pool and one batch of work ahead of the trainer (CoPRIS)."""
    CONCURRENCY = "concurrency"
    """At most pool_size / group_size open groups, no backlog (AReaL)."""


class OnStale(StrEnum):
    """Treatment of a group that the next train step would push over the staleness bound."""

    PACE = "pace"
    """The group blocks the cut until it finishes or is evicted after the straggler time-out."""
    MASK_OLD_SEGMENTS = "mask_old_segments"
    """Its old tokens leave the loss; the group neither blocks the cut nor is dropped."""
    EVICT = "evict"
    """The group is dropped once it exceeds the bound. This biases the lengths, so it is opt-in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """One preset with its overrides applied; B = groups_per_batch, n = group_size, N' = pool_size."""

    preset: str
    admission: AdmissionRule
    groups_per_batch: int
    group_size: int
    pool_size: int
    """Trajectories leased at once over the whole mesh."""
    max_staleness: int
    """Train steps between the oldest token in the loss and the trainer, at the optimizer step."""
    barrier: bool
    """True to stop generation from a cut until the policy trained on it is announced."""
    on_stale: OnStale
    straggler_timeout_seconds: float
    max_filtered_in_a_row: int
    """Zero-variance groups in a row that end the run; also the limit for groups without two scored answers."""
    train_steps: int
    """Batches of the whole run."""
    memory_limit_ratio: float = 0.8
    """Admission stops above this share of Redis's maxmemory."""
    longest_trajectory_tokens: int = 0
    """Most tokens of a trajectory beyond its prompt; 0 if unknown, and then only ``memory_ratio`` counts."""
    partial_save_tokens: int = 64
    """Tokens per partial save; each save takes some memory in addition."""

    @property
    def pool_groups(self) -> int:
        """Number of groups that fill the pool, rounded up."""
        return -(-self.pool_size // self.group_size)

    @property
    def capacity_groups(self) -> int:
        """Most groups that may be admitted and not yet trained on: (max_staleness + 1) * B."""
        return (self.max_staleness + 1) * self.groups_per_batch
