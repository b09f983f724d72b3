"""Resource estimate of a run file, made before any process starts."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from rollmesh.config import RunConfig
from rollmesh.scheduling import OnStale, Schedule
from rollmesh.scheduling.memory import BYTES_PER_TOKEN, trajectory_bytes

_ADMISSION_SHARE = 0.8
"""Share of the Redis memory limit above which admission of new groups waits."""

_LATE_GROUPS = {
    OnStale.PACE: "late ones continue in the next wave",
    OnStale.MASK_OLD_SEGMENTS: "late ones continue, and their old tokens leave the loss",
    OnStale.EVICT: "late ones are dropped over the bound",
    OnStale.RESTART: "late ones lose their tokens and begin again",
    OnStale.SET_ASIDE: "late ones lose their tokens and wait for a long round",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Sizes computed from a run file."""

    pool_size: int
    """Trajectories in flight; the most of them with an automatic pool."""
    auto_pool: bool
    max_staleness: int
    trajectories_per_batch: int
    expected_staleness: float
    """In train steps: about pool_size / (B n); 1 with an automatic pool while groups are ready within an update."""
    capacity_groups: int
    """Groups admitted and not consumed, at most."""
    queue_bytes: int
    """Redis memory at full capacity with responses of maximum length."""
    queue_limit_bytes: int | None
    """Memory limit of the embedded server; None for an external server."""
    slot_count: int
    """Calls that all generators together decode at once."""
    surplus_share: float
    """Share of the launched trajectories that are cut off as spare members."""
    spare_groups: int
    """Groups open beyond those that a wave needs."""
    late_groups: str
    """Fate of the groups that a batch leaves behind over the staleness bound."""
    loss: tuple[str, str, str] | None
    """Row on the groups that lose their tokens over the staleness bound; None where none does."""
    segment_tokens: int
    """Tokens of one policy version after which a trajectory rests; 0 for no rest."""

    def table(self) -> Table:
        """Return the estimate as a table for the console."""
        table = Table("quantity", "value", "meaning")
        pool = f"auto, at most {self.pool_size}" if self.auto_pool else f"{self.pool_size}"
        table.add_row("pool_size", pool, "trajectories in flight over the whole mesh")
        table.add_row("generator slots", f"{self.slot_count}", "calls decoded at once; below pool_size, calls wait")
        table.add_row("max_staleness", f"{self.max_staleness}", "train steps, enforced")
        table.add_row("expected staleness", f"{self.expected_staleness:.2f}", f"train steps, {self._staleness_rule()}")
        table.add_row("batch", f"{self.trajectories_per_batch}", "trajectories per train step")
        if self.surplus_share:
            table.add_row("surplus", f"{self.surplus_share:.0%}", "of the launched trajectories, cut off unfinished")
        if self.spare_groups:
            table.add_row("spare groups", f"{self.spare_groups}", f"open beyond the wave; {self.late_groups}")
        if self.loss is not None:
            table.add_row(*self.loss)
        if self.segment_tokens:
            table.add_row("segment", f"{self.segment_tokens}", "tokens of one policy, then a rest until the next one")
        table.add_row("capacity", f"{self.capacity_groups}", "groups admitted and not yet trained, at most")
        table.add_row("queue memory", f"{self.queue_bytes / 2**20:.0f} MiB", self._memory_meaning())
        return table

    def _staleness_rule(self) -> str:
        if self.auto_pool:
            return "more where groups take longer than an update to be ready"
        return "about pool_size / (B n); near max_staleness where the trainer is the slower side"

    def _memory_meaning(self) -> str:
        meaning = "Redis, at capacity and full length, without snapshots of environments"
        if self.queue_limit_bytes is None:
            return meaning
        share = self.queue_bytes / self.queue_limit_bytes
        advice = "; above 80% admission waits: increase it" if share > _ADMISSION_SHARE else ""
        return f"{meaning}: {share:.0%} of store.maxmemory_bytes{advice}"


def estimate(config: RunConfig) -> Estimate:
    """Compute the estimate of ``config``. Raises ConfigError for an impossible schedule."""
    schedule = Schedule.from_config(config)
    longest = trajectory_bytes(schedule.longest_trajectory_tokens, schedule.partial_save_tokens)
    per_group = config.data.max_prompt_tokens * BYTES_PER_TOKEN + schedule.most_members * round(longest)
    return Estimate(
        pool_size=schedule.pool_size,
        auto_pool=schedule.auto_pool,
        max_staleness=schedule.max_staleness,
        trajectories_per_batch=schedule.groups_per_batch * schedule.group_size,
        expected_staleness=schedule.expected_staleness,
        capacity_groups=schedule.window_groups,
        queue_bytes=schedule.window_groups * per_group,
        queue_limit_bytes=config.store.maxmemory_bytes if config.store.url is None else None,
        slot_count=config.generator.replicas * config.generator.slots,
        surplus_share=schedule.spare_members / schedule.launched_members,
        spare_groups=schedule.spare_groups,
        late_groups=_LATE_GROUPS[schedule.on_stale],
        loss=_loss(schedule),
        segment_tokens=schedule.segment_tokens,
    )


def _loss(schedule: Schedule) -> tuple[str, str, str] | None:
    """Return the row on lost groups; the lost tokens follow from the lengths, which no run file has."""
    tokens = "the lost tokens: rollmesh sim RUN.yaml, column wasted"
    if schedule.on_stale is OnStale.EVICT:
        return "evicted", "depends on the lengths", f"groups over the staleness bound; {tokens}"
    if not schedule.most_begun_again:
        return None
    return "begun again", f"at most {schedule.most_begun_again:.2f}", f"times per trained group of a long run; {tokens}"
