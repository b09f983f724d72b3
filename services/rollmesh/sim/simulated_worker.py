"""Workers of a simulated mesh, as one session: leases, calls, partial saves, finishes and scores."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from rollmesh.mesh import WasteReason
from rollmesh.sim.event_clock import EventClock
from rollmesh.sim.fleet import Fleet
from rollmesh.sim.invariants import Invariants
from rollmesh.sim.queue_model import ModelMember, QueueModel, Save
from rollmesh.sim.simulated_calls import GroupWork, SimulatedGenerator, SimulatedTrajectory
from rollmesh.types import TrajectoryState, WriteStatus

_SESSION = "worker"
NOTICE_SECONDS = 0.1
"""Time until workers have read a change of the registry of generators: changes of that time count together."""


class WaitingCalls:
    """Trajectories by call; their versions are counted, so that a look at them costs O(versions)."""

    def __init__(self) -> None:
        self._by_call: dict[int, SimulatedTrajectory] = {}
        self._versions: Counter[tuple[int, int]] = Counter()
        """Number of trajectories by floor and version; neither changes while a trajectory waits."""

    def __len__(self) -> int:
        return len(self._by_call)

    def add(self, trajectory: SimulatedTrajectory) -> None:
        """Let a trajectory wait behind the others."""
        self._by_call[trajectory.call] = trajectory
        self._versions[trajectory.floor, trajectory.version] += 1

    def discard(self, trajectory: SimulatedTrajectory) -> None:
        """Remove a trajectory if it waits."""
        if self._by_call.pop(trajectory.call, None) is None:
            return
        key = trajectory.floor, trajectory.version
        self._versions[key] -= 1
        if not self._versions[key]:
            del self._versions[key]

    def take_all(self) -> Iterator[SimulatedTrajectory]:
        """Return the trajectories in order; none waits any longer."""
        taken, self._by_call, self._versions = self._by_call, {}, Counter()
        return iter(taken.values())

    @property
    def lowest_floor(self) -> int:
        """Oldest version that may continue one of them; raises ValueError without a trajectory."""
        return min(floor for floor, _ in self._versions)

    @property
    def newest_version(self) -> int:
        """Newest version of their tokens; -1 without a token."""
        return max((version for _, version in self._versions), default=-1)


class SimulatedWorker:
    """The workers of the mesh. They have room for the whole pool, and react at once."""

    def __init__(
        self,
        clock: EventClock,
        queue: QueueModel,
        fleet: Fleet,
        *,
        segment_tokens: int,
        reward_time: Callable[[float, str, int], float],
        invariants: Invariants | None = None,
    ) -> None:
        """``reward_time(now, answer_id, incarnation)`` returns the time at which a reward is known."""
        self.works: dict[str, GroupWork] = {}
        """Work of the groups in the queue."""
        self.lost_tokens: Counter[str] = Counter()
        """Sampled tokens that never reached the queue, by reason."""
        self._clock = clock
        self._queue = queue
        self._fleet = fleet
        self._segment_tokens = segment_tokens
        self._reward_time = reward_time
        self._invariants = invariants
        self._active: dict[str, SimulatedTrajectory] = {}
        """Leased trajectories that are not finished."""
        self._waiting = WaitingCalls()
        self._has_scored = False
        self._unscored = 0
        """Scores under way."""
        self.rest_count = 0
        """Rests so far."""
        self._calls = itertools.count()
        self._placing = clock.alarm(self._place_waiting)
        queue.open_session(_SESSION)

    def react(self) -> bool:
        """Finish and lease what is due now; returns True if the queue has changed since the last time."""
        changed, self._has_scored = self._has_scored, False
        while True:
            finished = self._fleet.take_finished()
            for trajectory, tokens in finished:
                self._finish(trajectory, tokens)
            if self._waiting:
                self._notice(freed=bool(finished))
            if not self._lease() + len(finished):
                self._fleet.plan_events()
                return changed
            changed = True

    def progress(self, trajectory: SimulatedTrajectory, tokens: int, version: int) -> None:
        """Save the tokens of a call, counted from its start, all since the last save of one version."""
        name, queue = trajectory.member.trajectory_id, self._queue
        if self._active.get(name) is not trajectory:
            return
        if self._invariants is not None:
            self._invariants.sampled(version, max(trajectory.floor, trajectory.version))
        if new := tokens - trajectory.saved_in_call:
            if queue.append(_SESSION, name, Save(new, version)) is WriteStatus.SAVED:
                trajectory.saved_in_call, trajectory.version = tokens, version
        else:
            queue.begin(_SESSION, name, version)

    def waits_for_others(self) -> bool:
        """Tell whether a tool or a score is under way."""
        held = sum(each.generator is not None for each in self._active.values()) + len(self._waiting)
        return len(self._active) > held or bool(self._unscored)

    def unsaved_tokens(self) -> int:
        """Return the sampled tokens of running calls that are not in the queue."""
        held = (each for each in self._active.values() if each.generator is not None)
        finished = sum(tokens - each.saved_in_call for each, tokens in self._fleet.finished)
        return finished + sum(self._fleet.unsaved(each) for each in held)

    # -- leases and calls ------------------------------------------------------------------------------------------
    def _lease(self) -> int:
        queue = self._queue
        room = queue.leasable - queue.leased
        if room <= 0 or not (len(queue.pending) or len(queue.partial) or queue.next_to_wake()):
            return 0
        members = queue.lease(_SESSION, room)
        for member in members:
            self._take(member)
        if self._invariants is not None:
            self._invariants.after_lease()
        return len(members)

    def _take(self, member: ModelMember) -> None:
        queue = self._queue
        version = member.saves[-1].policy_version if member.saves else -1
        floor = version if member.saves else queue.start_at_version
        trajectory = SimulatedTrajectory(
            call=next(self._calls),
            member=member,
            work=self.works[member.group.group_id],
            floor=max(floor, queue.desired.interrupt_below_version),
            segment_tokens=self._segment_tokens,
            version=version,
        )
        self._active[member.trajectory_id] = trajectory
        self._call(trajectory)

    def _call(self, trajectory: SimulatedTrajectory) -> None:
        if not self._fleet.call(trajectory):
            self._waiting.add(trajectory)

    def _notice(self, *, freed: bool) -> None:
        """Plan to place waiting trajectories: now if calls have ended, soon if a generator has changed."""
        if not (freed or self._fleet.has_changed):
            return
        self._fleet.has_changed = False
        time = self._clock.now + (0.0 if freed else NOTICE_SECONDS)
        if time < self._placing.time:
            self._placing.set(time)

    def _place_waiting(self) -> None:
        """Place waiting trajectories in order, for each version floor as many as slots are free, at least one."""
        if not (self._waiting and self._fleet.serves(self._waiting.lowest_floor)):
            return
        left: dict[int, int] = {}
        for trajectory in self._waiting.take_all():
            floor = trajectory.floor
            if floor not in left:
                left[floor] = max(1, self._fleet.free_slots(floor))
            if left[floor] > 0 and self._fleet.call(trajectory):
                left[floor] -= 1
            else:
                left[floor] = 0
                self._waiting.add(trajectory)

    def require_versions(self) -> None:
        """Have a generator load a version that a waiting trajectory needs and none serves."""
        newest = self._waiting.newest_version
        if newest >= 0 and not self._fleet.serves(newest):
            self._fleet.require(newest)

    # -- stops -----------------------------------------------------------------------------------------------------
    def save(self, members: Iterable[ModelMember]) -> list[SimulatedTrajectory]:
        """Save the tokens of these members so far; returns those that are unfinished and held."""
        held = [self._active[m.trajectory_id] for m in members if m.trajectory_id in self._active]
        for trajectory in held:
            self._fleet.save(trajectory)
        return held

    def save_all(self) -> None:
        """Save the tokens of all trajectories so far."""
        self.save([trajectory.member for trajectory in self._active.values()])

    def drop(self, trajectories: Iterable[SimulatedTrajectory], reason: str) -> None:
        """Stop trajectories that the queue has taken away."""
        for trajectory in trajectories:
            self.lost_tokens[reason] += self._fleet.stop(trajectory)
            self._waiting.discard(trajectory)
            if self._active.get(trajectory.member.trajectory_id) is trajectory:
                del self._active[trajectory.member.trajectory_id]

    def give_back_all(self) -> None:
        """Save and release every unfinished trajectory, as at a pause."""
        held = self.save([trajectory.member for trajectory in self._active.values()])
        finished = {trajectory.call for trajectory, _ in self._fleet.finished}
        held = [trajectory for trajectory in held if trajectory.call not in finished]
        self.drop(held, "paused")
        for trajectory in held:
            self._queue.release(_SESSION, trajectory.member.trajectory_id, free_attempt=True)

    def lose_generator(self, generator: SimulatedGenerator, *, unsaved_tokens: int, reason: str) -> None:
        """End a generator; its calls continue elsewhere, without up to ``unsaved_tokens`` - 1 tokens each."""
        self._fleet.advance(generator)
        for trajectory in list(generator.calls.values()):
            tokens = generator.engine.progress(trajectory.call)
            kept = max(trajectory.saved_in_call, tokens - tokens % unsaved_tokens)
            if kept > trajectory.saved_in_call:
                self.progress(trajectory, kept, generator.version)
            self.lost_tokens[reason] += tokens - kept
        for trajectory in self._fleet.end(generator):
            trajectory.floor = max(trajectory.floor, trajectory.version)
            self._call(trajectory)

    # -- ends ------------------------------------------------------------------------------------------------------
    def _finish(self, trajectory: SimulatedTrajectory, tokens: int) -> None:
        name, rest = trajectory.member.trajectory_id, tokens - trajectory.saved_in_call
        if self._active.get(name) is not trajectory:
            self.lost_tokens["overtaken"] += rest
            return
        version = trajectory.finished_version
        if self._invariants is not None:
            self._invariants.sampled(version, max(trajectory.floor, trajectory.version))
        if rest < trajectory.remaining:
            self._end_call(trajectory, Save(rest, version))
            return
        del self._active[name]
        if not self._queue.finish(_SESSION, name, Save(rest, version)).ok:
            self.lost_tokens["overtaken"] += rest
            return
        member = trajectory.member
        answer_id = trajectory.work.answer_id(member.number)
        known_at = self._reward_time(self._clock.now, answer_id, member.incarnation)
        if known_at <= self._clock.now:
            self._score(trajectory)
        else:
            self._unscored += 1
            self._clock.call_at(known_at, partial(self._score_known, trajectory))

    def _end_call(self, trajectory: SimulatedTrajectory, save: Save) -> None:
        """Rest at the end of a segment, or wait for the tools of the next turn.

        A version that was loaded during the call may have begun another segment.
        """
        name, queue, version = trajectory.member.trajectory_id, self._queue, save.policy_version
        saved = queue.append(_SESSION, name, save).ok
        rests = saved and trajectory.fills_segment(version)
        if saved and not rests and not queue.desired.paused:
            trajectory.version, trajectory.floor = version, max(trajectory.floor, version)
            if seconds := trajectory.tool_seconds:
                self._clock.call_at(self._clock.now + seconds, partial(self._call_again, trajectory))
            else:
                self._call(trajectory)
            return
        del self._active[name]
        if not saved:
            self.lost_tokens["overtaken"] += save.token_count
            return
        self.rest_count += rests
        queue.release(_SESSION, name, free_attempt=True, rests=rests)

    def _call_again(self, trajectory: SimulatedTrajectory) -> None:
        """Begin the next turn, unless the trajectory was stopped or released while its tools ran."""
        if self._active.get(trajectory.member.trajectory_id) is trajectory:
            self._call(trajectory)

    def _score_known(self, trajectory: SimulatedTrajectory) -> None:
        self._unscored -= 1
        self._score(trajectory)

    def _score(self, trajectory: SimulatedTrajectory) -> None:
        member = trajectory.member
        if self._queue.members.get(member.trajectory_id) is not member:
            return  # Its group was dropped or has begun again.
        self._has_scored = True
        self._queue.now = self._clock.now
        group = member.group
        cuts_off = group.spare > 0 and group.scored + 1 >= group.needed
        held = self.save(group.members) if cuts_off else []
        self._queue.score(_SESSION, member.trajectory_id, trajectory.work.rewards[member.number])
        if held:
            self.drop((each for each in held if each.member.state is TrajectoryState.SURPLUS), WasteReason.SURPLUS)
