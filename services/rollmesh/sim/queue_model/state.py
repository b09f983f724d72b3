"""State of the queue model, and the transitions that operations share: groups settle, are dropped and deleted."""

from collections import Counter
from collections.abc import Sequence

from rollmesh.mesh import Desired, DropReason, RunLimits, WasteReason
from rollmesh.sim.queue_model.history import ModelHistory, ModelTimes
from rollmesh.sim.queue_model.listed_groups import ListedGroups
from rollmesh.sim.queue_model.records import (
    ENDED_WITHOUT_SCORE,
    MOST_MEMBERS_AT_ONCE,
    TERMINAL,
    GroupState,
    ModelGroup,
    ModelMember,
    ScoredSet,
    length_bucket,
    resume_place,
    start_place,
)
from rollmesh.types import TrajectoryState

_WAITING = (TrajectoryState.PENDING, TrajectoryState.PARTIAL, TrajectoryState.RESTING)
"""States of members that wait for a lease, each in a queue of its own."""
_QUEUED = (*_WAITING, TrajectoryState.FINISHED)
"""States of members that may be in a queue."""


class QueueState:
    """Groups, members, queues and counters of one run, and the transitions of groups.

    The driver owns the clock (``now``), the pauses, the memory figures and ``registered_generators``: it sets them.
    """

    def __init__(self, limits: RunLimits) -> None:
        self.limits = limits
        # Set by the driver.
        self.now = 0.0
        self.user_paused = self.launcher_paused = self.recovering = False
        self.failure = ""
        self.used_memory_bytes = self.max_memory_bytes = self.registered_generators = 0
        # Leader and trainer.
        self.desired = Desired(pool_size=0)
        self.blocked_by = ""
        self.blocked_since: float | None = None
        self.trained_step = self.cut_step = self.admitted = 0
        self.version_steps: list[int] = []
        """Train step of every announced policy version."""
        self.branch_version = self.rollback_count = 0
        """Version of the last rollback (no trajectory may start on an older one), and the rollbacks so far."""
        self.batch: tuple[str, ...] = ()
        """Groups of the cut that is not trained yet, in order."""
        self.batch_is_confirmed = False
        # Groups by state, each in the order in which the groups came into it.
        self.groups: dict[GroupState, dict[str, ModelGroup]] = {state: {} for state in GroupState}
        self.listed = {GroupState.OPEN: ListedGroups(), GroupState.READY: ListedGroups()}
        """Open and ready groups in the orders of the scheduler's view."""
        self.undecided: dict[str, ModelGroup] = {}
        """Open groups whose round has ended, and which the leader has neither extended nor closed."""
        self.recalled_for = self.recalled = 0
        """Train step of the newest recall, and the groups recalled for it."""
        self.history = ModelHistory()
        self.ended: dict[str, str] = {}
        """Reason by group that has left the queue ("consumed" once trained); the driver may clear it."""
        self.times = ModelTimes(limits.groups_per_batch)
        # Members.
        self.members: dict[str, ModelMember] = {}
        self.pending, self.partial, self.scoring, self.resting = (ScoredSet() for _ in range(4))
        """Resting: partial ones, waiting for a newer policy, by the train step of the policy of their newest tokens."""
        self._queues = dict(zip(_WAITING, (self.pending, self.partial, self.resting), strict=True))
        self.held: dict[str, set[str]] = {}
        """Leased and finished trajectories by worker session."""
        self.waiting: Counter[str] = Counter()
        """Trajectories between two calls of a generator by worker session, as of its last heartbeat."""
        # Counters.
        self.counts: Counter[TrajectoryState] = Counter()
        """Members by state, without those that wait."""
        self.filtered_in_a_row = self.unscored_in_a_row = 0
        self.totals: Counter[str] = Counter()
        self.drops: Counter[str] = Counter()
        """Dropped groups by reason."""
        self.dropped_tokens: Counter[str] = Counter()
        """Saved tokens that are never trained on, by reason."""
        self.drop_deciles: Counter[str] = Counter()
        """Dropped groups by ``<reason>:<length decile>``."""
        self.begun_again_deciles: Counter[str] = Counter()
        """Groups that began again by ``<reason>:<length decile>``."""
        self.surplus_deciles: Counter[str] = Counter()
        """Trajectories cut off by length decile."""
        self.finished_lengths: Counter[int] = Counter()
        """Finished trajectories by length bucket, floor(4 log2(tokens + 1))."""

    @property
    def policy_version(self) -> int:
        """Newest announced policy version; -1 before the first."""
        return len(self.version_steps) - 1

    @property
    def unclaimed(self) -> Counter[int]:
        """Number of open and ready groups with tokens, by their smallest train step."""
        return self.listed[GroupState.OPEN].steps + self.listed[GroupState.READY].steps

    @property
    def admitted_unconsumed(self) -> int:
        """Number of open, ready and cut groups."""
        return sum(len(groups) for state, groups in self.groups.items() if state is not GroupState.ASIDE)

    @property
    def recalled_groups(self) -> int:
        """Number of groups recalled for the next batch."""
        return self.recalled if self.recalled_for == self.cut_step + 1 else 0

    @property
    def leased(self) -> int:
        """Number of leased trajectories."""
        return self.counts[TrajectoryState.LEASED]

    @property
    def leasable(self) -> int:
        """Number of trajectories that may be leased at once: the pool, and beyond it as many as wait, up to a bound."""
        return self.desired.pool_size + min(self.waiting.total(), self.desired.most_waiting)

    @property
    def most_burials(self) -> int:
        """Most trajectories that one lease may turn into dead letters; each may drop its group."""
        members = min(MOST_MEMBERS_AT_ONCE, self.most_members(self.limits.group_size))
        return max(1, min(4, 400 // (2 * members + 15)))

    @property
    def is_paused(self) -> bool:
        """True while nothing may be leased."""
        return self.user_paused or self.launcher_paused or self.desired.paused

    @property
    def start_at_version(self) -> int:
        """Oldest policy version on which a trajectory without tokens may start."""
        return max(self.desired.start_at_version, self.branch_version)

    def most_members(self, needed: int) -> int:
        """Return the most members of a group, replacements and forks included."""
        return self.limits.most_members or 2 * needed

    def find_group(self, group_id: str) -> ModelGroup | None:
        """Return a group that is open, ready, cut or aside."""
        return next((groups[group_id] for groups in self.groups.values() if group_id in groups), None)

    def is_gone(self, group: ModelGroup) -> bool:
        """Tell whether the record of a group is deleted."""
        return group.group_id not in self.groups[group.state] or not group.members

    # -- members ---------------------------------------------------------------------------------------------------
    def add_member(self, group: ModelGroup) -> ModelMember:
        """Add a pending member to an open group."""
        number = len(group.members)
        member = ModelMember(group, f"{group.group_id}.{number}", number, incarnation=group.incarnation)
        group.members.append(member)
        self.members[member.trajectory_id] = member
        self._enter(member)
        return member

    def move(self, member: ModelMember, state: TrajectoryState) -> None:
        """Change the state of a member, with its queue or counter."""
        self._leave(member)
        member.state = state
        self._enter(member)

    def _enter(self, member: ModelMember) -> None:
        if member.state not in self._queues:
            self.counts[member.state] += 1
        elif member.state is TrajectoryState.PENDING:
            self.wait(member)
        elif member.state is TrajectoryState.PARTIAL:
            self.partial.add(member.trajectory_id, resume_place(member, self.limits))
        else:
            self.resting.add(member.trajectory_id, self.version_steps[member.saves[-1].policy_version])

    def _leave(self, member: ModelMember) -> None:
        if (queue := self._queues.get(member.state)) is None:
            self.counts[member.state] -= 1
        else:
            queue.discard(member.trajectory_id)

    def wait(self, member: ModelMember) -> None:
        """Queue a pending member."""
        self.pending.add(member.trajectory_id, start_place(member, self.limits))

    def leave_queues(self, member: ModelMember) -> None:
        """Take a member out of every queue."""
        if member.state in _QUEUED:
            for queue in (self.pending, self.partial, self.resting, self.scoring):
                queue.discard(member.trajectory_id)

    def forget_member(self, member: ModelMember) -> None:
        """Delete the record of a member, which may be held."""
        self._leave(member)
        if member.session is not None:
            self.held.get(member.session, set()).discard(member.trajectory_id)
        del self.members[member.trajectory_id]

    def end_without_score(self, member: ModelMember, state: TrajectoryState) -> None:
        """End a member as unscorable or dead: unless it is a fork, it is replaced while the group has room."""
        group = member.group
        self.move(member, state)
        self.totals[f"{state}_total"] += 1
        self.dropped_tokens[state] += member.tokens
        member.is_wasted = True
        if state is TrajectoryState.DEAD:
            member.session, member.step = None, None
        group.terminal += 1
        self.recompute_step(group)
        if not member.is_fork and len(group.members) < self.most_members(group.needed):
            self.add_member(group)
            self.totals["replacements_total"] += 1
        self.settle(group)

    # -- train steps of groups -------------------------------------------------------------------------------------
    def lower_step(self, member: ModelMember, step: int) -> None:
        """Note tokens of this train step in the loss."""
        if member.step is None or step < member.step:
            member.step = step
            group = member.group
            if (group.step is None or step < group.step) and not self.is_gone(group):
                self.set_step(group, step)

    def recompute_step(self, group: ModelGroup) -> None:
        """Recompute the step of a group after a member's tokens have left the loss."""
        steps = [m.step for m in group.members if m.step is not None and m.state not in ENDED_WITHOUT_SCORE]
        self.set_step(group, min(steps, default=None))

    def set_step(self, group: ModelGroup, step: int | None) -> None:
        """Set the step of a listed group; None for a group without tokens."""
        if step != group.step:
            self.listed[group.state].change_step(group, step)

    # -- groups ----------------------------------------------------------------------------------------------------
    def add_group(self, group: ModelGroup) -> None:
        """Add a group to those of its state."""
        self.groups[group.state][group.group_id] = group
        if group.state in self.listed:
            self.listed[group.state].enter(group)

    def _remove_group(self, group: ModelGroup) -> None:
        del self.groups[group.state][group.group_id]
        self.undecided.pop(group.group_id, None)
        if group.state in self.listed:
            self.listed[group.state].leave(group)

    def move_group(self, group: ModelGroup, state: GroupState) -> None:
        """Change the state of a group; the groups of a cut are claimed."""
        self._remove_group(group)
        group.state = state
        self.add_group(group)

    def settle(self, group: ModelGroup) -> None:
        """End the round of an open group once every member has ended.

        With spare members it ends once the needed ones are scored. A group with rounds then waits for the leader.
        """
        if group.spare and group.scored >= group.needed:
            self._cut_off_surplus(group)
        if group.terminal < len(group.members):
            return
        if group.has_decisions and group.scored >= min(2, group.needed):
            self.undecided[group.group_id] = group
        else:
            self.end_group(group)

    def end_group(self, group: ModelGroup) -> None:
        """End a group that gets no further member: it is ready, or dropped."""
        self.history.note(group, self.trained_step)
        self.times.ended(self.now, group.admitted_at)
        rewards = group.rewards
        if group.scored < min(2, group.needed):
            self.unscored_in_a_row += 1
            self.drop(group, DropReason.TOO_FEW_SCORED)
        elif self.limits.filter_zero_variance and min(rewards) == max(rewards):
            self.filtered_in_a_row += 1
            self.unscored_in_a_row = 0
            self.drop(group, DropReason.FILTERED_ALL_RIGHT if rewards[0] > 0 else DropReason.FILTERED_ALL_WRONG)
        else:
            self.filtered_in_a_row = self.unscored_in_a_row = 0
            self.times.ready()
            self.totals["groups_ready_total"] += 1
            self.move_group(group, GroupState.READY)

    def _cut_off_surplus(self, group: ModelGroup) -> None:
        """End the members that a group with spare ones no longer needs; their tokens are wasted."""
        for member in (m for m in group.members if m.state not in TERMINAL):
            self.leave_queues(member)
            if member.session is not None:
                self.held[member.session].discard(member.trajectory_id)
            self.move(member, TrajectoryState.SURPLUS)
            member.session, member.step, member.is_wasted = None, None, True
            self.totals["surplus_total"] += 1
            self.dropped_tokens[WasteReason.SURPLUS] += member.tokens
            self.surplus_deciles[str(self.length_decile(member.tokens))] += 1
            group.terminal += 1
        self.recompute_step(group)

    def drop(self, group: ModelGroup, reason: str) -> None:
        """Remove an open or ready group from the queue for a reason."""
        self._remove_group(group)
        self.ended[group.group_id] = reason
        self.drops[reason] += 1
        self.delete_members(group, reason)

    def delete_members(self, group: ModelGroup, reason: str = "") -> None:
        """Delete the members of a group, whose tokens are wasted if there is a reason: it was dropped."""
        members, group.members = group.members, []
        for member in members:
            self.leave_queues(member)
            self.forget_member(member)
        if reason:
            self.note_drop(members, reason)

    def note_drop(self, members: Sequence[ModelMember], reason: str) -> None:
        """Count the tokens of a dropped group, and the group by its length."""
        self.dropped_tokens[reason] += sum(m.tokens - m.wasted_tokens for m in members)
        self.drop_deciles[f"{reason}:{self.length_decile(max(m.tokens for m in members))}"] += 1

    def length_decile(self, tokens: int) -> int:
        """Return the decile of a length among the finished trajectories."""
        bucket, total = length_bucket(tokens), self.finished_lengths.total()
        below = sum(count for length, count in self.finished_lengths.items() if length < bucket)
        return min(9, 10 * below // total) if total else 0
