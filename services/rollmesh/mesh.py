"""The mesh seen from above: what the scheduler reads (``MeshView``) and what everyone reconciles to (``Desired``).

Decisions are level-triggered: they depend on one consistent view, not on a history of events, so a new leader needs
no replay and a crash at any moment costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """State that workers and generators reconcile to; written by the leader only."""

    pool_size: int
    """Trajectories leased at once over the whole mesh."""
    paused: bool = False
    """No new leases, and running rollouts are parked as partial trajectories."""
    interrupt_below_version: int = 0
    """Calls on generators older than this policy version are interrupted and continued elsewhere."""
    start_at_version: int = 0
    """A trajectory without tokens starts on a generator at this policy version or a newer one, read after its lease:
    however far a generator lags, what it writes can still be trained within the staleness bound. After a rollback the
    store raises it to the version that the rollback announced: none of an abandoned branch is trained on."""
    reason: str = ""
    """Why the mesh is paused, for people."""
    registry_version: int = field(default=0, compare=False)
    """Version of the registry of generators, which every heartbeat of a generator raises; 0 before the first. Read with
    the desired state, so that workers read records only when there are new ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One admitted, unclaimed group."""

    group_id: str
    admission_index: int
    min_train_step: int | None
    """Smallest train_step among the policy versions whose tokens would be in the loss; None without tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshView:
    """Counts and the few groups that matter for the next decision; one atomic read."""

    now: float
    """Redis time, seconds."""
    trained_step: int
    """Newest train step whose batch has been trained on."""
    cut_step: int
    """Newest train step whose batch has been cut; trained_step or trained_step + 1."""
    policy_version: int
    """Newest announced policy version; -1 before the first."""
    policy_train_step: int
    """Its train step."""
    admitted_unconsumed: int
    """Groups admitted and neither consumed, filtered, evicted nor dead (open, ready or cut)."""
    open_groups: int
    ready_groups: int
    listed: bool = True
    """Whether the groups themselves were read; without them ``ready`` and ``stalest_open`` are empty."""
    ready: tuple[GroupView, ...]
    """Ready groups in admission order, a bounded prefix (at least 2B), plus those with the smallest min_train_step."""
    stalest_open: tuple[GroupView, ...]
    """Open groups with the smallest min_train_step, a bounded prefix; those without tokens come last."""
    unclaimed_by_step: tuple[tuple[int, int], ...] = ()
    """(min_train_step, groups) over all open and ready groups that have tokens, ascending: counts, never a prefix."""
    pending: int
    """Trajectories never leased, or back at their first token."""
    partial: int
    """Unfinished trajectories at rest."""
    leased: int
    """Trajectories held by worker sessions and not finished."""
    finished: int
    """Trajectories that wait for their reward."""
    memory_ratio: float
    """Redis used_memory, plus what unfinished trajectories may still write, over maxmemory; 0 without a limit."""
    used_memory_bytes: int = 0
    max_memory_bytes: int = 0
    """0 without a limit."""
    saved_bytes_total: int = 0
    """Payload of everything that was ever saved, and the last snapshots of scored trajectories."""
    finished_total: int = 0
    """Trajectories that ever finished."""
    mean_prompt_bytes: float = 0.0
    """Mean over the groups admitted so far; 0 before the first."""
    filtered_in_a_row: int
    """Zero-variance groups since the last ready one."""
    unscored_in_a_row: int = 0
    """Groups dropped for want of two scores since the last group that had them."""
    blocked_by: str = ""
    """Name of the set of groups that blocks the cut (Decisions.blocked_by), as the leader last stored it."""
    blocked_since: float | None
    """Redis time since when that set blocks the cut; None when nothing blocks."""
    registered_generators: int
    """Generators with a valid registration, whether they serve or load a policy."""
    desired: Desired = Desired(pool_size=0)
    """The desired state as it is stored; an empty pool before the leader has written one."""
    failure: str = ""
    """Why the current leader reported that the run cannot continue; empty while it can."""
    recovering: bool
    """Redis came back as an earlier state and is being re-registered: no admission, no cut, no reaping."""
    user_paused: bool
    """An operator paused the run."""
    launcher_paused: bool = False
    """The launcher paused the run, for an evaluation of its own."""
    trained_enough: bool
    """The last train step of the run has been trained."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """One group to drop, with the reason for the ledger."""

    group_id: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What the leader applies after one look at the mesh."""

    desired: Desired
    admit_groups: int = 0
    """Groups to open now."""
    cut: tuple[str, ...] | None = None
    """Ordered group ids of batch cut_step + 1; None while it cannot be cut."""
    evict: tuple[Eviction, ...] = ()
    blocked_by: str = ""
    """Name of the set of groups that blocks the cut; empty when nothing blocks. The store keeps since when the name is
    the same."""
    waiting_for: str = ""
    """What the next cut waits for, in words."""
    fail: str = ""
    """Non-empty ends the run with this error."""

    @property
    def blocked(self) -> bool:
        """Whether unfinished groups block the cut."""
        return bool(self.blocked_by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Next prompt to admit: durable, advanced by the admit script only."""

    epoch: int = 0
    index: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Fixed limits of a run that Redis scripts enforce; a second start must bring the same ones."""

    group_size: int
    groups_per_batch: int
    max_staleness: int
    max_attempts: int
    session_ttl_seconds: float
    filter_zero_variance: bool
    mask_old_segments: bool
    """Stale tokens leave the loss instead of counting towards staleness."""
    train_steps: int
