"""Random workers, leader and trainer on a real server that restarts, compared with the plain model after every step."""

from __future__ import annotations

import copy
import inspect
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RULE_MARKER, initialize, invariant, precondition, rule

from rollmesh.config.store import StoreConfig
from rollmesh.errors import Conflict, StoreUnavailable
from rollmesh.group_outcome import GroupOutcome
from rollmesh.mesh import Cursor, Desired, ResumeOrder
from rollmesh.prompt_history import PromptOutcome
from rollmesh.sim.queue_model import GroupState, ModelGroup
from rollmesh.store import ReleaseReason, TokenDigest, TrajectoryStore
from rollmesh.store.leadership import MEMBERS_PER_SWEEP
from rollmesh.store.payload import encode_prompt

from ...kit.whole_queue_model import HeldSaves, WholeQueueModel
from .queue_workers import PICK, QueueWorkers, kept_scores, segments
from .store_mesh import column_bytes, copy_of_keys, group, limits, policy, put_back
from .stored_keys import read_truth

ATTEMPTS = 2
SERVER_TOTALS = {"recoveries", "reaped_sessions_total", "reasserted_groups_total"}
"""Lifetime counters of what the model leaves to the store."""
FORGOTTEN = ("append", "restart", "release", "lease", "report_waiting", "finish", "begin_again", "set_aside", "recall")
"""Steps that Redis may forget: of the workers, and of the leader with groups that begin again."""
MEASURED = {"ready_seconds": 100.0, "update_seconds": 100.0, "ready_updates": 1.0}
"""Measured times, with the error that the real time of the steps may make; whole updates may be one more or less."""


class QueueMachine(QueueWorkers):
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

    @invariant()
    def agree(self) -> None:
        """Whatever the queue is made of, what the leader sees of it and every counter are those of the model."""
        if hasattr(self, "store"):
            self.the_queue_agrees_with_the_model()
            self.the_view_agrees_with_the_model()
            self.the_counters_agree_with_the_model()
            self.the_history_agrees_with_the_model()

    def the_queue_agrees_with_the_model(self) -> None:
        truth = self.do(read_truth(self.store))
        assert truth.problems == []
        assert truth.groups == {
            gid: group.state for groups in self.model.groups.values() for gid, group in groups.items()
        }
        assert truth.undecided == self.model.undecided.keys()
        assert truth.tombstones == set(self.model.ended)
        in_groups = {
            m.trajectory_id for i in self.model.members if not self.model.is_gone((m := self.model.members[i]).group)
        }
        assert truth.members.keys() == in_groups
        assert truth.half_gone.keys() <= self.model.members.keys() - in_groups
        for trajectory_id, record in (truth.members | truth.half_gone).items():
            m = self.model.members[trajectory_id]
            assert (record.state, record.tokens) == (m.state, m.tokens)
            if trajectory_id in in_groups:
                assert record.step == m.step
            if m.state in ("leased", "finished"):
                assert record.session == m.session
            if m.state not in ("dead", "surplus") and trajectory_id in in_groups:
                assert record.digest == TokenDigest().extended(segments(m.saves))

    def the_view_agrees_with_the_model(self) -> None:
        for groups, shortest in ((True, False), (True, True), (False, False)):
            view = self.do(self.store.mesh.view(groups=groups, shortest=shortest))
            self.model.now = view.now + self.passed_seconds
            self.model.used_memory_bytes, self.model.max_memory_bytes = view.used_memory_bytes, view.max_memory_bytes
            expected = self.model.view(groups=groups, shortest=shortest)
            assert view.memory_ratio == pytest.approx(expected.memory_ratio)
            assert (view.blocked_since is None) == (expected.blocked_since is None)
            # The model's clock moves only here and by hours, so it agrees but for the real time of the steps.
            for name, error in MEASURED.items():
                assert getattr(view, name) == pytest.approx(getattr(expected, name), abs=error), name
            server = {name: getattr(view, name) for name in ("now", "memory_ratio", "blocked_since", *MEASURED)}
            assert view == replace(expected, **server)
        assert self.do(self.store.leadership.desired()).start_at_version == self.model.start_at_version

    def the_history_agrees_with_the_model(self) -> None:
        history, records = self.model.history, self.store.prompt_records
        assert self.do(records.read([str(i) for i in range(self.cursor)])) == history.records
        assert self.do(records.predictions()) == list(history.predictions)

    def the_counters_agree_with_the_model(self) -> None:
        model, counts = self.model, self.do(self.store.mesh.counts())
        waiting = {"pending": len(model.pending), "partial": len(model.partial), "resting": len(model.resting)}
        assert counts.trajectories == waiting | {s: model.counts[s] for s in counts.trajectories if s not in waiting}
        assert counts.groups == {state: len(groups) for state, groups in model.groups.items()}
        assert {**counts.totals} == {**counts.totals, **{k: n for k, n in model.totals.items() if n}}
        assert {k for k, n in counts.totals.items() if n} - model.totals.keys() <= SERVER_TOTALS
        assert counts.drops == model.drops
        assert +Counter(counts.dropped_tokens) == +model.dropped_tokens
        assert counts.drop_deciles == model.drop_deciles
        assert counts.begun_again_deciles == model.begun_again_deciles
        assert counts.surplus_deciles == model.surplus_deciles
        assert counts.finished_lengths == model.finished_lengths
        assert (counts.scoring_queue, counts.sessions) == (len(model.scoring), len(self.sessions))
        first = model.resting.first()
        assert counts.oldest_rest_step == (None if first is None else model.resting.score(first))
        noted = {gid: why for gid, why in model.ended.items() if gid not in model.half_gone}
        dropped = self.do(self.store.ledger.dropped_groups())
        assert dropped == {gid: why for gid, why in noted.items() if why != "consumed"}


DRAWS: dict[str, Callable[[random.Random], Any]] = {
    "pick": lambda rng: rng.randrange(1000),
    "count": lambda rng: rng.randint(1, 3),
    "more": lambda rng: rng.randint(1, 3),
    "needed": lambda rng: rng.randint(2, 3),
    "spare": lambda rng: rng.choice([0, 1, 2]),
    "rank": lambda rng: rng.randrange(128),
    "rounds": lambda rng: rng.random() < 0.5,
    "shape": lambda rng: rng.choice(["none", "rewards", "kept"]),
    "pool": lambda rng: rng.randint(2, 8),
    "paused": lambda rng: rng.random() < 0.2,
    "most_waiting": lambda rng: rng.randint(0, 3),
    "waiting": lambda rng: rng.randint(0, 3),
    "aside": lambda rng: rng.random() < 0.4,
    "limit": lambda rng: rng.randint(1, 4),
    "tokens": lambda rng: rng.randint(1, 5),
    "age": lambda rng: rng.randint(0, 3),
    "reward": lambda rng: rng.choice([0.0, 1.0, 0.25, 0.5, 0.75, None]),
    "top_k": lambda rng: rng.choice([None, 0, 2]),
    "rewards": lambda rng: rng.choices([0.0, 1.0, 0.25, 0.5, 0.75, None], k=5),
    "reason": lambda rng: rng.choice(list(ReleaseReason)),
    "ends": lambda rng: rng.random() < 0.5,
    "dies": lambda rng: rng.random() < 0.6,
    "hours": lambda rng: rng.randint(1, 5),
    "rolled_back": lambda rng: rng.random() < 0.2,
    "steps": lambda rng: rng.choices(FORGOTTEN, k=rng.randint(0, 6)),
}
"""Values of the arguments of a step, by name."""


def walk(
    machine: QueueMachine,
    rng: random.Random,
    steps: int,
    weights: Mapping[float, str],
    draws: Mapping[str, Callable[[random.Random], Any]] = DRAWS,
) -> None:
    """Take random steps whose preconditions hold, and compare with the model after each; names by their weight."""
    machine.agree()  # The model takes the time from the server.
    by_name = {name: weight for weight, names in weights.items() for name in names.split()}
    for _ in range(steps):
        (name,) = rng.choices(list(by_name), weights=list(by_name.values()))
        step = getattr(machine, name)
        rule = getattr(step, RULE_MARKER, None)
        if rule is None or all(holds(machine) for holds in rule.preconditions):
            step(**{argument: draws[argument](rng) for argument in inspect.signature(step).parameters})
            machine.agree()
