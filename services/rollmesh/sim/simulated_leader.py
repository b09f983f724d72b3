"""Leader of a simulated mesh: the decisions of ``decide`` and of rounds, as ``rollout/`` applies them."""

import math
from dataclasses import replace

from rollmesh.curriculum.planners import RoundRules
from rollmesh.errors import ConfigError
from rollmesh.group_outcome import GroupOutcome, MemberOutcome
from rollmesh.mesh import EngineLoad, MeshView
from rollmesh.scheduling import CutOrder, Schedule, StartOrder, decide, needs_groups
from rollmesh.scheduling.auto_pool import mean_cached_tokens
from rollmesh.scheduling.cutting import blocking_groups
from rollmesh.scheduling.decide import (
    Admit,
    BeginAgain,
    CutBatch,
    Evict,
    LeaderStep,
    Recall,
    SetDesired,
    leader_steps,
)
from rollmesh.scheduling.length_prediction import LengthEvidence, start_rank, weigh
from rollmesh.sim.event_clock import EventClock
from rollmesh.sim.fleet import Fleet
from rollmesh.sim.invariants import Invariants
from rollmesh.sim.prompts import SimulatedDraws, SimulatedPrompts
from rollmesh.sim.queue_model import ModelGroup, QueueModel
from rollmesh.sim.simulated_worker import SimulatedWorker
from rollmesh.types import TrajectoryState

_MOST_GROUPS = 512
"""Groups that one look decides on, the oldest first."""
LOOK_SECONDS = 0.05
"""Least virtual time between two decisions; the leader of the mesh decides at most ten times a second."""
_MEASURE_SECONDS = 2.0
_TOKEN_BYTES = 4
"""Bytes of a prompt's token in the store of the mesh."""


class SimulatedLeader:
    """The leader; it decides only after a change, and when a time-out of the schedule may have passed."""

    def __init__(
        self,
        clock: EventClock,
        queue: QueueModel,
        schedule: Schedule,
        prompts: SimulatedPrompts,
        worker: SimulatedWorker,
        fleet: Fleet,
        *,
        rounds: RoundRules | None = None,
        draws: SimulatedDraws | None = None,
        invariants: Invariants | None = None,
    ) -> None:
        """Create the leader; without ``draws`` the prompts come in their order."""
        self._absent_until = 0.0
        self._clock = clock
        self._queue = queue
        self._schedule = schedule
        self._prompts = prompts
        self._draws = draws
        self._worker = worker
        self._fleet = fleet
        self._invariants = invariants
        self._rounds = rounds
        self._alarm = clock.alarm(self._look)
        self._last_look = -math.inf
        self._evidence = LengthEvidence()
        self._measured_at = -math.inf
        self._load: EngineLoad | None = None
        self._load_at = -math.inf

    def look_soon(self) -> None:
        """Decide at the next moment that the pace of decisions allows."""
        if self._alarm.time <= self._last_look + LOOK_SECONDS:
            return  # It is planned.
        time = max(self._clock.now, self._last_look + LOOK_SECONDS, self._absent_until)
        if time < self._alarm.time:
            self._alarm.set(time)

    def fail(self, seconds: float) -> None:
        """Decide nothing for so long; then another leader decides."""
        self._absent_until = self._clock.now + seconds
        self._queue.change_leader()

    def _look(self) -> None:
        queue, schedule = self._queue, self._schedule
        if self._clock.now < self._absent_until:
            self._alarm.set(self._absent_until)
            return
        self._last_look = queue.now = self._clock.now
        queue.registered_generators = len(self._fleet.generators)
        if queue.blocked_since is not None and self._timeout_at() <= queue.now:
            # The store of the mesh has the progress of every call, and the time-out depends on it.
            self._worker.save_all()
        view = self._with_load(queue.view(groups=False))
        if needs_groups(schedule, view):
            shortest = schedule.cut_order is CutOrder.SHORTEST
            view = self._with_load(queue.view(blocking=blocking_groups(schedule, view), shortest=shortest))
        decisions = decide(schedule, view)
        if decisions.fail:
            raise ConfigError(f"train step {queue.cut_step + 1}: {decisions.fail}")
        changed = [self._apply(step) for step in leader_steps(decisions)]
        if self._invariants is not None:
            self._invariants.after_admission(decisions.admit_groups)
        if (self._rounds is not None and decide_rounds(queue, schedule, self._rounds)) or any(changed):
            self.look_soon()
        elif queue.blocked_since is not None:
            self._alarm.set(max(self._timeout_at(), queue.now + LOOK_SECONDS))

    def _with_load(self, view: MeshView) -> MeshView:
        """Return the view with the evidence of an automatic pool, as ``rollout/leader_parts.py`` does."""
        if not self._schedule.auto_pool:
            return view
        if view.now >= self._load_at + _MEASURE_SECONDS:
            self._load, self._load_at = self._fleet.engine_load(), view.now
        return replace(view, engines=self._load, mean_cached_tokens=mean_cached_tokens(self._queue.finished_lengths))

    def _timeout_at(self) -> float:
        since = self._queue.blocked_since
        return math.inf if since is None else since + self._schedule.straggler_timeout_seconds

    def _apply(self, step: LeaderStep) -> bool:
        """Apply a step; returns True if more than the desired state has changed."""
        queue, worker = self._queue, self._worker
        match step:
            case SetDesired(desired):
                pauses = desired.paused and not queue.desired.paused
                queue.apply(step)
                if pauses:
                    worker.give_back_all()
                self._fleet.require(max(queue.start_at_version, desired.interrupt_below_version))
                worker.require_versions()
                return False
            case Evict(group_ids, reason) | BeginAgain(group_ids, reason):
                groups = [queue.find_group(group_id) for group_id in group_ids]
                held = worker.save(member for group in groups if group is not None for member in group.members)
                queue.apply(step)
                worker.drop(held, reason)
            case CutBatch(group_ids):
                if self._invariants is not None:
                    self._invariants.before_cut(group_ids)
                    self._invariants.whole_queue()
                queue.apply(step)
            case Recall():
                return queue.apply(step) > 0
            case Admit(count):
                if self._draws is not None:
                    self._draws.refresh()
                for _ in range(count):
                    self._admit()
        return True

    def _admit(self) -> None:
        queue, schedule, position = self._queue, self._schedule, self._queue.admitted
        group_id = self._prompts.group_id(position)
        rules = self._rounds
        row = None if self._draws is None else self._draws.row(position)
        members = max(schedule.launched_members, 0 if rules is None else rules.most_members)
        work = self._prompts.work(position, members, row)
        self._worker.works[group_id] = work
        expected, rank = self._expectation(work.prompt_id)
        first = None if rules is None else rules.first(queue.history.records.get(work.prompt_id))
        queue.admit(
            group_id,
            schedule.group_size if first is None else first.needed,
            spare=schedule.spare_members if first is None else first.launched - first.needed,
            plan=None if rules is None or first is None else rules.encode_plan(first),
            prompt_id=work.prompt_id,
            domain=work.domain,
            expected_tokens=expected,
            start_rank=rank,
            prompt_bytes=_TOKEN_BYTES * work.prompt_tokens,
        )

    def _expectation(self, prompt_id: str) -> tuple[float | None, int | None]:
        """Return the expected length and the start rank, as ``rollout/leader_parts.py`` does."""
        if self._schedule.start_order is not StartOrder.LONGEST_EXPECTED:
            return None, None
        history = self._queue.history
        if self._clock.now >= self._measured_at + _MEASURE_SECONDS:
            self._measured_at = self._clock.now
            self._evidence = weigh(list(history.predictions))
        record = history.records.get(prompt_id)
        expected = None if record is None else record.mean_tokens
        return expected, start_rank(expected, self._evidence)


def decide_rounds(queue: QueueModel, schedule: Schedule, rules: RoundRules) -> bool:
    """Extend or close the undecided groups; returns True if there were any.

    Raises DataError for a planner or a group shaper that fails.
    """
    groups = queue.oldest_undecided(_MOST_GROUPS)
    for group in groups:
        outcome = _outcome(group, queue.trained_step, schedule.longest_trajectory_tokens)
        decision = rules.decide(outcome, queue.history.records)
        if (extension := decision.extension) is not None:
            plan = rules.encode_plan(extension)
            queue.extend_group(group.group_id, outcome.round, extension.needed, extension.launched, plan)
        elif (closing := decision.closing) is not None:
            queue.close_group(group.group_id, outcome.round, closing.shaped_rewards, closing.kept_tokens)
    return bool(groups)


def _outcome(group: ModelGroup, train_step: int, longest: int) -> GroupOutcome:
    return GroupOutcome(
        group_id=group.group_id,
        prompt_id=group.prompt_id,
        domain=group.domain,
        train_step=train_step,
        round=len(group.rounds) - 1,
        launched=len(group.members),
        members=tuple(
            MemberOutcome(
                member_index=member.number,
                round=group.round_of(member),
                outcome=member.reward or 0.0,
                shaped_reward=member.reward or 0.0,
                token_count=member.tokens,
                truncated=member.tokens >= longest,
            )
            for member in group.members
            if member.state is TrajectoryState.SCORED
        ),
    )
