"""Named schedules from the literature, resolved to numbers.

preset        max_staleness  pool_size          admission    barrier  source
sync          0              B*n                batch        no       GRPO and PPO as usual: generate, wait, train
one_step_off  1              B*n                batch        no       asynchronous RLHF (arXiv 2410.18252): batch s+1 is
                                                                      generated while the trainer works on batch s
copris        4              ceil(1.5*B)*n      pool         no       CoPRIS (arXiv 2511.05589) without its stages:
                                                                      generation continues during the update
copris_paper  8              2*B*n              pool         yes      CoPRIS as published: its script runs 1024 requests
                                                                      for 64 * 8 samples a step; stages alternate
areal         4              B*n                concurrency  no       AReaL (arXiv 2505.24298): eta = 4 for code, 8 for
                                                                      maths; max_concurrent defaults to one batch

sync and one_step_off fix max_staleness: another value would be another schedule. CoPRIS itself bounds neither the
stages of a trajectory nor its staleness; rollmesh always has a bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.config.schedule import ScheduleConfig
from rollmesh.errors import ConfigError
from rollmesh.scheduling.resolved_schedule import AdmissionRule, OnStale, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class _Preset:
    admission: AdmissionRule
    max_staleness: int
    pool_batches: float
    """Default pool_size in batches, rounded up to whole groups."""
    barrier: bool = False
    fixed_staleness: bool = False


_PRESETS = {
    "sync": _Preset(admission=AdmissionRule.BATCH, max_staleness=0, pool_batches=1, fixed_staleness=True),
    "one_step_off": _Preset(admission=AdmissionRule.BATCH, max_staleness=1, pool_batches=1, fixed_staleness=True),
    "copris": _Preset(admission=AdmissionRule.POOL, max_staleness=4, pool_batches=1.5),
    "copris_paper": _Preset(admission=AdmissionRule.POOL, max_staleness=8, pool_batches=2, barrier=True),
    "areal": _Preset(admission=AdmissionRule.CONCURRENCY, max_staleness=4, pool_batches=1),
}


def resolve_schedule(config: ScheduleConfig, train_steps: int) -> Schedule:
    """Apply the overrides of ``config`` to its preset.

    Raises ConfigError if max_staleness contradicts the preset, or pool_size exceeds the most that the staleness bound
    admits: (max_staleness + 1) * groups_per_batch * group_size.
    """
    # docs/architecture.md: The staleness bound
    preset = _PRESETS[config.preset]
    batch, size = config.groups_per_batch, config.group_size
    staleness = preset.max_staleness if config.max_staleness is None else config.max_staleness
    if preset.fixed_staleness and staleness != preset.max_staleness:
        raise ConfigError(
            f"schedule.max_staleness={staleness}: schedule.preset={config.preset} is max_staleness="
            f"{preset.max_staleness} by definition; leave it null or take another preset (copris, areal)"
        )
    limit = (staleness + 1) * batch * size
    pool = config.pool_size
    if pool is None:
        pool = min(limit, -int(-preset.pool_batches * batch // 1) * size)
    if pool > limit:
        raise ConfigError(
            f"schedule.pool_size={pool} is above (max_staleness + 1) * groups_per_batch * group_size = "
            f"({staleness} + 1) * {batch} * {size} = {limit}: with schedule.max_staleness={staleness} the rest of the "
            "pool could never be filled; lower pool_size or raise max_staleness"
        )
    return Schedule(
        preset=config.preset,
        admission=preset.admission,
        groups_per_batch=batch,
        group_size=size,
        pool_size=pool,
        max_staleness=staleness,
        barrier=preset.barrier,
        on_stale=OnStale(config.on_stale),
        straggler_timeout_seconds=config.straggler_timeout_seconds,
        max_filtered_in_a_row=config.max_filtered_in_a_row or 10 * batch,
        train_steps=train_steps,
    )


def expected_staleness(schedule: Schedule) -> float:
    """Return the expected mean staleness, in train steps.

    By Little's law a trajectory stays in a full pool for pool_size / (B*n) train steps. The result is at most the
    bound, and 0 for max_staleness 0.
    """
    if schedule.max_staleness == 0:
        return 0.0
    return min(float(schedule.max_staleness), schedule.pool_size / (schedule.groups_per_batch * schedule.group_size))
