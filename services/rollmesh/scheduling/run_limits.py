"""Fixed limits of a run, from its run file; the first service that starts writes them to Redis."""

from __future__ import annotations

from rollmesh.config import RunConfig
from rollmesh.mesh import RunLimits
from rollmesh.scheduling.presets import resolve_schedule
from rollmesh.scheduling.resolved_schedule import OnStale


def run_limits(config: RunConfig) -> RunLimits:
    """Resolve the schedule and return the limits that the store enforces; ConfigError for an invalid schedule."""
    schedule = resolve_schedule(config.schedule, config.trainer.train_steps)
    return RunLimits(
        group_size=schedule.group_size,
        groups_per_batch=schedule.groups_per_batch,
        max_staleness=schedule.max_staleness,
        max_attempts=config.rollout.max_attempts,
        session_ttl_seconds=config.store.session_ttl_seconds,
        filter_zero_variance=config.schedule.filter_zero_variance,
        mask_old_segments=schedule.on_stale is OnStale.MASK_OLD_SEGMENTS,
        train_steps=schedule.train_steps,
    )
