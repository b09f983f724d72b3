"""A mesh in memory, one tick at a time: random lengths, lagging generators, crashes, slow publishing.

It keeps the promises of the real store (pool, versions that only rise) and checks those of the scheduler (staleness,
capacity, backlog) wherever they could break. A leader that dies between two decisions is a leader that applies only
the first few of them: ``decide`` is called afresh every tick anyway.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field, replace

from rollmesh.mesh import Decisions, Desired, GroupView, MeshView
from rollmesh.scheduling import AdmissionRule, OnStale, Schedule, decide, needs_groups


@dataclass
class Rollout:
    tokens_left: int
    state: str = "pending"
    generator: int | None = None
    oldest_step: int | None = None
    newest_version: int = 0
    floor: int = 0
    reward_ticks: int = 0


@dataclass
class MeshGroup:
    index: int
    members: list[Rollout]
    state: str = "open"

    @property
    def min_step(self) -> int | None:
        steps = [m.oldest_step for m in self.members if m.oldest_step is not None]
        return min(steps, default=None)


@dataclass
class VirtualMesh:
    schedule: Schedule
    rng: random.Random
    generators: int = 2
    mean_length: float = 6.0
    train_ticks: int = 3
    publish_ticks: int = 2
    reload_chance: float = 0.5
    crash_chance: float = 0.0
    filter_chance: float = 0.0
    leader_crash_chance: float = 0.0
    stuck_group: int | None = None
    """Admission index of the group whose first rollout never ends."""
    now: float = 0.0
    groups: dict[str, MeshGroup] = field(default_factory=dict)
    """Those that are open, ready or cut, in the order of their admission."""
    admitted: int = 0
    finished: int = 0
    """Rollouts that ever finished."""
    versions: list[int] = field(default_factory=lambda: [0])
    trained_step: int = 0
    cut_step: int = 0
    desired: Desired | None = None
    blocked_by: str = ""
    blocked_since: float | None = None
    filtered_in_a_row: int = 0
    batches: list[list[str]] = field(default_factory=list)
    staleness_seen: list[int] = field(default_factory=list)
    evicted: dict[str, str] = field(default_factory=dict)
    trace: list[tuple[int, Decisions]] = field(default_factory=list)
    training: int | None = None
    publishing: list[int] = field(default_factory=list)
    serving: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.serving = [0] * self.generators

    # -- what the leader sees ------------------------------------------------------------------------------------
    def in_state(self, *states: str) -> list[tuple[str, MeshGroup]]:
        return [(gid, g) for gid, g in self.groups.items() if g.state in states]

    def rollouts(self, *states: str) -> list[Rollout]:
        return [m for g in self.groups.values() if g.state == "open" for m in g.members if m.state in states]

    def view(self) -> MeshView:
        prefix = 2 * self.schedule.groups_per_batch
        rollouts = Counter(m.state for _, g in self.in_state("open") for m in g.members)

        def seen(state: str) -> list[GroupView]:
            return [
                GroupView(group_id=gid, admission_index=g.index, min_train_step=g.min_step)
                for gid, g in self.in_state(state)
            ]

        def by_age(group: GroupView) -> tuple[float, int]:
            return (float("inf") if group.min_train_step is None else group.min_train_step, group.admission_index)

        ready, opened = seen("ready"), seen("open")
        counts: dict[int, int] = {}
        for group in (*ready, *opened):
            if group.min_train_step is not None:
                counts[group.min_train_step] = counts.get(group.min_train_step, 0) + 1
        oldest = [g for g in sorted(ready, key=by_age)[:prefix] if g not in ready[:prefix]]
        return MeshView(
            now=self.now,
            trained_step=self.trained_step,
            cut_step=self.cut_step,
            policy_version=len(self.versions) - 1,
            policy_train_step=self.versions[-1],
            admitted_unconsumed=len(self.groups),
            open_groups=len(opened),
            ready_groups=len(ready),
            ready=(*ready[:prefix], *oldest),
            stalest_open=tuple(sorted(opened, key=by_age)[:prefix]),
            unclaimed_by_step=tuple(sorted(counts.items())),
            pending=rollouts["pending"],
            partial=rollouts["partial"],
            leased=rollouts["leased"],
            finished=rollouts["finished"],
            memory_ratio=0.0,
            filtered_in_a_row=self.filtered_in_a_row,
            blocked_by=self.blocked_by,
            blocked_since=self.blocked_since,
            registered_generators=self.generators,
            finished_total=self.finished,
            recovering=False,
            user_paused=False,
            is_complete=self.trained_step >= self.schedule.train_steps,
        )

    # -- one tick --------------------------------------------------------------------------------------------------
    def tick(self) -> Decisions:
        self.now += 1
        decisions = self.lead()
        self.lease()
        self.generate()
        self.score()
        self.train()
        self.reload()
        if self.rng.random() < self.crash_chance:
            self.crash()
        return decisions

    def lead(self) -> Decisions:
        view = self.view()
        decisions = decide(self.schedule, view)
        unlisted = replace(view, listed=False, ready=(), stalest_open=())
        if not needs_groups(self.schedule, unlisted):
            assert decide(self.schedule, unlisted) == decisions
        assert not decisions.fail, decisions.fail
        self.trace.append((int(self.now), decisions))
        steps = [self.apply_desired, self.apply_evictions, self.apply_cut, self.apply_admission]
        lived = len(steps) if self.rng.random() >= self.leader_crash_chance else self.rng.randrange(len(steps))
        for step in steps[:lived]:
            step(decisions)
        return decisions

    def apply_desired(self, decisions: Decisions) -> None:
        self.desired = decisions.desired
        if decisions.blocked_by != self.blocked_by:
            self.blocked_by = decisions.blocked_by
            self.blocked_since = self.now if decisions.blocked else None
        if decisions.desired.paused:
            for rollout in self.rollouts("leased"):
                self.park(rollout)

    def apply_evictions(self, decisions: Decisions) -> None:
        for eviction in decisions.evict:
            del self.groups[eviction.group_id]
            self.evicted[eviction.group_id] = eviction.reason

    def apply_cut(self, decisions: Decisions) -> None:
        if decisions.cut is None:
            return
        assert len(set(decisions.cut)) == self.schedule.groups_per_batch
        for gid in decisions.cut:
            group = self.groups[gid]
            assert group.state == "ready"
            assert group.min_step is not None
            self.staleness_seen.append(self.cut_step - group.min_step)
            if self.schedule.on_stale is not OnStale.MASK_OLD_SEGMENTS:
                assert self.cut_step - group.min_step <= self.schedule.max_staleness
            group.state = "cut"
        self.batches.append(list(decisions.cut))
        self.cut_step += 1
        self.blocked_by, self.blocked_since = "", None

    def apply_admission(self, decisions: Decisions) -> None:
        for _ in range(decisions.admit_groups):
            index = self.admitted
            self.admitted += 1
            members = [Rollout(tokens_left=self.length()) for _ in range(self.schedule.group_size)]
            if index == self.stuck_group:
                members[0].tokens_left = 1 << 30
            self.groups[f"e0-{index}"] = MeshGroup(index, members)
        unfinished = len(self.rollouts("pending", "partial", "leased"))
        assert len(self.groups) <= self.schedule.capacity_groups
        n = self.schedule.group_size
        if decisions.admit_groups and self.schedule.admission is AdmissionRule.POOL:
            ahead = len(self.in_state("ready")) + unfinished / n
            assert ahead <= self.schedule.pool_groups + self.schedule.groups_per_batch
        bound = self.schedule.pool_size + (self.schedule.groups_per_batch + 2) * n
        assert unfinished <= bound, f"{unfinished} unfinished trajectories, bound {bound}"

    def length(self) -> int:
        if self.rng.random() < 0.05:
            return 1 + int(self.rng.expovariate(1 / (10 * self.mean_length)))
        return 1 + int(self.rng.expovariate(1 / self.mean_length))

    def lease(self) -> None:
        if self.desired is None or self.desired.paused:
            return
        free = self.desired.pool_size - len(self.rollouts("leased"))
        for rollout in (self.rollouts("partial") + self.rollouts("pending"))[: max(0, free)]:
            rollout.state = "leased"
            rollout.floor = self.desired.start_at_version if rollout.oldest_step is None else rollout.newest_version
            rollout.floor = max(rollout.floor, self.desired.interrupt_below_version)
        assert len(self.rollouts("leased")) <= self.schedule.pool_size

    def generate(self) -> None:
        for rollout in self.rollouts("leased"):
            if rollout.generator is None:
                able = [i for i, version in enumerate(self.serving) if version >= rollout.floor]
                if not able:
                    continue
                rollout.generator = self.rng.choice(able)
            version = self.serving[rollout.generator]
            step = self.versions[version]
            rollout.oldest_step = step if rollout.oldest_step is None else min(rollout.oldest_step, step)
            rollout.newest_version = max(rollout.newest_version, version)
            rollout.tokens_left -= 1
            if rollout.tokens_left <= 0:
                rollout.state, rollout.generator = "finished", None
                self.finished += 1
                rollout.reward_ticks = self.rng.randrange(3)

    def score(self) -> None:
        for gid, group in self.in_state("open"):
            for member in group.members:
                if member.state == "finished":
                    member.reward_ticks -= 1
                    if member.reward_ticks < 0:
                        member.state = "scored"
            if all(m.state == "scored" for m in group.members):
                filtered = self.rng.random() < self.filter_chance
                group.state = "ready"
                if filtered:
                    del self.groups[gid]
                self.filtered_in_a_row = self.filtered_in_a_row + 1 if filtered else 0

    def train(self) -> None:
        if self.publishing and self.publishing[0] <= self.now:
            self.publishing.pop(0)
            self.versions.append(len(self.versions))
        if self.training is None and self.cut_step > self.trained_step:
            self.training = int(self.now) + self.rng.randint(0, self.train_ticks)
        if self.training is not None and self.training <= self.now:
            self.training = None
            self.trained_step += 1
            for gid in self.batches[self.trained_step - 1]:
                assert self.groups.pop(gid).state == "cut"
            self.publishing.append(int(self.now) + self.rng.randint(0, self.publish_ticks))

    def reload(self) -> None:
        newest = len(self.versions) - 1
        for i, version in enumerate(self.serving):
            if version < newest and self.rng.random() < self.reload_chance:
                self.serving[i] = newest

    def park(self, rollout: Rollout) -> None:
        rollout.generator = None
        rollout.state = "pending" if rollout.oldest_step is None else "partial"

    def crash(self) -> None:
        """A worker dies: its rollouts are leased again; some had not saved a token."""
        for rollout in self.rollouts("leased"):
            if self.rng.random() < 0.5:
                if self.rng.random() < 0.3:
                    rollout.oldest_step, rollout.newest_version = None, 0
                self.park(rollout)

    def run(self, ticks: int) -> None:
        """Tick until every group has ended; fails when that takes more than ``ticks``."""
        for _ in range(ticks):
            self.tick()
            ended = self.trained_step >= self.schedule.train_steps
            if ended and not self.groups:
                return
        raise AssertionError(f"not done after {ticks} ticks: {self.view()} {self.trace[-1]}")
