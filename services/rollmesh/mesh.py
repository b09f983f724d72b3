"""State of the mesh: the scheduler's input (``MeshView``), its decisions and the desired state (``Desired``).

Decisions are level-triggered: they depend on one consistent view, not on a history of events. A new leader therefore
needs no replay, and a crash at any moment loses nothing.
"""

from dataclasses import dataclass, field
from enum import StrEnum


class DropReason(StrEnum):
    """Reason for which a group leaves the queue untrained."""

    STALE = "stale"
    STRAGGLER_TIMEOUT = "straggler_timeout"
    RUN_COMPLETE = "run_complete"
    ROLLED_BACK = "rolled_back"
    TOO_FEW_SCORED = "too_few_scored"
    FILTERED_ALL_RIGHT = "filtered_all_right"
    FILTERED_ALL_WRONG = "filtered_all_wrong"


class WasteReason(StrEnum):
    """Reason, other than the drop of their group, for which saved tokens are never trained on."""

    UNSCORABLE = "unscorable"
    """Their member has no score."""
    DEAD = "dead"
    """Their member is a dead letter."""
    SURPLUS = "surplus"
    """Their member was cut off, because enough others are scored."""
    RESTARTED = "restarted"
    """Their group began again."""
    SET_ASIDE = "set_aside"
    """Their group waits to begin again."""
    SHORTENED = "shortened"
    """The group shaper ended their member before them."""


class WaitReason:
    """Reason that the next cut, or the admission of groups, waits for: ``format`` gives the text with its numbers."""

    RECOVERY = "workers to register again with the store"
    OLDER_PIN = "every generator is pinned to policy version {version}, older than the newest, {newest}"
    OPERATOR = "an operator to resume"
    LAUNCHER = "the launcher, which evaluates a policy version"
    BARRIER = "barrier: waiting for the policy of train step {step}"
    UNTRAINED_CUT = "the trainer: step {step} is cut and not trained yet"
    ROLLBACK = "the trainer: it drops the work of the branch that a rollback abandons"
    READY_GROUPS = "{missing} more ready groups of {batch}"
    STALE_GROUPS = "stale groups to leave before {missing} ready group(s) that are due"
    DUE_GROUPS = (
        "{missing} unfinished group(s) with tokens of train step {step} or older, which later steps could no longer "
        "train"
    )
    STORE_FULL = (
        "the store is full ({ratio:.0%} of maxmemory, including expected writes): raise store.maxmemory_bytes "
        "(embedded) or the server's maxmemory"
    )
    ADMISSION = "admission waits for {reason}"
    LONG_ROUND = "a long round"
    NEWER_POLICY = "the policy of a newer train step"
    MEMORY_USED = "memory of the store: {ratio:.0%} of maxmemory is used"
    MEMORY_PROMISED = "memory of the store: trajectories in flight may take the rest"
    TRAINER_PACE = "the trainer: its groups are on their way"
    WINDOW = "staleness capacity"
    LAST_GROUPS = "nothing: the remaining steps have their groups"
    POOL = "room in the pool"
    INITIAL_POLICY = "the trainer to publish the initial policy"
    GENERATOR = "a generator that serves"
    LEADER = "a rollout worker that leads the mesh"


@dataclass(frozen=True, slots=True, kw_only=True)
class CachePool:
    """Bound of an automatic pool by the generators' caches, as the leader last set it."""

    size: int
    """Trajectories."""
    since: float
    """Redis time of the last change or confirmation, in seconds."""
    preemptions: int
    """Preemptions of all generators until then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """State that workers and generators reconcile to; written by the leader only."""

    pool_size: int
    """Trajectories leased at once over the whole mesh, without those of ``most_waiting``."""
    most_waiting: int = 0
    """Trajectories leased beyond the pool while as many wait between two calls of a generator."""
    paused: bool = False
    """True to stop new leases; unfinished trajectories are saved as partial and released."""
    interrupt_below_version: int = 0
    """Policy version below which generators' calls are interrupted and continued on other generators."""
    start_at_version: int = 0
    """Oldest policy version on which a trajectory without tokens may start; workers read it after the lease. It ensures
    that the tokens of a slow generator can still be trained within the staleness bound. After a rollback the store
    raises it to the version announced by the rollback, so no token of the abandoned branch is trained on."""
    rest_before_step: int = 0
    """Train step of a policy before which trajectories no longer rest: one whose newest tokens are of an older policy
    continues."""
    reason: str = ""
    """Explanation of the pause."""
    waiting_for: str = field(default="", compare=False)
    """Reason that the next cut waits, for operators, as the leader last wrote it; workers do not depend on it."""
    registry_version: int = field(default=0, compare=False)
    """Version of the registry of generators, raised by every heartbeat of a generator; 0 before the first. It is read
    with the desired state, so that workers read records only after a change."""
    cache_pool: CachePool | None = None
    """State of an automatic pool; None with a fixed one, and before generators have reported their caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """Sums over the generators that serve, from their last heartbeats."""

    slots: int
    """Calls that they decode at once."""
    waiting: int
    """Calls that wait for a slot."""
    kv_token_capacity: int
    """Tokens that the key-value caches hold."""
    preemptions: int
    """Calls that lost their cache because it was full, since the generators started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """One admitted group that no batch has claimed."""

    group_id: str
    admission_index: int
    min_train_step: int | None
    """Smallest train_step among the policy versions whose tokens would be in the loss; None without tokens."""
    token_count: int = 0
    """Tokens of the scored trajectories of a ready group; 0 for an open one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshView:
    """Counts, and the groups that matter for the next decision, from one atomic read."""

    now: float
    """Redis time, seconds."""
    trained_step: int
    """Newest train step whose batch has been trained on."""
    cut_step: int
    """Newest train step whose batch has been cut; trained_step or trained_step + 1."""
    policy_version: int
    """Newest announced policy version; -1 before the first."""
    policy_train_step: int
    """Train step of that policy version."""
    admitted_unconsumed: int
    """Groups admitted and neither consumed, filtered, evicted nor dead (open, ready or cut)."""
    open_groups: int
    ready_groups: int
    listed: bool = True
    """True if single groups were read; otherwise ``ready`` and ``stalest_open`` are empty."""
    ready: tuple[GroupView, ...]
    """Ready groups in admission order, a bounded prefix (at least 2B), plus those with the smallest min_train_step."""
    stalest_open: tuple[GroupView, ...]
    """Open groups with the smallest min_train_step, a bounded prefix; those without tokens come last."""
    unclaimed_by_step: tuple[tuple[int, int], ...] = ()
    """(min_train_step, number of groups) over all open and ready groups with tokens, ascending; always complete."""
    ready_by_step: tuple[tuple[int, int], ...]
    """The same over the ready groups."""
    rolling_back: bool = False
    """True while a rollback drops the abandoned branch: nothing can be cut, and no ready group is listed."""
    pending: int
    """Trajectories never leased, or released without tokens."""
    partial: int
    """Partial trajectories: unfinished, with tokens, not leased."""
    resting: int = 0
    """Partial trajectories that wait for a policy after that of their newest tokens, not counted as partial."""
    leased: int
    """Unfinished trajectories leased by worker sessions."""
    waiting: int = 0
    """Those between two calls of a generator, as of the last heartbeats of the workers."""
    finished: int
    """Trajectories that wait for their reward."""
    memory_ratio: float
    """Redis used_memory, plus the expected writes of unfinished trajectories, over maxmemory; 0 without a limit."""
    used_memory_bytes: int = 0
    max_memory_bytes: int = 0
    """Redis maxmemory; 0 without a limit."""
    saved_bytes_total: int = 0
    """Payload bytes of all saves so far, and of the last snapshots of scored trajectories."""
    finished_total: int = 0
    """Trajectories finished so far."""
    mean_prompt_bytes: float = 0.0
    """Mean prompt size of the groups admitted so far; 0 before the first."""
    filtered_in_a_row: int
    """Zero-variance groups since the last ready one."""
    unscored_in_a_row: int = 0
    """Groups dropped for lack of two scored answers since the last group that had them."""
    blocked_by: str = ""
    """Name of the set of groups that blocks the cut (Decisions.blocked_by), as last stored by the leader."""
    blocked_since: float | None
    """Redis time since which that set blocks the cut; None if no set does."""
    registered_generators: int
    """Generators with a valid registration, whether they serve or load a policy."""
    pinned_version: int | None = None
    """Policy version that generators are pinned to; None without a pin."""
    pinned_instance: str = ""
    """Instance of the only pinned generator; empty if the pin applies to all of them."""
    desired: Desired = Desired(pool_size=0)
    """Stored desired state; an empty pool before the leader has written one."""
    ready_seconds: float | None = None
    """Seconds from the admission of groups, or the end of the last pause, until they end, per group that became ready:
    a moving average over about two batches, dropped groups included; None before the first ready group."""
    ready_updates: float | None = None
    """The same in whole updates of ``update_seconds``, each group rounded down; None before the first update."""
    update_seconds: float | None = None
    """Seconds of the trainer for an update, from the batch to the announcement of its policy, without the wait for the
    batch: a moving average over about four updates; None before the first."""
    engines: EngineLoad | None = None
    """Load of the generators; None without a serving one, and where the pool does not depend on it."""
    mean_cached_tokens: float | None = None
    """Mean length so far of a running trajectory, in tokens; None where the pool does not depend on it."""
    undecided_groups: int = 0
    """Open groups whose round has ended, and which the leader has neither extended nor closed."""
    aside_groups: int = 0
    """Groups that were set aside: without tokens, not counted as open or admitted, until they are recalled."""
    recalled_groups: int = 0
    """Groups recalled for batch cut_step + 1: above 0 during a long round."""
    aside: tuple[str, ...] = ()
    """Ids of the oldest groups that were set aside, a bounded prefix; empty if ``listed`` is False."""
    failure: str = ""
    """Failure of the run reported by the current leader; empty without one."""
    recovering: bool
    """True after a restore of Redis to an earlier state, until the workers have registered again: no admission, no cut,
    no reaping."""
    user_paused: bool
    """True while an operator has paused the run."""
    launcher_paused: bool = False
    """True while the launcher has paused the run for an evaluation."""
    is_complete: bool
    """True once the last train step of the run has been trained."""

    @property
    def unfinished(self) -> int:
        """Number of trajectories without their last token."""
        return self.pending + self.partial + self.resting + self.leased

    @property
    def leasable(self) -> int:
        """Number of trajectories that may be leased at once."""
        return self.desired.pool_size + self.beyond_pool

    @property
    def beyond_pool(self) -> int:
        """Number of trajectories that may be leased beyond the pool, because as many wait."""
        return min(self.waiting, self.desired.most_waiting)

    @property
    def older_pin(self) -> int | None:
        """Version below the newest that every generator is pinned to; None while one may serve the newest version."""
        if self.pinned_version is None or self.pinned_version >= self.policy_version:
            return None
        return None if self.pinned_instance and self.registered_generators > 1 else self.pinned_version

    @property
    def rests_until(self) -> str:
        """Condition that ends a recovery, or a pause by the operator or the launcher; empty while the mesh works."""
        if self.recovering:
            return WaitReason.RECOVERY.format()
        if self.user_paused:
            return WaitReason.OPERATOR.format()
        return WaitReason.LAUNCHER.format() if self.launcher_paused else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """One group to drop, with the reason for the ledger."""

    group_id: str
    reason: DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """Decisions of the leader for one view of the mesh."""

    desired: Desired
    admit_groups: int = 0
    """Groups to open now."""
    cut: tuple[str, ...] | None = None
    """Ordered group ids of batch cut_step + 1; None if it cannot be cut yet."""
    evict: tuple[Eviction, ...] = ()
    restart: tuple[str, ...] = ()
    """Groups over the staleness bound that lose their tokens and begin again."""
    set_aside: tuple[str, ...] = ()
    """Groups over the staleness bound that lose their tokens and wait for a recall."""
    recall: int = 0
    """Groups that open again for batch cut_step + 1, the oldest ones that were set aside; counts the groups that were
    recalled for that batch before."""
    blocked_by: str = ""
    """Name of the set of groups that blocks the cut; empty if none does. The store keeps the time since which the name
    is the same."""
    fail: str = ""
    """Error that ends the run; empty without one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Next prompt to admit; durable, advanced only by the admit script."""

    epoch: int = 0
    index: int = 0


class ResumeOrder(StrEnum):
    """Order in which partial trajectories continue, within blocks of as many groups as a batch has."""

    ADMISSION = "admission"
    MOST_TOKENS = "most_tokens"
    """The most saved tokens first."""
    NEAREST_END = "nearest_end"
    """The fewest tokens to the mean length of the scored trajectories of its group first; then those without scored
    siblings, and those past that length."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLimits:
    """Fixed limits of a run, enforced by Redis scripts; a second start must use the same ones."""

    group_size: int
    groups_per_batch: int
    max_staleness: int
    max_attempts: int
    session_ttl_seconds: float
    filter_zero_variance: bool
    mask_old_segments: bool
    """True if stale tokens leave the loss instead of counting towards staleness."""
    train_steps: int
    keeps_history: bool = False
    """True to keep a record of every prompt, because a rule of the run reads it."""
    resume_order: ResumeOrder = ResumeOrder.ADMISSION
    window_groups: int = 0
    """Most groups admitted and not yet trained on; 0 for (max_staleness + 1) * groups_per_batch."""
    most_members: int = 0
    """Most trajectories of a group, replacements and forks included; 0 for twice the number of scored ones that
    complete it."""
    fixed_settings: tuple[tuple[str, str], ...] = ()
    """Settings of the schedule that are fixed for a run, in words: (name in the run file, value)."""
    has_rounds: bool = False
    """True if the leader decides at the end of a group's round, because the run has a planner or a group shaper."""
