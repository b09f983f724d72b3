"""The queue model with what no simulated mesh has: workers that fail or return, forks, slices, a rollback.

The state machine compares it with a real server, and the virtual mesh of the scheduler's tests runs on it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rollmesh.mesh import DropReason, RunLimits, WasteReason
from rollmesh.sim.queue_model import GroupState, ModelGroup, ModelMember, QueueModel, Save
from rollmesh.sim.queue_model.records import MOST_MEMBERS_AT_ONCE
from rollmesh.types import ForkStatus, TrajectoryState

_LEASED, _FINISHED = TrajectoryState.LEASED, TrajectoryState.FINISHED


class HeldSaves(NamedTuple):
    """A worker's memory of a trajectory: perhaps more than was saved, perhaps of another incarnation."""

    trajectory_id: str
    incarnation: int
    saves: tuple[Save, ...]


@dataclass(slots=True, eq=False)
class DroppedGroup:
    """A large group that has left the queue, and whose members are deleted in slices."""

    reason: str
    """Reason for the ledger; empty when a batch file has the group."""
    members: list[ModelMember]
    deleted: int = 0
    """Number of members deleted so far, from the first on."""


@dataclass(slots=True, eq=False)
class GroupReset:
    """A large group that begins again, and whose members are reset in slices, from the last one to the first."""

    group: ModelGroup
    reason: WasteReason
    left: int
    """Number of members to reset."""
    fresh: int
    """Unfinished members that it gets; the last ones beyond them are forgotten."""
    longest: int = 0


class WholeQueueModel(QueueModel):
    """Every transition of the store's scripts."""

    def __init__(self, limits: RunLimits) -> None:
        super().__init__(limits)
        self.half_gone: dict[str, DroppedGroup] = {}
        self.returning: dict[str, GroupReset] = {}

    def is_gone(self, group: ModelGroup) -> bool:
        """Tell whether the record of a group is deleted, or waits while its members are reset."""
        return super().is_gone(group) or group.group_id in self.returning

    def delete_members(self, group: ModelGroup, reason: str = "") -> None:
        """Delete the members of a group; those of a large group leave the queues now and are deleted in slices."""
        if self.returning.pop(group.group_id, None) is None and len(group.members) <= MOST_MEMBERS_AT_ONCE:
            super().delete_members(group, reason)
            return
        self.half_gone[group.group_id] = DroppedGroup(reason, group.members)
        for member in group.members:
            self.leave_queues(member)
        group.members = []

    def sweep(self, group_id: str, most: int) -> bool:
        """Delete a slice of the members of a large group that is gone; returns True while more of them are left."""
        gone = self.half_gone.get(group_id)
        if gone is None:
            return False
        for member in gone.members[gone.deleted : gone.deleted + most]:
            self.forget_member(member)
        gone.deleted += most
        if gone.deleted < len(gone.members):
            return True
        del self.half_gone[group_id]
        if gone.reason:
            self.note_drop(gone.members, gone.reason)
        return False

    def _reset(self, group: ModelGroup, reason: WasteReason, fresh: int, incarnation: int) -> None:
        if len(group.members) <= MOST_MEMBERS_AT_ONCE:
            super()._reset(group, reason, fresh, incarnation)
        else:
            self.returning[group.group_id] = GroupReset(group, reason, len(group.members), fresh)

    def sweep_returning(self, group_id: str, most: int) -> bool:
        """Continue the reset of a large group; returns True while another call is needed."""
        reset = self.returning.get(group_id)
        if reset is None:
            return False
        if reset.left:
            part = slice(max(0, reset.left - most), reset.left)
            longest = self._reset_members(reset.group, reset.reason, part, self._next_incarnation())
            reset.left, reset.longest = part.start, max(reset.longest, longest)
            return True
        if self._forget_last_members(reset.group, reset.fresh, most) == most:
            return True
        del self.returning[group_id]
        self._end_reset(reset.group, reset.reason, reset.longest)
        return False

    def heartbeat(self, session: str, waiting: int) -> None:
        """Note how many trajectories of a session wait between two calls of a generator."""
        self._session(session)
        self.waiting[session] = waiting

    def close_session(self, session: str, *, free_attempt: bool) -> None:
        """Close a session and give back what it holds; the attempts count unless ``free_attempt``."""
        del self.waiting[session]
        for trajectory_id in self.held.pop(session, set()):
            self._give_back(self.members[trajectory_id], free_attempt)

    def lease_scoring(self, session: str, limit: int) -> list[ModelMember]:
        """Lease finished trajectories without a worker; a dead letter after max_attempts of these leases."""
        held, leased, buried = self._session(session), list[ModelMember](), 0
        if self.recovering:
            return leased
        for _ in range(min(limit, len(self.scoring))):
            name = self.scoring.first()
            member = self.members[name] if name is not None else None
            if member is None or (member.scorings >= self.limits.max_attempts and buried >= self.most_burials):
                break
            self.scoring.discard(member.trajectory_id)
            if member.scorings < self.limits.max_attempts:
                member.scorings += 1
                member.session = session
                held.add(member.trajectory_id)
                leased.append(member)
            else:
                buried += 1
                member.attempts = member.scorings
                self.end_without_score(member, TrajectoryState.DEAD)
        return leased

    def restart(self, session: str, trajectory_id: str) -> int | None:
        """Drop the saved tokens of a leased trajectory; returns its incarnation, None if it is not held."""
        member = self._held(session, trajectory_id)
        if member is None or member.state is not _LEASED:
            return None
        if member.tokens:
            self.totals["restarts_total"] += 1
            self.totals["restarted_tokens_total"] += member.tokens
            member.incarnation += 1
            member.saves, member.tokens, member.step, member.tokens_at_lease = [], 0, None, None
            if not self.is_gone(member.group):
                self.recompute_step(member.group)
        return member.incarnation

    def fail(self, session: str, trajectory_id: str) -> bool:
        """Turn a held trajectory into a dead letter; False if it is not held."""
        member = self._held(session, trajectory_id)
        if member is None or self.is_gone(member.group):
            return False
        self.held[session].discard(trajectory_id)
        self.end_without_score(member, TrajectoryState.DEAD)
        return True

    def fork(self, session: str, trajectory_id: str) -> tuple[ForkStatus, ModelMember | None]:
        """Add a member to the group of a leased trajectory and lease it to the same session."""
        held, parent = self._session(session), self._held(session, trajectory_id)
        if parent is None or parent.state is not _LEASED:
            return ForkStatus.LOST, None
        if self.recovering or self.is_paused:
            return ForkStatus.PAUSED, None
        if self.leased >= self.leasable:
            return ForkStatus.POOL_FULL, None
        if self.is_gone(parent.group):
            return ForkStatus.LOST, None
        if len(parent.group.members) >= self.most_members(parent.group.needed):
            return ForkStatus.GROUP_FULL, None
        member = self.add_member(parent.group)
        member.attempts, member.is_fork = 1, True
        self._take(member, session)
        held.add(member.trajectory_id)
        self.totals["leases_total"] += 1
        self.totals["forks_total"] += 1
        return ForkStatus.FORKED, member

    def held_by(self, session: str) -> list[HeldSaves]:
        """Return the memory of a worker that has missed nothing, oldest group first."""
        held = sorted((self.members[name] for name in self._session(session)), key=lambda m: m.order)
        return [HeldSaves(m.trajectory_id, m.incarnation, tuple(m.saves)) for m in held if not self.is_gone(m.group)]

    def reregister(self, session: str, stated: Sequence[HeldSaves]) -> list[tuple[bool, int]]:
        """Register what a worker holds, and give back the rest; returns (kept, saved tokens) per trajectory.

        It keeps a trajectory only if the tokens in the queue are the first of those that it states.
        """
        held = self.held.setdefault(session, set())
        agreeing = {
            each.trajectory_id
            for each in stated
            if (member := self.members.get(each.trajectory_id)) is not None
            and member.incarnation == each.incarnation
            and each.saves[: len(member.saves)] == tuple(member.saves)
        }
        for name in held - agreeing:
            held.discard(name)
            self._give_back(self.members[name], free_attempt=True)
            self.totals["released_by_recovery_total"] += 1
        answers = []
        for each in stated:
            kept = each.trajectory_id in agreeing and self._keep(self.members[each.trajectory_id], session)
            self.totals["lost_by_recovery_total"] += not kept
            answers.append((kept, self.members[each.trajectory_id].tokens if kept else 0))
        return answers

    def _keep(self, member: ModelMember, session: str) -> bool:
        name = member.trajectory_id
        if member.session == session:
            return member.state in (_LEASED, _FINISHED)
        if member.state is _FINISHED and member.session is None:
            # A member of a half-deleted group is in no queue; the score of its worker is then refused.
            self.scoring.discard(name)
            member.session = session
        elif any(name in queue for queue in (self.pending, self.partial, self.resting)) and (
            self.recovering or self.leased < self.desired.pool_size + self.desired.most_waiting
        ):
            member.attempts = max(1, member.attempts)
            self._take(member, session)
            self.totals["reregistered_total"] += 1
        else:
            return False
        self.held[session].add(name)
        return True

    def roll_back(self) -> int:
        """Revert a cut without a batch file and drop all unclaimed groups; returns their number."""
        if self.batch and not self.batch_is_confirmed:
            for group in self.claim():
                self.move_group(group, GroupState.READY)
            self.batch, self.cut_step = (), self.trained_step
        unclaimed = [*self.groups[GroupState.OPEN].values(), *self.groups[GroupState.READY].values()]
        for group in unclaimed:
            self.drop(group, DropReason.ROLLED_BACK)
        return len(unclaimed)
