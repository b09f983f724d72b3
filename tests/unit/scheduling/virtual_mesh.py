"""A mesh on the queue model, one tick at a time: random lengths, lagging generators, crashes, slow publishing.

The queue keeps the store's promises; this driver checks those of the scheduler (pool, staleness, capacity, backlog,
waiting) wherever they could break, and again after every tick. A leader that dies has applied only the first few of its
decisions, and the next one comes some ticks later. The leases of a dead worker run out some ticks after its death.
"""

import itertools
import random
from collections import Counter
from dataclasses import dataclass, field, replace

from rollmesh.mesh import Decisions, EngineLoad, MeshView, RunLimits
from rollmesh.scheduling import OnStale, Schedule, decide, needs_groups
from rollmesh.scheduling.auto_pool import mean_cached_tokens
from rollmesh.scheduling.axes import StartOrder
from rollmesh.scheduling.cutting import CutOrder, blocking_groups
from rollmesh.scheduling.decide import Admit, BeginAgain, CutBatch, Evict, LeaderStep, Recall, SetDesired, leader_steps
from rollmesh.sim.invariants import Invariants
from rollmesh.sim.queue_model import GroupState, ModelMember, Save

from ...kit.whole_queue_model import WholeQueueModel
from .overtaking import Overtaking

WORKERS = 3
DOWN = -1
"""Policy version of a generator that has crashed and not come back."""
NEVER = 1 << 30
"""Length of a rollout that never ends: it saves its first token, then nothing more."""


@dataclass
class Rollout:
    """One trajectory as its worker and its generator know it."""

    length: int
    reward_ticks: int
    reward: float
    sampled: int = 0
    generator: int | None = None
    newest_version: int = 0
    in_segment: int = 0
    """Tokens under the newest version since the last rest."""
    floor: int = 0
    waits_for_reward: int = 0


@dataclass
class VirtualMesh:
    schedule: Schedule
    rng: random.Random
    generators: int = 2
    mean_length: float = 6.0
    train_ticks: int = 3
    """Most ticks of an update."""
    least_train_ticks: int = 0
    publish_ticks: int = 2
    reload_chance: float = 0.5
    crash_chance: float = 0.0
    """Chance per tick that a worker or a generator dies."""
    filter_chance: float = 0.0
    leader_crash_chance: float = 0.0
    cache_tokens: int = 1 << 30
    """Tokens that the caches of all generators hold; beyond them every tick preempts a call. For an automatic pool."""
    preemptions: int = 0
    stuck_group: int | None = None
    """Admission index, from 0, of the group whose first rollout never ends."""
    queue: WholeQueueModel = field(init=False)
    invariants: Invariants = field(init=False)
    overtaking: Overtaking = field(init=False)
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    """Of the groups that are open, by trajectory."""
    batches: list[list[str]] = field(default_factory=list)
    staleness_seen: list[int] = field(default_factory=list)
    begun_again: Counter[str] = field(default_factory=Counter)
    """Number of times that a group was restarted or set aside."""
    recalled: int = 0
    long_round: set[str] = field(default_factory=set)
    """Groups that were recalled for the next batch."""
    missed: list[str] = field(default_factory=list)
    """Recalled groups that were not in their batch, although they were not dropped."""
    rests: int = 0
    trace: list[tuple[int, Decisions]] = field(default_factory=list)
    training: int | None = None
    publishing: list[int] = field(default_factory=list)
    serving: list[int] = field(default_factory=list)
    workers: list[str] = field(default_factory=list)
    dead_workers: dict[str, int] = field(default_factory=dict)
    """Tick in which the leases of a dead worker run out."""
    next_leader: int = 0
    """First tick with a leader."""
    deaths: Counter[str] = field(default_factory=Counter)
    """Deaths of workers, generators and leaders."""
    names: "itertools.count[int]" = field(default_factory=itertools.count)

    def __post_init__(self) -> None:
        rules = self.schedule
        self.queue = WholeQueueModel(
            RunLimits(
                group_size=rules.group_size,
                groups_per_batch=rules.groups_per_batch,
                max_staleness=rules.max_staleness,
                max_attempts=1 << 30,
                session_ttl_seconds=30.0,
                filter_zero_variance=rules.group_size > 1,
                mask_old_segments=rules.on_stale is OnStale.MASK_OLD_SEGMENTS,
                train_steps=rules.train_steps,
                resume_order=rules.resume_order,
            )
        )
        self.invariants = Invariants(rules, self.queue)
        self.overtaking = Overtaking(rules, self.queue)
        self.queue.registered_generators = self.generators
        self.queue.announce(0)
        self.serving = [0] * self.generators
        for _ in range(WORKERS):
            self.open_worker()

    @property
    def surplus(self) -> int:
        """Number of trajectories cut off because enough others of their group were scored."""
        return self.queue.totals["surplus_total"]

    @property
    def evicted(self) -> dict[str, str]:
        """Reason by group that the leader has dropped."""
        kept = ("consumed", "filtered_all_right")
        return {gid: reason for gid, reason in self.queue.ended.items() if reason not in kept}

    def count(self, *states: GroupState) -> int:
        return sum(len(self.queue.groups[state]) for state in states)

    def members(self, state: str) -> list[ModelMember]:
        """Return the members in a state that living workers hold."""
        opened, dead = self.queue.groups[GroupState.OPEN].values(), self.dead_workers
        return [m for group in opened for m in group.members if m.state == state and m.session not in dead]

    # -- one tick --------------------------------------------------------------------------------------------------
    def tick(self) -> Decisions:
        self.queue.now += 1
        decisions = self.lead()
        self.lease()
        self.generate()
        self.score()
        self.train()
        self.reload()
        if self.rng.random() < self.crash_chance:
            self.crash()
        self.reap()
        self.check()
        return decisions

    def check(self) -> None:
        """Check what holds after every tick, whoever died in it."""
        self.invariants.after_admission(0)
        if not self.schedule.auto_pool:
            self.invariants.after_lease()
        if self.queue.now % 3 == 1:  # O(trajectories): not after every tick
            self.invariants.whole_queue()

    def lead(self) -> Decisions:
        if self.queue.now < self.next_leader:
            return Decisions(desired=self.queue.desired)
        view = self.look(shortest=self.schedule.cut_order is CutOrder.SHORTEST)
        decisions = decide(self.schedule, view)
        if self.queue.now % 3 == 0:  # a second view and decision: not at every tick
            self.check_unlisted(view, decisions)
        assert not decisions.fail, decisions.fail
        self.trace.append((int(self.queue.now), decisions))
        steps = list(leader_steps(decisions))
        lives = self.rng.random() >= self.leader_crash_chance
        for step in steps if lives else steps[: self.rng.randrange(len(steps))]:
            self.apply(step)
        if not lives:
            self.deaths["leader"] += 1
            self.queue.change_leader()
            self.next_leader = int(self.queue.now) + self.rng.randint(1, 4)
        return decisions

    def check_unlisted(self, view: MeshView, decisions: Decisions) -> None:
        """A view without single groups has the same numbers, and is enough for a decision that needs no groups."""
        unlisted = self.look(groups=False)
        assert unlisted == replace(view, listed=False, ready=(), stalest_open=(), aside=())
        if not needs_groups(self.schedule, unlisted):
            assert decide(self.schedule, unlisted) == decisions
        elif blocking := blocking_groups(self.schedule, unlisted):
            few = replace(view, ready=(), stalest_open=view.stalest_open[:blocking])
            assert decide(self.schedule, few) == decisions

    def look(self, *, groups: bool = True, shortest: bool = False) -> MeshView:
        """Read the view as the leader does: with the load of the generators for an automatic pool."""
        view = self.queue.view(groups=groups, shortest=shortest)
        if not self.schedule.auto_pool:
            return view
        load = EngineLoad(
            slots=1 + self.cache_tokens // 16,
            waiting=0,
            kv_token_capacity=self.cache_tokens,
            preemptions=self.preemptions,
        )
        return replace(view, engines=load, mean_cached_tokens=mean_cached_tokens(self.queue.finished_lengths))

    @property
    def tokens_in_flight(self) -> int:
        return sum(self.rollouts[member.trajectory_id].sampled for member in self.members("leased"))

    def apply(self, step: LeaderStep) -> None:
        queue = self.queue
        match step:
            case SetDesired(desired):
                queue.apply(step)
                for member in self.members("leased") if desired.paused else ():
                    self.save(member, self.rollouts[member.trajectory_id])
                    self.park(member, free_attempt=True)
            case Evict(group_ids, reason):
                assert reason != "run_complete" or queue.cut_step >= self.schedule.train_steps
                assert queue.apply(step) == len(group_ids)
            case BeginAgain(group_ids):
                assert queue.apply(step) == len(group_ids)
                for gid in group_ids:
                    self.begins_again(gid)
            case CutBatch(group_ids):
                self.cut(step, group_ids)
            case Recall():
                before = set(queue.groups[GroupState.OPEN])
                self.recalled += queue.apply(step)
                recalled = queue.groups[GroupState.OPEN].keys() - before
                self.overtaking.after_recall(recalled)
                self.long_round |= recalled
            case Admit(count):
                for _ in range(count):
                    self.admit()
                self.invariants.after_admission(count)

    def begins_again(self, gid: str) -> None:
        self.begun_again[gid] += 1
        self.overtaking.begins_again(gid, self.begun_again[gid])
        group = self.queue.find_group(gid)
        for member in group.members if group else ():
            rollout = self.rollouts[member.trajectory_id]
            self.rollouts[member.trajectory_id] = replace(
                rollout, sampled=0, generator=None, newest_version=0, in_segment=0, floor=0
            )

    def cut(self, step: CutBatch, group_ids: tuple[str, ...]) -> None:
        self.invariants.before_cut(group_ids)
        self.invariants.whole_queue()
        steps = [self.queue.groups[GroupState.READY][gid].step for gid in group_ids]
        self.queue.apply(step)
        for oldest in steps:
            assert oldest is not None
            self.staleness_seen.append(self.queue.cut_step - 1 - oldest)
        self.batches.append(list(group_ids))
        self.overtaking.after_cut()
        self.missed += self.long_round - self.queue.ended.keys() - set(group_ids)
        self.long_round = set()

    def admit(self) -> None:
        index, ranked = self.queue.admitted, self.schedule.start_order is StartOrder.LONGEST_EXPECTED
        group = self.queue.admit(
            f"e0-{index}",
            self.schedule.group_size,
            spare=self.schedule.spare_members,
            start_rank=self.rng.randrange(128) if ranked else None,
        )
        filtered = self.rng.random() < self.filter_chance
        for number, member in enumerate(group.members):
            self.rollouts[member.trajectory_id] = Rollout(
                length=NEVER if (index, number) == (self.stuck_group, 0) else self.length(),
                reward_ticks=self.rng.randrange(3),
                reward=1.0 if filtered else float(number),
            )

    def length(self) -> int:
        if self.rng.random() < 0.05:
            return 1 + int(self.rng.expovariate(1 / (10 * self.mean_length)))
        return 1 + int(self.rng.expovariate(1 / self.mean_length))

    def lease(self) -> None:
        queue, desired = self.queue, self.queue.desired
        if not (queue.pending or queue.partial or queue.resting):
            return
        members = [member for worker in self.workers for member in queue.lease(worker, 1 << 30)]
        for member in members:
            rollout = self.rollouts[member.trajectory_id]
            rollout.sampled = member.tokens
            rollout.floor = rollout.newest_version if member.tokens else queue.start_at_version
            rollout.floor = max(rollout.floor, desired.interrupt_below_version)
        if members:
            self.invariants.after_lease()
            self.overtaking.after_lease(members)

    def generate(self) -> None:
        if self.schedule.auto_pool and self.tokens_in_flight > self.cache_tokens:
            self.preemptions += 1
        for member in self.members("leased"):
            rollout = self.rollouts[member.trajectory_id]
            if rollout.generator is None:
                able = [i for i, version in enumerate(self.serving) if version >= rollout.floor]
                if not able:
                    continue
                rollout.generator = self.rng.choice(able)
            if rollout.length == NEVER and rollout.sampled:
                continue
            version = self.serving[rollout.generator]
            self.invariants.sampled(version, rollout.floor)
            self.queue.begin(member.session or "", member.trajectory_id, version)
            if version > rollout.newest_version:
                rollout.newest_version, rollout.in_segment = version, 0
            rollout.sampled += 1
            rollout.in_segment += 1
            if rollout.sampled >= rollout.length:
                rollout.generator, rollout.waits_for_reward = None, rollout.reward_ticks
                save = Save(rollout.sampled - member.tokens, version)
                assert self.queue.finish(member.session or "", member.trajectory_id, save).ok
            elif self.ends_segment(rollout):
                self.save(member, rollout)
                rollout.in_segment = 0
                self.park(member, free_attempt=True, rests=True)
                self.rests += 1
            elif self.rng.random() < 0.5 or rollout.length == NEVER:
                self.save(member, rollout)

    def ends_segment(self, rollout: Rollout) -> bool:
        """Tell whether a rollout rests; under a policy that is no longer the newest one it continues."""
        segment, is_newest = self.schedule.segment_tokens, rollout.newest_version == self.queue.policy_version
        return segment > 0 and rollout.in_segment % segment == 0 and is_newest

    def save(self, member: ModelMember, rollout: Rollout) -> None:
        """Save the tokens that the worker has and the queue has not."""
        save = Save(rollout.sampled - member.tokens, rollout.newest_version)
        assert self.queue.append(member.session or "", member.trajectory_id, save).ok

    def score(self) -> None:
        for worker in self.workers:
            self.queue.lease_scoring(worker, 1 << 30)
        for member in self.members("finished"):
            rollout = self.rollouts[member.trajectory_id]
            rollout.waits_for_reward -= 1
            # The score of another member may have cut this one off.
            if rollout.waits_for_reward < 0 and member.state == "finished":
                assert self.queue.score(member.session or "", member.trajectory_id, rollout.reward).ok

    def train(self) -> None:
        queue, now = self.queue, int(self.queue.now)
        if self.publishing and self.publishing[0] <= now:
            self.publishing.pop(0)
            queue.announce(queue.version_steps[-1] + 1)
        if self.training is None and queue.batch:
            self.training = now + self.rng.randint(self.least_train_ticks, self.train_ticks)
        if self.training is not None and self.training <= now:
            self.training = None
            assert [group.group_id for group in queue.claim()] == self.batches[-1]
            queue.confirm_batch_file()
            queue.report_trained()
            self.publishing.append(now + self.rng.randint(0, self.publish_ticks))

    def reload(self) -> None:
        for i, version in enumerate(self.serving):
            chance = max(0.3, self.reload_chance) if version == DOWN else self.reload_chance
            if version < self.queue.policy_version and self.rng.random() < chance:
                self.serving[i] = self.queue.policy_version
        self.queue.registered_generators = sum(version != DOWN for version in self.serving)

    def park(self, member: ModelMember, *, free_attempt: bool, rests: bool = False) -> None:
        self.rollouts[member.trajectory_id].generator = None
        assert self.queue.release(member.session or "", member.trajectory_id, free_attempt=free_attempt, rests=rests)

    def open_worker(self) -> None:
        self.workers.append(f"worker-{next(self.names)}")
        self.queue.open_session(self.workers[-1])

    def crash(self) -> None:
        """A worker dies with the tokens that it has not saved, or a generator, whose calls go to others."""
        if self.rng.random() < 0.5:
            worker = self.workers.pop(self.rng.randrange(len(self.workers)))
            self.dead_workers[worker] = int(self.queue.now) + self.rng.randrange(6)
            self.deaths["worker"] += 1
            self.open_worker()
            return
        dead = self.rng.randrange(self.generators)
        self.serving[dead] = DOWN
        self.deaths["generator"] += 1
        for member in self.members("leased"):
            rollout = self.rollouts[member.trajectory_id]
            rollout.generator = None if rollout.generator == dead else rollout.generator

    def reap(self) -> None:
        """Take from dead workers the leases that have run out: others lease their trajectories again."""
        for worker in [name for name, tick in self.dead_workers.items() if tick <= self.queue.now]:
            for held in self.queue.held_by(worker):
                self.rollouts[held.trajectory_id].generator = None
            self.queue.close_session(worker, free_attempt=False)
            del self.dead_workers[worker]

    def run(self, ticks: int) -> None:
        """Tick until every group has ended; fails when that takes more than ``ticks``."""
        for _ in range(ticks):
            self.tick()
            if self.queue.trained_step >= self.schedule.train_steps and not any(self.queue.groups.values()):
                self.invariants.whole_queue()
                return
        raise AssertionError(f"not done after {ticks} ticks: {self.queue.view()} {self.trace[-1]}")
