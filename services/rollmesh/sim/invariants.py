"""Promises of the scheduler and the queue, checked while a mesh runs.

The property tests of the scheduler and ``rollmesh sim --check`` use the same checks. Each raises InvariantBroken with
the promise, the value and the bound.
"""

import itertools
from collections import Counter
from collections.abc import Sequence

from rollmesh.errors import RollmeshError
from rollmesh.scheduling import AdmissionRule, OnStale, Schedule
from rollmesh.sim.queue_model import GroupState, ModelGroup, QueueModel
from rollmesh.sim.queue_model.records import TERMINAL
from rollmesh.types import TrajectoryState


class InvariantBroken(RollmeshError):
    """A promise of the scheduler or of the queue does not hold."""


class Invariants:
    """Observer of one mesh; it remembers the batches, because no group may be trained twice."""

    def __init__(self, schedule: Schedule, queue: QueueModel) -> None:
        self._schedule = schedule
        self._queue = queue
        self._trained: set[str] = set()

    def after_lease(self) -> None:
        """Check the pool in force after a lease of members; later an automatic pool may fall below what is leased."""
        queue, limit = self._queue, self._schedule.pool_size
        _at_most("schedule.pool_size: leased trajectories", queue.leased, min(limit, queue.desired.pool_size))

    def after_admission(self, admitted: int) -> None:
        """Check the window, the age of the policy of new groups, and the backlog that the admission rule allows."""
        schedule, queue = self._schedule, self._queue
        if admitted:
            age = queue.cut_step - queue.version_steps[-1]
            _at_most("schedule.max_staleness: staleness of a new group", age, schedule.max_staleness)
        _at_most("schedule.window_groups: groups in the queue", queue.admitted_unconsumed, schedule.window_groups)
        # A planner may launch more members of a group than the schedule knows of.
        members = queue.limits.most_members if queue.limits.has_rounds else schedule.launched_members
        unfinished = len(queue.pending) + len(queue.partial) + len(queue.resting) + queue.leased
        if admitted and schedule.admission is AdmissionRule.POOL:
            ahead = len(queue.groups[GroupState.READY]) + unfinished / members
            _at_most("groups of work ahead of the trainer", ahead, schedule.pool_groups + schedule.groups_per_batch)
        wave = schedule.wave_batches * schedule.groups_per_batch + schedule.spare_groups
        _at_most("unfinished trajectories", unfinished, schedule.pool_size + (wave + 2) * members)

    def sampled(self, version: int, floor: int) -> None:
        """Check a token of a trajectory that may only continue on versions from ``floor`` on."""
        if version < floor:
            raise InvariantBroken(f"a token of policy version {version} follows the version floor {floor}")

    def before_cut(self, group_ids: Sequence[str]) -> None:
        """Check a batch: its size, that no group was in a batch before, and the staleness of every saved token."""
        schedule, queue = self._schedule, self._queue
        if len(group_ids) != schedule.groups_per_batch:
            raise InvariantBroken(f"a batch of {len(group_ids)} groups, not {schedule.groups_per_batch}")
        if twice := self._trained.intersection(group_ids):
            raise InvariantBroken(f"groups trained twice: {sorted(twice)}")
        self._trained.update(group_ids)
        if schedule.on_stale is OnStale.MASK_OLD_SEGMENTS:
            return
        for group_id in group_ids:
            members = queue.groups[GroupState.READY][group_id].members
            scored = (member for member in members if member.state is TrajectoryState.SCORED)
            versions = {save.policy_version for member in scored for save in member.saves}
            most_members = max(queue.most_members(schedule.group_size), 2 * schedule.launched_members)
            _at_most(f"members of group {group_id}", len(members), most_members)
            age = queue.cut_step - min((queue.version_steps[version] for version in versions), default=queue.cut_step)
            _at_most(f"schedule.max_staleness: staleness of group {group_id}", age, schedule.max_staleness)

    def whole_queue(self) -> None:
        """Check that every group is in one state, and that the counters are those of the members; O(trajectories)."""
        queue = self._queue
        found = Counter(itertools.chain(queue.ended, *(groups for groups in queue.groups.values())))
        if twice := [group_id for group_id, count in found.items() if count > 1]:
            raise InvariantBroken(f"groups in two states: {sorted(twice)}")
        groups = [group for state, by_id in queue.groups.items() for group in by_id.values()]
        listed = [group for group in groups if group.state is not GroupState.ASIDE]
        states = Counter(member.state for group in listed for member in group.members)
        waiting = {
            TrajectoryState.PENDING: len(queue.pending),
            TrajectoryState.PARTIAL: len(queue.partial),
            TrajectoryState.RESTING: len(queue.resting),
        }
        if +states != +Counter({**queue.counts, **waiting}):
            raise InvariantBroken(
                f"members by state: {dict(states)}, but the counters are {dict(queue.counts)}, {waiting}"
            )
        for group in queue.undecided.values():
            _check_undecided(group)
        steps = Counter(g.step for g in listed if g.state is not GroupState.CUT and g.step is not None)
        if steps != +queue.unclaimed:
            raise InvariantBroken(
                f"groups by oldest train step: {dict(steps)}, but counted are {dict(queue.unclaimed)}"
            )


def _check_undecided(group: ModelGroup) -> None:
    """Check that a group that waits for a decision is open, without a member that may still change."""
    unfinished = [m.trajectory_id for m in group.members if m.state not in TERMINAL]
    if group.state is not GroupState.OPEN or not group.has_decisions or unfinished:
        raise InvariantBroken(f"undecided group {group.group_id}: {group.state}, unfinished members {unfinished}")


def _at_most(name: str, value: float, bound: float) -> None:
    if value > bound:
        raise InvariantBroken(f"{name}: {value:g}, above the bound of {bound:g}")
