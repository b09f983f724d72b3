"""Random workers, leader and trainer on a real server that restarts, compared with the plain model after every step."""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from rollmesh.config.services import StoreConfig
from rollmesh.errors import Conflict, StoreUnavailable
from rollmesh.mesh import Cursor, Desired
from rollmesh.store import (
    Append,
    Finish,
    FirstToken,
    ReleaseReason,
    Score,
    TokenDigest,
    TrajectoryStore,
    WriteStatus,
)
from rollmesh.types import FinishReason, Segment

from .dump import copy_of_keys, put_back
from .lost_uploads import Forgetful
from .model import Memory, Model, ModelMember, Written
from .store_mesh import UNSCORABLE, group, held, limits, policy, scored, segment
from .stored_keys import read_truth

T = TypeVar("T")
STALENESS, ATTEMPTS = 2, 2
PICK = st.integers(0, 1 << 16)
REWARDS = st.sampled_from([0.0, 1.0, 1.0, 0.5, None])


def segments(content: Sequence[Written]) -> list[Segment]:
    return [segment(*written) for written in content]


def stated(m: ModelMember, written: Written) -> dict[str, Any]:
    """A save as its worker states it."""
    return {
        "token_offset": m.tokens,
        "segments": segments([written]),
        "incarnation": m.incarnation,
        "digest": TokenDigest().extended(segments(m.content)),
    }


class QueueMachine(RuleBasedStateMachine):
    """Every write is sent twice: the second time must change nothing."""

    url: ClassVar[str]
    group_size: ClassVar[int] = 2
    numbers: ClassVar[itertools.count[int]] = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.sessions: list[str] = []
        self.stalled: list[list[Memory]] = []
        """Memory of workers that have stalled past their TTL."""
        self.starts = itertools.count(step=1 << 14)
        self.registered: Counter[bool] = Counter()
        """Trajectories that were stated to the queue, by whether they were kept."""
        self.confirmed = False

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(call)

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

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.do(self.store.aclose())
        self.loop.close()

    # -- leader ---------------------------------------------------------------------------------------------------

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

    # -- trainer --------------------------------------------------------------------------------------------------

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

    # -- workers --------------------------------------------------------------------------------------------------

    @rule()
    def open_worker(self) -> None:
        if len(self.sessions) < 3:
            self.sessions.append(self.do(self.store.sessions.open("machine")))

    @rule(pick=PICK, limit=st.integers(1, 4))
    def lease(self, pick: int, limit: int) -> None:
        if self.sessions:
            session = self.sessions[pick % len(self.sessions)]
            leased = self.do(self.store.trajectories.lease(session, limit))
            assert [t.trajectory.trajectory_id for t in leased] == self.model.lease(session, limit)
            for t in leased:
                m = self.model.member(t.trajectory.trajectory_id)
                assert m is not None
                assert (t.attempt, t.trajectory.response_token_count) == (m.attempts, m.tokens)

    @rule(pick=PICK, tokens=st.integers(1, 5), age=st.integers(0, 3))
    def append(self, pick: int, tokens: int, age: int) -> None:
        trajectory_id = self.pick("leased", pick)
        if trajectory_id is None:
            return
        m = self.model.member(trajectory_id)
        assert m is not None
        assert m.session is not None
        written = self.write(tokens, max(0, len(self.model.version_steps) - 1 - age))
        item = Append(trajectory_id=trajectory_id, **stated(m, written))
        others = [replace(item, incarnation=m.incarnation + 1)]
        if m.tokens:
            others.append(replace(item, digest=TokenDigest().extended([segment(m.tokens, start=1)])))
        refused = [self.do(self.store.trajectories.append(m.session, [other]))[0] for other in others]
        assert {(r.status, r.saved_token_count) for r in refused} == {(WriteStatus.REFUSED, m.tokens)}
        statuses = [self.do(self.store.trajectories.append(m.session, [item]))[0].status for _ in range(2)]
        assert statuses == [WriteStatus.SAVED, WriteStatus.DUPLICATE]
        self.model.save(trajectory_id, written)

    @rule(pick=PICK, age=st.integers(0, 3))
    def report_first_token(self, pick: int, age: int) -> None:
        trajectory_id = self.pick("leased", pick)
        m = trajectory_id and self.model.member(trajectory_id)
        if not m or m.tokens or m.session is None:
            return
        version = max(0, len(self.model.version_steps) - 1 - age)
        item = FirstToken(trajectory_id=trajectory_id, policy_version=version)
        assert self.do(self.store.trajectories.report_first_tokens(m.session, [item]))[0].status is WriteStatus.SAVED
        self.model.begin(trajectory_id, version)

    @rule(pick=PICK, tokens=st.integers(1, 3))
    def finish(self, pick: int, tokens: int) -> None:
        trajectory_id = self.pick("leased", pick)
        if trajectory_id is None:
            return
        m = self.model.member(trajectory_id)
        assert m is not None
        assert m.session is not None
        written = self.write(tokens, len(self.model.version_steps) - 1)
        item = Finish(trajectory_id=trajectory_id, finish_reason=FinishReason.STOP, **stated(m, written))
        other = replace(item, incarnation=m.incarnation + 1)
        assert self.do(self.store.trajectories.finish(m.session, [other]))[0].status == WriteStatus.REFUSED
        statuses = [self.do(self.store.trajectories.finish(m.session, [item]))[0].status for _ in range(2)]
        assert statuses == [WriteStatus.SAVED, WriteStatus.DUPLICATE]
        self.model.save(trajectory_id, written)
        m.state = "finished"

    @rule(pick=PICK, ends=st.booleans())
    def lose_the_last_upload(self, pick: int, ends: bool) -> None:
        """A worker saves all that it holds; Redis forgets one upload before the script, so all of it is sent again."""
        trajectory_id = self.pick("leased", pick)
        m = trajectory_id and self.model.member(trajectory_id)
        if not m or m.session is None:
            return
        session, version = m.session, len(self.model.version_steps) - 1
        ids = self.model.ids("leased", session=session)
        redis = Forgetful(
            self.store, "finish" if ends else "append", self.store.connection.keys.of("chunk", f"{ids[-1]}:*")
        )
        items: list[Append | Finish] = []
        for each in ids:
            tokens = 9_000 if each == ids[-1] else 2
            m = self.model.member(each)
            assert m is not None
            written = self.write(tokens, version)
            words = {"trajectory_id": each, **stated(m, written)}
            items.append(Finish(**words, finish_reason=FinishReason.STOP) if ends else Append(**words))
            self.model.save(each, written)
            m.state = "finished" if ends else "leased"
        write = self.store.trajectories.finish if ends else self.store.trajectories.append
        assert {r.status for r in self.do(write(session, items))} == {WriteStatus.SAVED}
        assert redis.refused == 1

    @rule(pick=PICK, reward=REWARDS)
    def score(self, pick: int, reward: float | None) -> None:
        trajectory_id = self.pick("finished", pick)
        if trajectory_id is None:
            return
        m = self.model.member(trajectory_id)
        assert m is not None
        if m.session is None:
            return
        outcome = UNSCORABLE if reward is None else scored(reward)
        item = Score(trajectory_id=trajectory_id, outcome=outcome, shaped_reward=reward or 0.0)
        first, second = (self.do(self.store.trajectories.score(m.session, [item]))[0].status for _ in range(2))
        self.model.score(trajectory_id, reward)
        group_is_there = self.model.member(trajectory_id) or trajectory_id.rpartition(".")[0] in self.model.half_gone
        assert (first, second) == (WriteStatus.SAVED, WriteStatus.DUPLICATE if group_is_there else WriteStatus.LOST)

    @rule(rewards=st.lists(REWARDS, min_size=1, max_size=6))
    def complete(self, rewards: list[float | None]) -> None:
        """Several trajectories in one go, so that groups complete within a short history."""
        if not self.model.ids("pending", "partial", "leased", "finished"):
            self.admit(2, 2)
        for at, reward in enumerate(rewards):
            if not self.model.ids("leased", "finished"):
                self.set_pool(6, False)
                self.open_worker()
                self.lease(at, 4)
            self.append(0, 2, at)
            self.finish(0, 1)
            self.score(0, reward)

    @rule(pick=PICK, reason=st.sampled_from(ReleaseReason))
    def release(self, pick: int, reason: ReleaseReason) -> None:
        trajectory_id = self.pick("leased", pick)
        if trajectory_id is not None:
            m = self.model.member(trajectory_id)
            assert m is not None
            assert m.session is not None
            session = m.session
            assert self.do(self.store.trajectories.release(session, [trajectory_id], reason)) == 1
            assert self.do(self.store.trajectories.release(session, [trajectory_id], reason)) == 0
            self.model.give_back(trajectory_id, free_attempt=reason is not ReleaseReason.FAILED)

    @rule(pick=PICK)
    def fail(self, pick: int) -> None:
        trajectory_id = self.pick("leased", pick)
        if trajectory_id is not None:
            m = self.model.member(trajectory_id)
            assert m is not None
            assert m.session is not None
            session = m.session
            assert self.do(self.store.trajectories.fail(session, [(trajectory_id, "broken")])) == 1
            assert self.do(self.store.trajectories.fail(session, [(trajectory_id, "broken")])) == 0
            self.model.lose_member(trajectory_id, "dead")

    @rule(pick=PICK)
    def restart(self, pick: int) -> None:
        trajectory_id = self.pick("leased", pick)
        if trajectory_id is not None:
            m = self.model.member(trajectory_id)
            assert m is not None
            assert m.session is not None
            session, incarnation = m.session, self.model.restart(trajectory_id)
            for _ in range(2):
                assert self.do(self.store.trajectories.restart(session, [trajectory_id])) == [incarnation]

    @rule(pick=PICK, limit=st.integers(1, 3))
    def take_over_scoring(self, pick: int, limit: int) -> None:
        if self.sessions:
            session = self.sessions[pick % len(self.sessions)]
            got = [t.trajectory.trajectory_id for t in self.do(self.store.trajectories.lease_scoring(session, limit))]
            assert got == self.model.lease_scoring(session, limit)

    @rule(pick=PICK, dies=st.booleans())
    def lose_worker(self, pick: int, dies: bool) -> None:
        if not self.sessions:
            return
        session = self.sessions.pop(pick % len(self.sessions))
        if dies:
            self.expire(session)
        else:
            self.do(self.store.sessions.close(session))
            for trajectory_id in self.model.ids("leased", "finished", session=session):
                self.model.give_back(trajectory_id, free_attempt=True)

    def expire(self, session: str) -> None:
        """Let one TTL pass over a session, and the leader give back what it held."""
        keys = self.store.connection.keys
        self.do(self.store.connection.command("ZADD", keys.single("sessions"), 1, session))
        self.do(self.store.connection.command("HSET", keys.single("meta"), "leader_since", 1))
        for _ in range(2):
            self.do(self.store.leadership.reap(self.leader))
        for gid in list(self.model.half_gone):
            self.model.sweep(gid, 1 << 12)
        for trajectory_id in self.model.ids("leased", "finished", session=session):
            self.model.give_back(trajectory_id, free_attempt=False)

    @rule(pick=PICK)
    def stall(self, pick: int) -> None:
        """A worker stalls past its TTL; it may have sampled a few tokens more than it has saved."""
        if self.sessions:
            session = self.sessions.pop(pick % len(self.sessions))
            memories = [
                m._replace(content=(*m.content, self.write(2, 0))) if pick % 3 == 0 else m
                for m in self.model.held_by(session)
            ]
            if memories:
                self.stalled.append(memories)
            self.expire(session)

    @rule(pick=PICK)
    def wake(self, pick: int) -> None:
        """A worker that stalled registers under another session, whatever others have done to its trajectories."""
        if self.stalled:
            session = self.do(self.store.sessions.open("machine"))
            self.sessions.append(session)
            self.register(session, self.stalled.pop(pick % len(self.stalled)))

    def register(self, session: str, memories: list[Memory]) -> None:
        expected = self.model.reregister(session, memories)
        named = [held(m.trajectory_id, *segments(m.content), incarnation=m.incarnation) for m in memories]
        answers = self.do(self.store.sessions.reregister(session, named))
        assert [(a.kept, a.saved_token_count) for a in answers] == expected
        self.registered.update(kept for kept, _ in expected)

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

    def write(self, tokens: int, version: int) -> Written:
        return Written(tokens, version, next(self.starts))

    def pick(self, state: str, number: int) -> str | None:
        ids = self.model.ids(state)
        return ids[number % len(ids)] if ids else None

    # -- after every step -----------------------------------------------------------------------------------------

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
