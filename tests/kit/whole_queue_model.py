"""The queue model with the transitions that no simulated mesh takes: workers that fail, fork or return, a rollback.

The state machine compares it with a real server, and the virtual mesh of the scheduler's tests runs on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from rollmesh.mesh import DropReason
from rollmesh.sim.queue_model import GroupState, ModelMember, QueueModel, Save
from rollmesh.types import ForkStatus, TrajectoryState

_LEASED, _FINISHED = TrajectoryState.LEASED, TrajectoryState.FINISHED


class HeldSaves(NamedTuple):
    """A worker's memory of a trajectory: perhaps more than was saved, perhaps of another incarnation."""

    trajectory_id: str
    incarnation: int
    saves: tuple[Save, ...]


class WholeQueueModel(QueueModel):
    """Every transition of the store's scripts."""

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
