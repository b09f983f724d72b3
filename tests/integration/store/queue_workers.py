"""Random workers on a real queue, compared with the plain model after every step."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, ClassVar, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from rollmesh.sim.queue_model import GroupState, ModelMember, Save
from rollmesh.store import Append, Finish, FirstToken, ReleaseReason, Score, TokenDigest, TrajectoryStore, WriteStatus
from rollmesh.store.leadership import MEMBERS_PER_SWEEP
from rollmesh.store.payload import encode_segments
from rollmesh.types import FinishReason, ForkStatus, Segment
from rollmesh.v1.trajectory_pb2 import TeacherColumn

from ...kit.whole_queue_model import HeldSaves, WholeQueueModel
from .store_mesh import UNSCORABLE, Forgetful, column, column_bytes, held, scored, segment

T = TypeVar("T")

PICK = st.integers(0, 1 << 16)

REWARDS = st.sampled_from([0.0, -0.0, 1.0, 1.0, 0.5, None])


def segments(saves: Sequence[Save]) -> list[Segment]:
    return [segment(*save) for save in saves]


def stated(m: ModelMember, save: Save) -> dict[str, Any]:
    """A save as its worker states it."""
    return {
        "token_offset": m.tokens,
        "segments": segments([save]),
        "incarnation": m.incarnation,
        "digest": TokenDigest().extended(segments(m.saves)),
    }


def byte_count(save: Save) -> int:
    """Payload bytes of a save in Redis."""
    return encode_segments(segments([save])).byte_count


def kept_scores(m: ModelMember, tokens: int) -> bytes:
    """Return the teacher's scores of the first tokens of a member, as Redis would have them."""
    if not m.teacher:
        return b""
    return column_bytes(column(tokens, TeacherColumn.FromString(m.teacher).top_k))


class QueueWorkers(RuleBasedStateMachine):
    """Workers of the queue, and the time that passes: leases, saves, scores, stalls and deaths.

    Every write is sent twice: the second time must change nothing.
    """

    url: ClassVar[str]
    group_size: ClassVar[int] = 2
    numbers: ClassVar["itertools.count[int]"] = itertools.count()
    store: TrajectoryStore
    model: WholeQueueModel
    leader: Any

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.sessions: list[str] = []
        self.stalled: list[list[HeldSaves]] = []
        """Memory of workers that have stalled past their TTL."""
        self.starts = itertools.count(step=1 << 14)
        self.registered: Counter[bool] = Counter()
        """Trajectories that were stated to the queue, by whether they were kept."""
        self.begun_again: Counter[bool] = Counter()
        """Groups that began again, by whether they were set aside."""
        self.recalled = 0
        self.decided: Counter[str] = Counter()
        """Decisions on groups whose round had ended, by their kind."""
        self.rested = 0
        self.passed_seconds = 0
        """Time that has passed without a wait."""

    @rule()
    def open_worker(self) -> None:
        if len(self.sessions) < 3:
            self.open_session()

    def open_session(self) -> str:
        session = self.do(self.store.sessions.open("machine"))
        self.model.open_session(session)
        self.sessions.append(session)
        return session

    @rule(pick=PICK, waiting=st.integers(0, 3))
    def report_waiting(self, pick: int, waiting: int) -> None:
        if self.sessions:
            session = self.sessions[pick % len(self.sessions)]
            for _ in range(2):
                self.do(self.store.sessions.heartbeat(session, waiting))
            self.model.heartbeat(session, waiting)

    @rule(pick=PICK, limit=st.integers(1, 4))
    def lease(self, pick: int, limit: int) -> None:
        if self.sessions:
            session = self.sessions[pick % len(self.sessions)]
            leased = self.do(self.store.trajectories.lease(session, limit))
            expected = self.model.lease(session, limit)
            assert [
                (t.trajectory.trajectory_id, t.attempt, t.trajectory.response_token_count, t.incarnation)
                for t in leased
            ] == [(m.trajectory_id, m.attempts, m.tokens, m.incarnation) for m in expected]
            assert [t.trajectory.birth_version for t in leased] == [m.birth_version for m in expected]
            plans = [m.group.rounds[m.group.round_of(m)].plan if m.group.rounds else "{}" for m in expected]
            assert [t.plan for t in leased] == [json.loads(plan) for plan in plans]

    @rule(pick=PICK, tokens=st.integers(1, 5), age=st.integers(0, 3))
    def append(self, pick: int, tokens: int, age: int) -> None:
        m, session = self.pick("leased", pick)
        if m is None:
            return
        save = self.write(tokens, max(0, self.model.policy_version - age))
        item = Append(trajectory_id=m.trajectory_id, **stated(m, save))
        others = [replace(item, incarnation=m.incarnation + 1)]
        if m.tokens:
            others.append(replace(item, digest=TokenDigest().extended([segment(m.tokens, start=1)])))
        refused = [self.do(self.store.trajectories.append(session, [other]))[0] for other in others]
        assert {(r.status, r.saved_token_count) for r in refused} == {(WriteStatus.REFUSED, m.tokens)}
        expected = self.model.append(session, m.trajectory_id, save, byte_count(save))
        statuses = [self.do(self.store.trajectories.append(session, [item]))[0].status for _ in range(2)]
        assert statuses == [expected, WriteStatus.DUPLICATE]

    @rule(pick=PICK, age=st.integers(0, 3))
    def report_first_token(self, pick: int, age: int) -> None:
        m, session = self.pick("leased", pick)
        if m is None or m.tokens:
            return
        version = max(0, self.model.policy_version - age)
        item = FirstToken(trajectory_id=m.trajectory_id, policy_version=version)
        status = self.do(self.store.trajectories.report_first_tokens(session, [item]))[0].status
        assert status is self.model.begin(session, m.trajectory_id, version) is WriteStatus.SAVED

    @rule(pick=PICK, tokens=st.integers(1, 3))
    def finish(self, pick: int, tokens: int) -> None:
        m, session = self.pick("leased", pick)
        if m is None:
            return
        save = self.write(tokens, self.model.policy_version)
        item = Finish(trajectory_id=m.trajectory_id, finish_reason=FinishReason.STOP, **stated(m, save))
        other = replace(item, incarnation=m.incarnation + 1)
        assert self.do(self.store.trajectories.finish(session, [other]))[0].status == WriteStatus.REFUSED
        expected = self.model.finish(session, m.trajectory_id, save, byte_count(save))
        statuses = [self.do(self.store.trajectories.finish(session, [item]))[0].status for _ in range(2)]
        assert statuses == [expected, WriteStatus.DUPLICATE]

    @rule(pick=PICK, ends=st.booleans())
    def lose_the_last_upload(self, pick: int, ends: bool) -> None:
        """A worker saves all that it holds; Redis forgets one upload before the script, so all of it is sent again."""
        first, session = self.pick("leased", pick)
        if first is None:
            return
        ids = self.ids("leased", session=session)
        redis = Forgetful(
            self.store, "finish" if ends else "append", self.store.connection.keys.of("chunk", f"{ids[-1]}:*")
        )
        items: list[Append | Finish] = []
        for each in ids:
            m = self.model.members[each]
            save = self.write(9_000 if each == ids[-1] else 2, self.model.policy_version)
            words = {"trajectory_id": each, **stated(m, save)}
            items.append(Finish(**words, finish_reason=FinishReason.STOP) if ends else Append(**words))
            (self.model.finish if ends else self.model.append)(session, each, save, byte_count(save))
        write = self.store.trajectories.finish if ends else self.store.trajectories.append
        assert {r.status for r in self.do(write(session, items))} == {WriteStatus.SAVED}
        assert redis.refused == 1

    @rule(pick=PICK, reward=REWARDS, top_k=st.sampled_from([None, 0, 2]))
    def score(self, pick: int, reward: float | None, top_k: int | None = None) -> None:
        m, session = self.pick("finished", pick)
        if m is None:
            return
        outcome = UNSCORABLE if reward is None else scored(reward)
        teacher = None if top_k is None or reward is None else column(m.tokens, top_k)
        item = Score(trajectory_id=m.trajectory_id, outcome=outcome, shaped_reward=reward or 0.0, teacher=teacher)
        for _ in range(2):
            status = self.do(self.store.trajectories.score(session, [item]))[0].status
            assert status is self.model.score(session, m.trajectory_id, reward, column_bytes(teacher))

    @rule(rewards=st.lists(REWARDS, min_size=1, max_size=6))
    def complete(self, rewards: list[float | None]) -> None:
        """Several trajectories in one go, so that groups complete within a short history."""
        if not self.ids("pending", "partial", "resting", "leased", "finished"):
            self.admit(2, 2, 0)
        for at, reward in enumerate(rewards):
            if not self.ids("leased", "finished"):
                self.set_pool(6, False)
                self.open_worker()
                self.lease(at, 4)
            self.append(0, 2, at)
            self.finish(0, 1)
            self.score(0, reward)

    @rule(pick=PICK, reason=st.sampled_from(ReleaseReason))
    def release(self, pick: int, reason: ReleaseReason) -> None:
        m, session = self.pick("leased", pick)
        if m is not None:
            for _ in range(2):
                released = self.do(self.store.trajectories.release(session, [m.trajectory_id], reason))
                uncounted = reason is not ReleaseReason.FAILED
                rests = reason is ReleaseReason.RESTED
                assert released == self.model.release(session, m.trajectory_id, free_attempt=uncounted, rests=rests)

    @rule(pick=PICK)
    def rest(self, pick: int) -> None:
        """Release a trajectory at the end of a segment."""
        m, _ = self.pick("leased", pick)
        if m is not None:
            self.append(pick, 2, 0)
            self.release(pick, ReleaseReason.RESTED)
            self.rested += m.state == "resting"

    @rule(pick=PICK)
    def fail(self, pick: int) -> None:
        m, session = self.pick("leased", pick)
        if m is not None:
            for _ in range(2):
                failed = self.do(self.store.trajectories.fail(session, [(m.trajectory_id, "broken")]))
                assert failed == self.model.fail(session, m.trajectory_id)

    @rule(pick=PICK)
    def restart(self, pick: int) -> None:
        m, session = self.pick("leased", pick)
        if m is not None:
            incarnation = self.model.restart(session, m.trajectory_id)
            for _ in range(2):
                assert self.do(self.store.trajectories.restart(session, [m.trajectory_id])) == [incarnation]

    @rule(pick=PICK)
    def fork(self, pick: int) -> None:
        m, session = self.pick("leased", pick)
        if m is not None:
            nonce = f"fork-{next(self.numbers)}"
            status, child = self.model.fork(session, m.trajectory_id)
            for _ in range(2 if status is ForkStatus.FORKED else 1):
                fork = self.do(self.store.trajectories.fork(session, m.trajectory_id, nonce))
                forked = fork.leased and fork.leased.trajectory.trajectory_id
                assert (fork.status, forked) == (status, child and child.trajectory_id)

    @rule(pick=PICK, limit=st.integers(1, 3))
    def take_over_scoring(self, pick: int, limit: int) -> None:
        if self.sessions:
            session = self.sessions[pick % len(self.sessions)]
            leased = self.do(self.store.trajectories.lease_scoring(session, limit))
            assert [(t.trajectory.trajectory_id, t.attempt) for t in leased] == [
                (m.trajectory_id, m.scorings) for m in self.model.lease_scoring(session, limit)
            ]

    @rule(pick=PICK, dies=st.booleans())
    def lose_worker(self, pick: int, dies: bool) -> None:
        if not self.sessions:
            return
        session = self.sessions.pop(pick % len(self.sessions))
        if dies:
            self.expire(session)
        else:
            self.do(self.store.sessions.close(session))
            self.model.close_session(session, free_attempt=True)

    def expire(self, session: str) -> None:
        """Let one TTL pass over a session, and the leader give back what it held."""
        keys = self.store.connection.keys
        self.do(self.store.connection.command("ZADD", keys.single("sessions"), 1, session))
        self.do(self.store.connection.command("HSET", keys.single("meta"), "leader_since", 1))
        for _ in range(2):
            self.do(self.store.leadership.reap(self.leader))
        self.model.close_session(session, free_attempt=False)
        for gid in list(self.model.half_gone):
            self.model.sweep(gid, 1 << 12)
        for gid in list(self.model.returning):
            while self.model.sweep_returning(gid, MEMBERS_PER_SWEEP):
                pass

    @rule(pick=PICK)
    def stall(self, pick: int) -> None:
        """A worker stalls past its TTL; it may have sampled a few tokens more than it has saved."""
        if self.sessions:
            session = self.sessions.pop(pick % len(self.sessions))
            memories = [
                m._replace(saves=(*m.saves, self.write(2, 0))) if pick % 3 == 0 else m
                for m in self.model.held_by(session)
            ]
            if memories:
                self.stalled.append(memories)
            self.expire(session)

    @rule(pick=PICK)
    def wake(self, pick: int) -> None:
        """A worker that stalled registers under another session, whatever others have done to its trajectories."""
        if self.stalled:
            self.register(self.open_session(), self.stalled.pop(pick % len(self.stalled)))

    def register(self, session: str, memories: list[HeldSaves]) -> None:
        expected = self.model.reregister(session, memories)
        named = [held(m.trajectory_id, *segments(m.saves), incarnation=m.incarnation) for m in memories]
        answers = self.do(self.store.sessions.reregister(session, named))
        assert [(a.kept, a.saved_token_count) for a in answers] == expected
        self.registered.update(kept for kept, _ in expected)

    @rule(hours=st.integers(1, 5))
    def let_time_pass(self, hours: int) -> None:
        """Move back every time from which others are measured, in place of a wait."""
        self.passed_seconds += 3600 * hours
        self.model.now += 3600 * hours
        keys, command = self.store.connection.keys, self.store.connection.command
        groups = [keys.of("group", gid) for by_id in self.model.groups.values() for gid in by_id]
        times = [(keys.single("meta"), name) for name in ("cut_at", "announced_at", "update_began", "resumed_at")]
        for key, name in (*times, *((group, "admitted_at") for group in groups)):
            if self.do(command("HEXISTS", key, name)):
                self.do(command("HINCRBY", key, name, -3_600_000 * hours))

    def write(self, tokens: int, version: int) -> Save:
        return Save(tokens, version, next(self.starts))

    def ids(self, *states: str, session: str | None = None) -> list[str]:
        """Trajectories in some state of groups that are not aside, oldest group first."""
        queued = [by_id for state, by_id in self.model.groups.items() if state is not GroupState.ASIDE]
        groups = [group for by_id in queued for group in by_id.values()]
        return [
            m.trajectory_id
            for group in sorted(groups, key=lambda group: group.index)
            for m in group.members
            if m.state in states and session in (None, m.session)
        ]

    def pick(self, state: str, number: int) -> tuple[ModelMember | None, str]:
        """A trajectory that a worker holds in this state, and the worker's session."""
        members = [m for i in self.ids(state) if (m := self.model.members[i]).session is not None]
        m = members[number % len(members)] if members else None
        return m, m.session or "" if m else ""

    def do(self, call: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(call)

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.do(self.store.aclose())
        self.loop.close()
