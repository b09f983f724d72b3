"""Random workers, leader and trainer on a real server that restarts, compared with the plain model after every step."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    initialize,
    invariant,
    precondition,
    rule,
)

from rollmesh.config.services import StoreConfig
from rollmesh.errors import Conflict, StoreUnavailable
from rollmesh.mesh import Cursor, Desired
from rollmesh.store import (
    ReleaseReason,
    TokenDigest,
    TrajectoryStore,
)

from .dump import copy_of_keys, put_back
from .model import Memory, Model
from .queue_workers import PICK, QueueWorkers, segments
from .store_mesh import group, limits, policy
from .stored_keys import read_truth

STALENESS, ATTEMPTS = 2, 2


class QueueMachine(QueueWorkers):
    """A leader, a trainer and a Redis that restarts, beside the workers."""

    @initialize(filtering=st.booleans(), pool=st.integers(2, 6))
    def begin(self, filtering: bool, pool: int) -> None:
        run = f"machine-{next(self.numbers)}"
        self.store = self.do(TrajectoryStore.connect(StoreConfig(), run=run, url=self.url))
        self.model = Model(max_attempts=ATTEMPTS, filter_zero_variance=filtering)
        self.do(
            self.store.limits.init_run(
                limits(
                    group_size=self.group_size,
                    max_staleness=STALENESS,
                    max_attempts=ATTEMPTS,
                    filter_zero_variance=filtering,
                    session_ttl_seconds=3600.0,
                )
            )
        )
        leader = self.do(self.store.leadership.acquire("machine"))
        assert leader is not None
        self.leader = leader
        self.trainer = self.do(self.store.training.open_session("machine"))
        self.publish()
        self.set_pool(pool, False)
        self.open_worker()

    @precondition(lambda self: len(self.model.groups) < 8)
    @rule(count=st.integers(1, 3), needed=st.integers(2, 3))
    def admit(self, count: int, needed: int) -> None:
        first = self.model.cursor
        groups = [group(first + i, needed) for i in range(count)]
        assert (
            self.do(self.store.leadership.admit(self.leader, groups, Cursor(index=first), Cursor(index=first + count)))
            == count
        )
        with pytest.raises(Conflict):
            self.do(self.store.leadership.admit(self.leader, groups, Cursor(index=first), Cursor(index=first + count)))
        self.model.cursor += count
        for g in groups:
            self.model.admit(g.group_id, needed)

    @rule(pool=st.integers(1, 8), paused=st.sampled_from([False, False, False, True]))
    def set_pool(self, pool: int, paused: bool) -> None:
        self.model.pool_size, self.model.paused = pool, paused
        self.do(self.store.leadership.set_desired(self.leader, Desired(pool_size=pool, paused=paused)))

    @rule(pick=PICK)
    def evict(self, pick: int) -> None:
        candidates = [gid for gid, g in self.model.groups.items() if g.state != "cut"]
        if candidates and pick % 3 == 0:
            gid = candidates[pick % len(candidates)]
            assert self.do(self.store.leadership.evict(self.leader, [gid], "straggler")) == 1
            assert self.do(self.store.leadership.evict(self.leader, [gid], "straggler")) == 0
            self.model.drop(gid, "straggler")

    @precondition(lambda self: self.model.ready())
    @rule(count=st.integers(1, 3))
    def cut(self, count: int) -> None:
        gids = self.model.ready()[:count]
        step = self.model.cut_step + 1
        oldest = min(s for gid in gids if (s := self.model.groups[gid].lowest_step) is not None)
        allowed = self.model.cut_step == self.model.trained_step and step - 1 - oldest <= STALENESS
        if not allowed:
            with pytest.raises(Conflict):
                self.do(self.store.leadership.cut(self.leader, step, gids))
            return
        for _ in range(2):
            self.do(self.store.leadership.cut(self.leader, step, gids))
        self.model.cut(gids)
        self.confirmed = False

    @rule()
    def change_leader(self) -> None:
        self.do(self.store.leadership.resign(self.leader))
        leader = self.do(self.store.leadership.acquire("next"))
        assert leader is not None
        self.leader = leader

    @rule()
    def publish(self) -> None:
        version = len(self.model.version_steps)
        for _ in range(2):
            self.do(self.store.policies.announce(self.trainer, policy(version, self.model.trained_step)))
        self.model.version_steps.append(self.model.trained_step)

    @precondition(lambda self: self.model.cut_groups and not self.confirmed)
    @rule()
    def claim(self) -> None:
        step = self.model.cut_step
        for _ in range(2):
            batch = self.do(self.store.training.claim(self.trainer, step, 1.0))
            assert batch is not None
            assert [g.group_id for g in batch.groups] == self.model.cut_groups
            for got in batch.groups:
                expected = {
                    f"{got.group_id}.{number}": (m.tokens, m.reward)
                    for number, m in enumerate(self.model.groups[got.group_id].members)
                    if m.state == "scored"
                }
                assert {
                    t.trajectory_id: (t.response_token_count, t.shaped_reward) for t in got.trajectories
                } == expected
        for _ in range(2):
            self.do(self.store.training.confirm_batch_file(self.trainer, step, f"digest-{step}"))
        self.confirmed = True

    @precondition(lambda self: self.model.cut_groups and self.confirmed)
    @rule()
    def train(self) -> None:
        for _ in range(2):
            self.do(self.store.training.report_trained(self.trainer, self.model.cut_step))
        self.model.trained()

    @precondition(lambda self: self.model.ready() and not self.model.cut_groups)
    @rule(count=st.integers(1, 3))
    def whole_step(self, count: int) -> None:
        """Evict what is too stale, then from the cut to the next policy version."""
        for gid in self.model.ready():
            step = self.model.groups[gid].lowest_step
            if step is not None and step < self.model.cut_step - STALENESS:
                self.do(self.store.leadership.evict(self.leader, [gid], "stale"))
                self.model.drop(gid, "stale")
        if not self.model.ready():
            return
        self.cut(count)
        if self.model.cut_groups:
            self.claim()
            self.train()
            self.publish()

    @precondition(lambda self: not (self.model.cut_groups and self.confirmed))
    @rule()
    def roll_back(self) -> None:
        """Everything unclaimed goes; a leader that looks between two slices finds nothing that it could cut."""
        unclaimed = list(self.model.groups)
        dropped, left = self.do(self.store.connection.run("roll_back", self.trainer, 1, "a trainer that dies half-way"))
        if left:
            assert self.do(self.store.mesh.view()).ready == ()
        assert dropped + self.do(self.store.training.roll_back(self.trainer)) == len(unclaimed)
        assert self.do(self.store.training.roll_back(self.trainer)) == 0
        for gid in unclaimed:
            self.model.drop(gid, "rolled_back")
        self.model.cut_groups, self.model.cut_step = [], self.model.trained_step

    @rule(pick=PICK, steps=st.lists(st.sampled_from(["append", "restart", "release", "lease", "finish"]), max_size=6))
    def redis_forgets(self, pick: int, steps: list[str]) -> None:
        """Redis comes back from before the newest steps of the workers, who have not forgotten them."""
        before, model = self.do(copy_of_keys(self.store)), copy.deepcopy(self.model)
        for step in steps:
            arguments: dict[str, dict[str, Any]] = {
                "append": {"tokens": 2, "age": 0},
                "finish": {"tokens": 1},
                "release": {"reason": ReleaseReason.FAILED},
                "lease": {"limit": 2},
            }
            getattr(self, step)(pick=pick, **arguments.get(step, {}))
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

    def redis_comes_back(self, memories: dict[str, list[Memory]]) -> None:
        command, meta = self.store.connection.command, self.store.connection.keys.single("meta")
        self.do(command("HSET", meta, "run_id", "another"))
        first = self.model.cursor
        with pytest.raises(StoreUnavailable):
            self.do(
                self.store.leadership.admit(self.leader, [group(first)], Cursor(index=first), Cursor(index=first + 1))
            )
        for session in self.sessions:
            assert self.do(self.store.trajectories.lease(session, 2)) == []
            for _ in range(2):
                self.register(session, memories[session])
        self.reassert()
        self.do(command("HSET", meta, "recovering_until", 1))
        assert not self.do(self.store.recovery.begin())
        self.do(command("HSET", meta, "quiet_until", 1))

    def reassert(self) -> None:
        """The trainer states what it has: the policies, and the batch file that it has not trained on yet."""
        step = self.model.cut_step
        batches = [(step, self.model.cut_groups)] if self.model.cut_groups and self.confirmed else []
        for _ in range(2):
            state = self.do(
                self.store.training.reassert(
                    self.trainer,
                    committed_step=self.model.trained_step,
                    trained_step=self.model.trained_step,
                    batches=batches,
                    policies=[policy(v, s) for v, s in enumerate(self.model.version_steps)],
                    cursor=Cursor(index=self.model.cursor),
                    digests=[f"digest-{step}" for _ in batches],
                )
            )
            assert (state.trained_step, state.cut_step, state.recovering) == (self.model.trained_step, step, True)

    @invariant()
    def the_queue_agrees_with_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        truth = self.do(read_truth(self.store))
        assert truth.problems == []
        assert truth.groups == {gid: g.state for gid, g in self.model.groups.items()}
        assert truth.tombstones == set(self.model.gone)
        for trajectory_id, record in truth.members.items():
            m = self.model.member(trajectory_id)
            assert m is not None
            assert (record.state, record.tokens) == (m.state, m.tokens)
            if m.state != "dead":
                assert record.digest == TokenDigest().extended(segments(m.content))
            if m.state in ("leased", "finished"):
                assert record.session == m.session

    @invariant()
    def the_view_agrees_with_the_model(self) -> None:
        if not hasattr(self, "store"):
            return
        view = self.do(self.store.mesh.view())
        model = self.model
        assert view.leased == model.leased()
        assert (view.pending, view.partial) == (len(model.ids("pending")), len(model.ids("partial")))
        assert view.finished == model.count("finished")
        assert view.admitted_unconsumed == len(model.groups)
        assert view.ready_groups == len(model.ready())
        prefix = [(g.group_id, g.min_train_step) for g in view.ready][:4]
        assert prefix == [(gid, model.groups[gid].lowest_step) for gid in model.ready()][:4]
        dropped = self.do(self.store.ledger.dropped_groups())
        noted = {gid: why for gid, why in model.gone.items() if gid not in model.half_gone}
        assert dropped == {gid: why for gid, why in noted.items() if why != "consumed"}
        assert +Counter(self.do(self.store.mesh.counts()).dropped_tokens) == +model.wasted
