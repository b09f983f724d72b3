"""A small run of one schedule on the queue model: fixed lengths, one generator, no chance.

In one tick the leader decides, every leased trajectory gets one token of the newest policy, and the trainer does one
tick of work. A generator loads a policy at once, and a score takes no time.
"""

from dataclasses import dataclass, field

from rollmesh.mesh import RunLimits
from rollmesh.scheduling import CutOrder, OnStale, Schedule, decide
from rollmesh.scheduling.decide import Admit, BeginAgain, CutBatch, SetDesired, leader_steps
from rollmesh.sim.queue_model import GroupState, ModelMember, QueueModel, Save
from rollmesh.types import TrajectoryState

UPDATES = 6
UPDATE_TICKS = 12
"""Ticks that the trainer works on a batch."""
LENGTHS = (5, 7, 4, 9, 6, 5, 22, 8, 4, 6, 11, 5, 7, 4, 15, 6)
"""Tokens of the trajectories in admission order, repeated: most are short, a few are long."""
_WORKER = "worker"
_MOST_TICKS = 1000


@dataclass(slots=True)
class PicturedTrajectory:
    """One trajectory: the policy version that wrote its token, by tick."""

    group_id: str
    tokens: dict[int, int] = field(default_factory=dict)
    dropped: dict[int, int] = field(default_factory=dict)
    """Tokens that no batch trains: of groups that began again or were dropped, of surplus members, and masked ones."""
    staleness: int | None = None
    """Train steps between its oldest token and the trainer, once it is cut."""
    off_policy: int = 0
    """Tokens of older policies than the newest one, once it is cut."""
    rests: dict[int, int] = field(default_factory=dict)
    """Policy version under which it rests, by tick."""

    def drop(self) -> None:
        """Turn all its tokens into dropped ones."""
        self.dropped |= self.tokens
        self.tokens.clear()

    def mask(self, oldest: int) -> None:
        """Turn its tokens of versions below ``oldest`` into dropped ones."""
        self.dropped |= {tick: version for tick, version in self.tokens.items() if version < oldest}
        self.tokens = {tick: version for tick, version in self.tokens.items() if version >= oldest}


@dataclass(slots=True)
class PicturedRun:
    """The run: trajectories in admission order, cuts and the trainer's work by tick."""

    schedule: Schedule
    trajectories: dict[str, PicturedTrajectory] = field(default_factory=dict)
    cuts: list[int] = field(default_factory=list)
    training: dict[int, int] = field(default_factory=dict)
    """Train step of the trainer's work, by tick."""
    ticks: int = 0
    _queue: QueueModel = field(init=False)
    _progress: float = 0.0
    """Ticks of work done on the next step."""

    def __post_init__(self) -> None:
        rules = self.schedule
        self._queue = QueueModel(
            RunLimits(
                group_size=rules.group_size,
                groups_per_batch=rules.groups_per_batch,
                max_staleness=rules.max_staleness,
                max_attempts=_MOST_TICKS,
                session_ttl_seconds=30.0,
                filter_zero_variance=False,
                mask_old_segments=rules.on_stale is OnStale.MASK_OLD_SEGMENTS,
                train_steps=rules.train_steps,
            )
        )
        self._queue.registered_generators = 1
        self._queue.open_session(_WORKER)
        self._queue.announce(0)

    def run(self) -> None:
        """Run until ``UPDATES`` steps are trained. Raises RuntimeError if the schedule gets stuck."""
        while self._queue.trained_step < UPDATES:
            if self.ticks >= _MOST_TICKS:
                raise RuntimeError(f"schedule {self.schedule.preset} is stuck: {self._queue.view()}")
            self._lead()
            self._generate()
            self._note_rests()
            self._train()
            self._note_drops()
            self.ticks += 1
            self._queue.now = float(self.ticks)

    def _lead(self) -> None:
        queue, rules = self._queue, self.schedule
        decisions = decide(rules, queue.view(shortest=rules.cut_order is CutOrder.SHORTEST))
        for step in leader_steps(decisions):
            if isinstance(step, Admit):
                self._admit(step.count)
                continue
            queue.apply(step)
            match step:
                case SetDesired(desired) if desired.paused:
                    for member in self._leased():
                        queue.release(_WORKER, member.trajectory_id, free_attempt=True)
                case BeginAgain(group_ids):
                    for trajectory in self._trajectories_of(group_ids):
                        trajectory.drop()
                case CutBatch(group_ids):
                    self._note_cut(group_ids)

    def _admit(self, count: int) -> None:
        for _ in range(count):
            rules, admitted = self.schedule, self._queue.admitted
            group = self._queue.admit(f"e0-{admitted}", rules.group_size, spare=rules.spare_members)
            for member in group.members:
                self.trajectories[member.trajectory_id] = PicturedTrajectory(group.group_id)

    def _note_cut(self, group_ids: tuple[str, ...]) -> None:
        trained = self._queue.trained_step
        self.cuts.append(self.ticks)
        for trajectory in self._trajectories_of(group_ids):
            if trajectory.tokens:
                if self.schedule.on_stale is OnStale.MASK_OLD_SEGMENTS:
                    trajectory.mask(oldest=trained - self.schedule.max_staleness)
                ages = [trained - version for version in trajectory.tokens.values()]
                trajectory.staleness, trajectory.off_policy = max(ages, default=0), sum(age > 0 for age in ages)

    def _trajectories_of(self, group_ids: tuple[str, ...]) -> list[PicturedTrajectory]:
        return [trajectory for trajectory in self.trajectories.values() if trajectory.group_id in group_ids]

    def _generate(self) -> None:
        queue, version = self._queue, self._queue.policy_version
        queue.lease(_WORKER, self.schedule.pool_size)
        order = {name: index for index, name in enumerate(self.trajectories)}
        for member in self._leased():
            name = member.trajectory_id
            if member.state is not TrajectoryState.LEASED:
                continue  # cut off by the score of another member in this tick
            queue.begin(_WORKER, name, version)
            self.trajectories[name].tokens[self.ticks] = version
            if member.tokens + 1 < LENGTHS[order[name] % len(LENGTHS)]:
                queue.append(_WORKER, name, Save(1, version))
                if self._fills_segment(name, version):
                    queue.release(_WORKER, name, free_attempt=True, rests=True)
            else:
                queue.finish(_WORKER, name, Save(1, version))
                queue.score(_WORKER, name, float(member.number))

    def _fills_segment(self, name: str, version: int) -> bool:
        """Tell whether the tokens of this version are whole segments: it may continue under the same version."""
        segment = self.schedule.segment_tokens
        tokens = self.trajectories[name].tokens.values()
        return segment > 0 and sum(token == version for token in tokens) % segment == 0

    def _note_rests(self) -> None:
        for member in self._members(TrajectoryState.RESTING):
            trajectory = self.trajectories[member.trajectory_id]
            if self.ticks not in trajectory.tokens:
                trajectory.rests[self.ticks] = self._queue.policy_version

    def _leased(self) -> list[ModelMember]:
        return self._members(TrajectoryState.LEASED)

    def _members(self, state: TrajectoryState) -> list[ModelMember]:
        opened = self._queue.groups[GroupState.OPEN].values()
        return [m for group in opened for m in group.members if m.state is state]

    def _train(self) -> None:
        """Work one tick on the batch, or on the parts of it that are ready; train and announce a complete one."""
        queue, rules = self._queue, self.schedule
        is_cut = bool(queue.batch)
        at_hand = rules.groups_per_batch if is_cut else self._ready_in_parts()
        if self._progress < UPDATE_TICKS * at_hand / rules.groups_per_batch:
            self.training[self.ticks] = queue.trained_step + 1
            self._progress += 1
        if is_cut and self._progress >= UPDATE_TICKS:
            self._progress = 0.0
            queue.confirm_batch_file()
            queue.report_trained()
            queue.announce(queue.trained_step)

    def _ready_in_parts(self) -> int:
        """Return the ready groups that the trainer may work on before the cut."""
        parts = self.schedule.part_groups
        ready = min(len(self._queue.groups[GroupState.READY]), self.schedule.groups_per_batch)
        return ready // parts * parts if parts else 0

    def _note_drops(self) -> None:
        for name, trajectory in self.trajectories.items():
            member = self._queue.members.get(name)
            reason = self._queue.ended.get(trajectory.group_id, "consumed")
            if reason != "consumed" or (member is not None and member.state is TrajectoryState.SURPLUS):
                trajectory.drop()
