"""Random workers, leader and trainer on a real server that restarts, compared with the plain model after every step."""

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from rollmesh.config.store import StoreConfig
from rollmesh.errors import Conflict, StoreUnavailable
from rollmesh.group_outcome import GroupOutcome
from rollmesh.mesh import Cursor, Desired, ResumeOrder
from rollmesh.prompt_history import PromptOutcome
from rollmesh.sim.queue_model import GroupState, ModelGroup
from rollmesh.store import ReleaseReason, TrajectoryStore
from rollmesh.store.leadership import MEMBERS_PER_SWEEP
from rollmesh.store.payload import encode_prompt

from ...kit.whole_queue_model import HeldSaves, WholeQueueModel
from .compared_queue import ComparedQueue
from .queue_workers import PICK, kept_scores
from .store_mesh import column_bytes, copy_of_keys, group, limits, policy, put_back

ATTEMPTS = 2
FORGOTTEN = ("append", "restart", "release", "lease", "report_waiting", "finish", "begin_again", "set_aside", "recall")
"""Steps that Redis may forget: of the workers, and of the leader with groups that begin again."""


class QueueMachine(ComparedQueue):
    """A leader, a trainer and a Redis that restarts, beside the workers."""

    max_staleness: ClassVar[int] = 2
    outcomes: list[PromptOutcome]
    """Outcomes in the newest batch file."""
    rollbacks = 0
    beyond_pool = 0
    """Leases beyond a full pool."""

    @initialize(
        filtering=st.booleans(),
        pool=st.integers(2, 6),
        most_members=st.sampled_from([0, 6]),
        resume=st.sampled_from(ResumeOrder),
    )
    def begin(self, filtering: bool, pool: int, most_members: int, resume: ResumeOrder = ResumeOrder.ADMISSION) -> None:
        run = f"machine-{next(self.numbers)}"
        self.store = self.do(TrajectoryStore.connect(StoreConfig(), run=run, url=self.url))
        rules = limits(
            group_size=self.group_size,
            max_staleness=self.max_staleness,
            max_attempts=ATTEMPTS,
            filter_zero_variance=filtering,
            keeps_history=True,
            resume_order=resume,
            session_ttl_seconds=3600.0,
            most_members=most_members,
            has_rounds=True,
        )
        self.model = WholeQueueModel(rules)
        self.cursor = 0
        self.do(self.store.limits.init_run(rules))
        leader = self.do(self.store.leadership.acquire("machine"))
        assert leader is not None
        self.leader = leader
        self.trainer = self.do(self.store.training.open_session("machine"))
        self.publish()
        self.set_pool(pool, False)
        self.open_worker()

    @precondition(lambda self: self.model.admitted_unconsumed < 8)
    @rule(
        count=st.integers(1, 3),
        needed=st.integers(1, 3),
        spare=st.sampled_from([0, 0, 1, 2]),
        rank=st.none() | st.integers(0, 127),
        rounds=st.booleans(),
    )
    def admit(self, count: int, needed: int, spare: int, rank: int | None = None, rounds: bool = False) -> None:
        first = self.cursor
        known: dict[str, Any] = {} if rank is None else {"start_rank": rank, "expected_tokens": rank / 8}
        plan = json.dumps({"first": first}) if rounds else None
        groups = [replace(group(first + i, needed, spare=spare), plan=plan, **known) for i in range(count)]
        assert (
            self.do(self.store.leadership.admit(self.leader, groups, Cursor(index=first), Cursor(index=first + count)))
            == count
        )
        with pytest.raises(Conflict):
            self.do(self.store.leadership.admit(self.leader, groups, Cursor(index=first), Cursor(index=first + count)))
        self.cursor += count
        for g in groups:
            size = len(encode_prompt(g.prompt))
            known["plan"] = plan
            self.model.admit(g.group_id, needed, spare=spare, prompt_bytes=size, prompt_id=g.prompt.prompt_id, **known)

    @rule(pool=st.integers(1, 8), paused=st.sampled_from([False, False, False, True]), most_waiting=st.integers(0, 3))
    def set_pool(self, pool: int, paused: bool, most_waiting: int = 0) -> None:
        desired = Desired(
            pool_size=pool,
            most_waiting=most_waiting,
            paused=paused,
            interrupt_below_version=pool,
            start_at_version=max(0, self.model.policy_version - pool),
            rest_before_step=self.model.version_steps[-1] + 1 - pool % 2,
            reason=f"pool {pool}",
            waiting_for="groups",
        )
        blocked_by = f"due {pool}" if pool % 2 else ""
        self.model.set_desired(desired, blocked_by)
        self.do(self.store.leadership.set_desired(self.leader, desired, blocked_by))

    @rule(pick=PICK, most_waiting=st.integers(0, 3), waiting=st.integers(0, 3))
    def lease_beyond_a_full_pool(self, pick: int, most_waiting: int, waiting: int) -> None:
        """Lease in a pool that is full, while trajectories of the same worker wait for their tools."""
        if not self.ids("pending", "partial") and self.model.admitted_unconsumed < 8:
            self.admit(2, 2, 0)
        self.set_pool(max(1, self.model.leased), False, most_waiting)
        self.report_waiting(pick, waiting)
        self.lease(pick, 4)
        self.beyond_pool += self.model.leased > self.model.desired.pool_size

    @rule(pick=PICK)
    def evict(self, pick: int) -> None:
        candidates = self.group_ids()
        if candidates and pick % 3 == 0:
            gid = candidates[pick % len(candidates)]
            for _ in range(2):
                evicted = self.do(self.store.leadership.evict(self.leader, [gid], "straggler"))
                assert evicted == self.model.evict([gid], "straggler")

    @rule(pick=PICK, aside=st.booleans())
    def begin_again(self, pick: int, aside: bool) -> None:
        """Restart groups or set them aside: those over the bound begin again, and a retry changes nothing."""
        gids = self.group_ids()[pick % 3 :]
        call = self.store.restarted.set_aside if aside else self.store.restarted.restart
        for _ in range(2):
            begun = self.model.begin_again(gids, aside=aside)
            while any([self.model.sweep_returning(gid, MEMBERS_PER_SWEEP) for gid in begun]):
                pass
            assert self.do(call(self.leader, gids)) == len(begun)
            self.begun_again[aside] += len(begun)

    @rule(count=st.integers(1, 3))
    def recall(self, count: int) -> None:
        step = self.model.cut_step + 1
        for _ in range(2):
            opened = self.model.recall(step, count)
            assert self.do(self.store.restarted.recall(self.leader, step, count)) == opened
            self.recalled += opened
        with pytest.raises(Conflict):
            self.model.recall(step + 1, count)
        with pytest.raises(Conflict):
            self.do(self.store.restarted.recall(self.leader, step + 1, count))

    @precondition(lambda self: self.model.undecided)
    @rule(pick=PICK, more=st.integers(1, 3), spare=st.integers(0, 1))
    def extend(self, pick: int, more: int, spare: int) -> None:
        """Begin the next round of an undecided group; a retry, and an older leader's decision, change nothing."""
        found = self.undecided_group(pick)
        needed, plan = len(found.members) + max(1, more - spare), json.dumps({"pick": pick})
        arguments = (found.group_id, found.round, needed, more, plan)
        try:
            assert self.model.extend_group(*arguments)
        except Conflict:
            with pytest.raises(Conflict):
                self.do(self.store.rounds.extend(self.leader, found, needed, more, plan))
            return
        assert [self.do(self.store.rounds.extend(self.leader, found, needed, more, plan)) for _ in range(2)] == [
            True,
            False,
        ]
        assert not self.do(self.store.rounds.close(self.leader, found))
        self.decided["extended"] += 1

    @precondition(lambda self: self.model.undecided)
    @rule(pick=PICK, shape=st.sampled_from(["none", "rewards", "kept"]))
    def close(self, pick: int, shape: str) -> None:
        """Close an undecided group, perhaps with other rewards and shorter answers."""
        found = self.undecided_group(pick)
        rewards = None if shape == "none" else [m.shaped_reward - m.member_index % 2 / 4 for m in found.members]
        kept = [max(1, m.token_count - pick % 4) for m in found.members] if shape == "kept" else None
        assert self.model.close_group(found.group_id, found.round, rewards, kept)
        assert [self.do(self.store.rounds.close(self.leader, found, rewards, kept)) for _ in range(2)] == [True, False]
        self.decided[shape] += 1

    def undecided_group(self, pick: int) -> GroupOutcome:
        """An undecided group as the leader reads it, which is as the model has it."""
        groups = self.do(self.store.rounds.undecided())
        seen = [(m.member_index, m.round, m.shaped_reward, m.token_count) for each in groups for m in each.members]
        expected = self.model.oldest_undecided(64)
        scored = [m for each in expected for m in each.members if m.state == "scored"]
        assert seen == [(m.number, m.group.round_of(m), m.reward, m.tokens) for m in scored]
        assert [(g.group_id, g.round, g.launched) for g in groups] == [
            (g.group_id, len(g.rounds) - 1, len(g.members)) for g in expected
        ]
        return groups[pick % len(groups)]

    @precondition(lambda self: self.ready())
    @rule(count=st.integers(1, 3))
    def cut(self, count: int) -> None:
        gids = [group.group_id for group in self.ready()[:count]]
        step = self.model.cut_step + 1
        try:
            self.model.cut(step, gids)
        except Conflict:
            with pytest.raises(Conflict):
                self.do(self.store.leadership.cut(self.leader, step, gids))
            return
        for _ in range(2):
            self.do(self.store.leadership.cut(self.leader, step, gids))

    @rule()
    def change_leader(self) -> None:
        self.do(self.store.leadership.resign(self.leader))
        leader = self.do(self.store.leadership.acquire("next"))
        assert leader is not None
        self.leader = leader
        self.model.change_leader()

    @rule(rolled_back=st.booleans())
    def publish(self, rolled_back: bool = False) -> None:
        self.rollbacks += rolled_back
        version = self.model.announce(self.model.trained_step, rollback_count=self.rollbacks)
        record = policy(version, self.model.trained_step, rollbacks=self.rollbacks)
        for _ in range(2):
            self.do(self.store.policies.announce(self.trainer, record))

    @precondition(lambda self: self.model.claim())
    @rule()
    def claim(self) -> None:
        step = self.model.cut_step
        for _ in range(2):
            batch = self.do(self.store.training.claim(self.trainer, step, 1.0))
            assert batch is not None
            assert [
                {
                    t.trajectory_id: (t.response_token_count, t.shaped_reward, column_bytes(t.teacher))
                    for t in got.trajectories
                }
                for got in batch.groups
            ] == [
                {
                    m.trajectory_id: (
                        kept := m.tokens if m.kept_tokens is None else m.kept_tokens,
                        m.reward,
                        kept_scores(m, kept),
                    )
                    for m in group.members
                    if m.state == "scored"
                }
                for group in self.model.claim()
            ]
        self.model.confirm_batch_file()
        for _ in range(2):
            self.do(self.store.training.confirm_batch_file(self.trainer, step, f"digest-{step}"))
        self.outcomes = self.do(self.store.prompt_records.unsaved(self.trainer, step))
        assert self.outcomes == self.model.history.save()
        run_id = self.do(self.store.recovery.server_run_id())
        for _ in range(2):
            self.do(self.store.prompt_records.save(self.trainer, step, self.outcomes, run_id))

    @precondition(lambda self: self.model.batch_is_confirmed)
    @rule()
    def train(self) -> None:
        self.let_time_pass(1)  # No update of a moment: the time to ready is also counted in whole updates.
        for _ in range(2):
            self.do(self.store.training.report_trained(self.trainer, self.model.cut_step))
        self.model.report_trained()

    @precondition(lambda self: self.ready() and not self.model.batch)
    @rule(count=st.integers(1, 3))
    def whole_step(self, count: int) -> None:
        """Evict what is too stale, then from the cut to the next policy version."""
        for found in self.ready():
            if found.step is not None and found.step < self.model.cut_step - self.max_staleness:
                self.do(self.store.leadership.evict(self.leader, [found.group_id], "stale"))
                self.model.evict([found.group_id], "stale")
        if not self.ready():
            return
        self.cut(count)
        if self.model.batch:
            self.claim()
            self.train()
            self.publish()

    @precondition(lambda self: not self.model.batch_is_confirmed)
    @rule()
    def roll_back(self) -> None:
        """All open and ready groups go; a leader that looks between two slices finds nothing that it could cut."""
        unclaimed = self.model.roll_back()
        dropped, left = self.do(self.store.connection.run("roll_back", self.trainer, 1, "a trainer that dies half-way"))
        if left:
            seen = self.do(self.store.mesh.view())
            assert seen.rolling_back and seen.ready == ()
        assert dropped + self.do(self.store.training.roll_back(self.trainer)) == unclaimed
        assert self.do(self.store.training.roll_back(self.trainer)) == self.model.roll_back() == 0

    @rule(pick=PICK, steps=st.lists(st.sampled_from(FORGOTTEN), max_size=6))
    def redis_forgets(self, pick: int, steps: list[str]) -> None:
        """Redis comes back from before the newest steps, which the workers have not forgotten."""
        before, model = self.do(copy_of_keys(self.store)), copy.deepcopy(self.model)
        calls: dict[str, Callable[[], None]] = {
            "append": lambda: self.append(pick, tokens=2, age=0),
            "restart": lambda: self.restart(pick),
            "release": lambda: self.release(pick, ReleaseReason.FAILED),
            "lease": lambda: self.lease(pick, limit=2),
            "report_waiting": lambda: self.report_waiting(pick, waiting=pick % 4),
            "finish": lambda: self.finish(pick, tokens=1),
            "begin_again": lambda: self.begin_again(pick, aside=False),
            "set_aside": lambda: self.begin_again(pick, aside=True),
            "recall": lambda: self.recall(count=2),
        }
        for step in steps:
            calls[step]()
        memories = {session: self.model.held_by(session) for session in self.sessions}
        self.do(put_back(self.store, before))
        self.model = model
        self.redis_comes_back(memories)

    @rule(pick=PICK)
    def redis_restarts(self, pick: int) -> None:
        """Redis comes back as another server, in the state in which it went; a worker may have forgotten a lease."""
        memories = {}
        for session in self.sessions:
            memories[session] = self.model.held_by(session)
            if memories[session] and pick % 2:
                memories[session].pop(pick % len(memories[session]))
        self.redis_comes_back(memories)

    def redis_comes_back(self, memories: dict[str, list[HeldSaves]]) -> None:
        command, meta = self.store.connection.command, self.store.connection.keys.single("meta")
        self.do(command("HSET", meta, "run_id", "another"))
        first = self.cursor
        with pytest.raises(StoreUnavailable):
            self.do(
                self.store.leadership.admit(self.leader, [group(first)], Cursor(index=first), Cursor(index=first + 1))
            )
        for session in self.sessions:
            assert self.do(self.store.trajectories.lease(session, 2)) == []
            self.model.recovering = True
            for _ in range(2):
                self.register(session, memories[session])
            self.model.recovering = False
        self.reassert()
        self.do(command("HSET", meta, "recovering_until", 1))
        assert not self.do(self.store.recovery.begin())
        self.do(command("HSET", meta, "quiet_until", 1))

    def reassert(self) -> None:
        """The trainer states what it has: the policies, and the batch file that it has not trained on yet."""
        step = self.model.cut_step
        batches = [(step, self.model.batch)] if self.model.batch_is_confirmed else []
        for _ in range(2):
            state = self.do(
                self.store.training.reassert(
                    self.trainer,
                    committed_step=self.model.trained_step,
                    trained_step=self.model.trained_step,
                    batches=batches,
                    policies=[policy(v, s) for v, s in enumerate(self.model.version_steps)],
                    cursor=Cursor(index=self.cursor),
                    digests=[f"digest-{step}" for _ in batches],
                    outcomes=[self.outcomes for _ in batches],
                )
            )
            assert (state.trained_step, state.cut_step, state.recovering) == (self.model.trained_step, step, True)

    def group_ids(self) -> list[str]:
        """Groups in any state, in admission order."""
        groups = [group for by_id in self.model.groups.values() for group in by_id.values()]
        return [group.group_id for group in sorted(groups, key=lambda group: group.index)]

    def ready(self) -> list[ModelGroup]:
        """Ready groups in admission order."""
        return sorted(self.model.groups[GroupState.READY].values(), key=lambda group: group.index)
