"""Random workers on a real queue, compared with the plain model after every step."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    rule,
)

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

from .lost_uploads import Forgetful
from .model import Memory, Model, ModelMember, Written
from .store_mesh import UNSCORABLE, held, scored, segment

T = TypeVar("T")

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


class QueueWorkers(RuleBasedStateMachine):
    """Workers of the queue: leases, saves, scores, stalls and deaths.

    Every write is sent twice: the second time must change nothing.
    """

    url: ClassVar[str]
    group_size: ClassVar[int] = 2
    numbers: ClassVar[itertools.count[int]] = itertools.count()
    store: TrajectoryStore
    model: Model
    leader: Any

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

    def write(self, tokens: int, version: int) -> Written:
        return Written(tokens, version, next(self.starts))

    def pick(self, state: str, number: int) -> str | None:
        ids = self.model.ids(state)
        return ids[number % len(ids)] if ids else None

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(call)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.do(self.store.aclose())
        self.loop.close()
