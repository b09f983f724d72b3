"""Schedule section: admission, cut, and the effect of a new policy version on work in flight."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rollmesh.config.section import Section


class ScheduleConfig(Section):
    """A preset with overrides; ``scheduling/presets.py`` resolves the nulls."""

    preset: Literal["sync", "one_step_off", "copris", "copris_paper", "areal"] = "copris"
    """Named schedule of the literature."""
    groups_per_batch: int = Field(default=16, ge=1, le=2048)
    """B: groups that one train step consumes."""
    group_size: int = Field(default=8, ge=1, le=1024)
    """n: trajectories per group."""
    pool_size: int | None = Field(default=None, ge=1)
    """N': trajectories leased at once over the whole mesh; null uses the value of the preset."""
    max_staleness: int | None = Field(default=None, ge=0)
    """Largest staleness of a trained trajectory, in train steps; null uses the value of the preset."""
    on_stale: Literal["pace", "mask_old_segments", "evict"] = "pace"
    """Handling of a group that the next step would push over the bound. pace: it blocks the cut until it finishes;
    mask_old_segments: its old tokens leave the loss; evict: it is dropped (length bias; opt-in)."""
    straggler_timeout_seconds: float = Field(default=600.0, gt=0)
    """Time for which the same set of unfinished groups may block the next batch before they are evicted and counted. A
    set blocks when the batch must contain it (``pace``), or when the batch lacks groups, no group can be admitted, no
    trajectory waits for a lease or a reward, and part of the pool is idle. The time restarts with another set, and in
    the second case with every trajectory that ends; it does not count while no generator is registered."""
    filter_zero_variance: bool = False
    """Drop groups whose rewards are all equal; refunds their capacity."""
    max_filtered_in_a_row: int | None = Field(default=None, ge=1)
    """Number of consecutive filtered groups, or of consecutive groups without two scored answers, that ends the run
    with an error; null is 10 * groups_per_batch."""
