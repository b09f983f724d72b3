"""Operations of workers on the queue model: leases, saves, scores, forks, and what a worker gives back."""

from rollmesh.errors import SessionLost
from rollmesh.sim.queue_model.records import ModelMember, Save, ScoredSet, length_bucket
from rollmesh.sim.queue_model.state import QueueState
from rollmesh.types import TrajectoryState, WriteStatus

BYTES_PER_TOKEN = 8
"""Payload of a token where the driver does not state the bytes of a save: an int32 id and a float32 logprob."""
_MOST_WOKEN = 64
"""Most trajectories that one lease wakes; it then buries at most one."""
_LEASED, _FINISHED = TrajectoryState.LEASED, TrajectoryState.FINISHED


class WorkerOperations(QueueState):
    """The queue as workers use it; each operation is one script of the store."""

    def open_session(self, session: str) -> None:
        """Open a worker session under a name that no other session has had."""
        self.held[session] = set()

    def lease(self, session: str, limit: int) -> list[ModelMember]:
        """Lease up to ``limit`` trajectories within the pool: partial ones first, each queue in its order.

        A trajectory with too many leases without progress becomes a dead letter.
        """
        held = self._session(session)
        leased: list[ModelMember] = []
        if self.recovering or self.is_paused:
            return leased
        room = min(limit, self.leasable - self.leased)
        burials = 1 if room > 0 and self._wake() else self.most_burials
        burials -= self._lease_from(self.partial, session, room, burials, leased)
        self._lease_from(self.pending, session, room, burials, leased)
        held.update([member.trajectory_id for member in leased])
        self.totals["leases_total"] += len(leased)
        return leased

    def next_to_wake(self) -> str | None:
        """Return the trajectory that wakes next: it has rested under a policy before ``rest_before_step``."""
        name = self.resting.first()
        return name if name is not None and self.resting.score(name) < self.desired.rest_before_step else None

    def _wake(self) -> int:
        """Turn trajectories that rest no longer into partial ones; returns the number of these."""
        for woken in range(_MOST_WOKEN):
            if (name := self.next_to_wake()) is None:
                return woken
            self.move(self.members[name], TrajectoryState.PARTIAL)
        return _MOST_WOKEN

    def _lease_from(self, queue: ScoredSet, session: str, room: int, burials: int, leased: list[ModelMember]) -> int:
        """Lease from one queue; returns the number of dead letters, at most ``burials``."""
        buried = 0
        while len(leased) < room and buried < burials and (name := queue.first()) is not None:
            member = self.members[name]
            if member.tokens_at_lease in (member.tokens, None):
                if member.attempts >= self.limits.max_attempts:
                    self.end_without_score(member, TrajectoryState.DEAD)
                    buried += 1
                    continue
                member.attempts += 1
            else:
                member.attempts = 1
            self._take(member, session)
            leased.append(member)
        return buried

    def _take(self, member: ModelMember, session: str) -> None:
        self.move(member, _LEASED)
        member.session, member.tokens_at_lease = session, member.tokens
        if member.birth_version is None:
            member.birth_version = max(0, self.policy_version)

    def begin(self, session: str, trajectory_id: str, policy_version: int) -> WriteStatus:
        """Report the policy version of a first token that is saved later."""
        member = self._held(session, trajectory_id)
        if member is None or member.state is not _LEASED:
            return WriteStatus.LOST
        self.lower_step(member, self.version_steps[policy_version])
        return WriteStatus.SAVED

    def append(self, session: str, trajectory_id: str, save: Save, byte_count: int | None = None) -> WriteStatus:
        """Save tokens that follow those in the queue; a finished trajectory refuses them."""
        member = self._held(session, trajectory_id)
        if member is None:
            return WriteStatus.LOST
        if member.state is not _LEASED:
            return WriteStatus.REFUSED
        if not save.token_count:
            return WriteStatus.SAVED
        member.saves.append(save)
        member.tokens += save.token_count
        step, totals = self.version_steps[save.policy_version], self.totals
        if member.step is None or step < member.step:
            self.lower_step(member, step)
        totals["saved_tokens_total"] += save.token_count
        totals["saved_bytes_total"] += BYTES_PER_TOKEN * save.token_count if byte_count is None else byte_count
        return WriteStatus.SAVED

    def finish(self, session: str, trajectory_id: str, save: Save, byte_count: int | None = None) -> WriteStatus:
        """Save the last tokens, possibly none: leased -> finished."""
        status = self.append(session, trajectory_id, save, byte_count)
        if status is WriteStatus.SAVED:
            member = self.members[trajectory_id]
            self.move(member, _FINISHED)
            self.totals["finished_total"] += 1
            self.finished_lengths[length_bucket(member.tokens)] += 1
        return status

    def score(self, session: str, trajectory_id: str, reward: float | None, teacher: bytes = b"") -> WriteStatus:
        """Record an outcome, None for unscorable, and a teacher's scores; the last one ends the round of its group."""
        member = self.members.get(trajectory_id)
        if member is None or member.session != session:
            return WriteStatus.LOST
        if member.state in (TrajectoryState.SCORED, TrajectoryState.UNSCORABLE):
            before = member.reward if member.worker_reward is None else member.worker_reward
            return WriteStatus.DUPLICATE if (before, member.teacher) == (reward, teacher) else WriteStatus.REFUSED
        if member.state is not _FINISHED:
            return WriteStatus.REFUSED
        if self.is_gone(member.group):
            return WriteStatus.LOST
        member.reward, member.teacher = reward, teacher
        self.totals["saved_bytes_total"] += len(teacher)
        self.held[session].discard(trajectory_id)
        if reward is None:
            self.end_without_score(member, TrajectoryState.UNSCORABLE)
            return WriteStatus.SAVED
        self.move(member, TrajectoryState.SCORED)
        self.totals["scored_total"] += 1
        member.group.terminal += 1
        member.group.scored += 1
        member.group.scored_tokens += member.tokens
        self.settle(member.group)
        return WriteStatus.SAVED

    def release(self, session: str, trajectory_id: str, *, free_attempt: bool, rests: bool = False) -> bool:
        """Give a trajectory back: partial, resting, pending, or in the scoring queue; False if it is not held."""
        member = self._held(session, trajectory_id)
        if member is not None:
            self.held[session].discard(trajectory_id)
            self._give_back(member, free_attempt, rests)
        return member is not None

    def _give_back(self, member: ModelMember, free_attempt: bool, rests: bool = False) -> None:
        member.session = None
        if self.is_gone(member.group):
            return
        if member.state is _FINISHED:
            member.scorings = max(0, member.scorings - 1) if free_attempt else member.scorings
            self.scoring.add(member.trajectory_id, member.order)
            return
        member.attempts = max(0, member.attempts - 1) if free_attempt else member.attempts
        waiting = TrajectoryState.RESTING if rests else TrajectoryState.PARTIAL
        self.move(member, waiting if member.tokens else TrajectoryState.PENDING)
        if member.step is not None and not member.tokens:
            member.step = None
            self.recompute_step(member.group)

    def _session(self, session: str) -> set[str]:
        if session not in self.held:
            raise SessionLost(f"session {session} is not open")
        return self.held[session]

    def _held(self, session: str, trajectory_id: str) -> ModelMember | None:
        return self.members[trajectory_id] if trajectory_id in self.held.get(session, ()) else None
