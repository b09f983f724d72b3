"""A whole mesh under load in one process: workers, a leader and a trainer that follow the recovery protocol.

Nothing here is trusted by the tests: what was trained is read from ``Trainer.files``, the stand-in for the batch
files of the checkpoint store (they survive a crash of Redis and of the trainer).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections import Counter
from dataclasses import dataclass, field, replace

import numpy as np

from rollmesh.config.store import StoreConfig
from rollmesh.errors import Conflict, SessionLost, StoreUnavailable
from rollmesh.mesh import Cursor, Desired
from rollmesh.store import TrajectoryStore
from rollmesh.types import Batch, Group, PolicyRecord

from .loaded_workers import BATCH, GROUP_SIZE, LAGGING, Leases, Rollout, Shape, Worker, index_of
from .store_mesh import group, limits, policy
from .stored_keys import DISCARDED, NOT_IN_LOSS, read_truth

POOL, STALENESS = 12, 2
ALLOWED_DROPS = {"stale", "too_few_scored", "filtered_all_right", "filtered_all_wrong"}
MOST_RESTING = 2
"""Trajectories that may rest until the next policy; with more of them all continue. With those that lag (LAGGING) they
hold back so few groups of the window that the others make a batch."""


def _is_behind(theirs: Rollout | None, ours: Rollout) -> bool:
    """Tell whether a later attempt has saved tokens, and fewer than an earlier one."""
    return theirs is not None and theirs.incarnation > ours.incarnation and 0 < theirs.saved < ours.saved


@dataclass
class Seen:
    """Facts that leader and trainer note of the groups on their way, for the account."""

    most_leased: int = 0
    """Most trajectories leased at once."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Tokens of every group at its cut, as the view has them."""
    members: dict[str, Counter[str]] = field(default_factory=dict)
    """Number of members by state of every group that was claimed."""
    cut_off: set[str] = field(default_factory=set)
    """Claimed groups whose members beyond the needed ones were to be cut off; none after a recall."""
    set_aside: set[str] = field(default_factory=set)
    """Groups that the leader has tried to set aside."""


async def lead(store: TrajectoryStore, shape: Shape, seen: Seen) -> None:
    """Admit up to the capacity, cut ready groups, end what is too stale or begin it again, reap."""
    token: str | None = None
    while True:
        await asyncio.sleep(0.003)
        try:
            if token is None or not await store.leadership.renew(token):
                token = await store.leadership.acquire("leader")
                continue
            await look(store, token, shape, seen)
        except (Conflict, StoreUnavailable):
            continue
        except SessionLost:
            token = None


def pool_of(shape: Shape) -> int:
    """Return the pool size: groups that lag hold their spare members too."""
    return POOL + LAGGING * shape.spare


async def look(store: TrajectoryStore, token: str, shape: Shape, seen: Seen) -> None:
    await store.leadership.reap(token)
    view = await store.mesh.view(shortest=shape.cuts_shortest)
    wakes = 1 << 30 if view.resting > MOST_RESTING else max(0, view.policy_train_step)
    await store.leadership.set_desired(token, Desired(pool_size=pool_of(shape), rest_before_step=wakes))
    if view.recovering:  # a restored lease may stand beside those that took its place, until its worker registers
        return
    seen.most_leased = max(seen.most_leased, view.leased)
    room = (STALENESS + 1) * BATCH - view.admitted_unconsumed
    if room > 0:
        at = await store.leadership.cursor()
        indexes = range(at.index, at.index + room)
        groups = [replace(group(i, GROUP_SIZE, spare=shape.spare), start_rank=shape.start_rank(i)) for i in indexes]
        await store.leadership.admit(token, groups, at, Cursor(index=at.index + room))
    step = view.cut_step + 1
    oldest = step - 1 - STALENESS
    stale = [
        g.group_id
        for g in (*view.ready, *view.stalest_open)
        if g.min_train_step is not None and g.min_train_step < oldest
    ]
    if shape.begins_again:
        await end_or_begin_again(store, token, stale, seen)
    elif stale:
        await store.leadership.evict(token, stale, "stale")
    if view.aside_groups:
        await store.restarted.recall(token, step, view.recalled_groups + view.aside_groups)
    fresh = [g for g in view.ready if g.group_id not in stale]
    if view.cut_step == view.trained_step and len(fresh) >= BATCH:
        batch = sorted(fresh, key=lambda g: g.token_count if shape.cuts_shortest else g.admission_index)[:BATCH]
        seen.tokens |= {g.group_id: g.token_count for g in batch}
        await store.leadership.cut(token, step, [g.group_id for g in batch])


async def end_or_begin_again(store: TrajectoryStore, token: str, stale: list[str], seen: Seen) -> None:
    """Evict, restart or set aside a stale group, each a third of the groups by their index."""
    evicted, restarted, set_aside = ([name for name in stale if index_of(name) % 3 == third] for third in range(3))
    if evicted:
        await store.leadership.evict(token, evicted, "stale")
    if restarted:
        await store.restarted.restart(token, restarted)
    seen.set_aside |= {*set_aside}
    if set_aside:
        await store.restarted.set_aside(token, set_aside)


@dataclass
class Trainer:
    """Claims, writes the batch file, trains, publishes; committed every three steps."""

    store: TrajectoryStore
    seen: Seen
    files: dict[int, Batch] = field(default_factory=dict)
    policies: list[PolicyRecord] = field(default_factory=list)
    step: int = 0
    committed: int = 0
    token: str = ""
    run_id: str = ""
    trained: asyncio.Condition = field(default_factory=asyncio.Condition)
    may_train: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        self.token = await self.store.training.open_session("trainer")
        await self.reassert()
        self.may_train.set()
        while True:
            await self.may_train.wait()
            try:
                await self.train_one()
            except StoreUnavailable:
                continue
            except (Conflict, SessionLost):
                if await self.store.recovery.server_run_id() == self.run_id:
                    raise
                await self.reassert()

    async def reassert(self) -> None:
        run_id = await self.store.recovery.server_run_id()
        batches = [(s, [g.group_id for g in b.groups]) for s, b in sorted(self.files.items())]
        trained = max(self.step, max(self.files, default=1) - 1)
        await self.store.training.reassert(self.token, self.committed, trained, batches, self.policies, Cursor(index=0))
        self.run_id = run_id
        if not self.policies:
            self.policies.append(policy(0))
            await self.store.policies.announce(self.token, policy(0))

    async def train_one(self) -> None:
        step = self.step + 1
        if step not in self.files:
            batch = await self.store.training.claim(self.token, step, 0.2)
            if batch is None:
                if await self.store.recovery.server_run_id() != self.run_id:
                    await self.reassert()
                return
            await self.note_members(batch)
            self.files[step] = batch
        await self.store.training.confirm_batch_file(self.token, step, f"digest-{step}")
        await self.store.training.report_trained(self.token, step)
        if len(self.policies) == step:
            # The policy exists on disk before Redis hears of it.
            self.policies.append(policy(step))
            await self.store.policies.announce(self.token, policy(step))
        self.step = step
        if step % 3 == 0:
            self.committed = step
            await self.store.training.report_committed(self.token, step)
        async with self.trained:
            self.trained.notify_all()

    async def note_members(self, batch: Batch) -> None:
        """Note the members of the claimed groups, unless Redis has gone back to a state before their cut meanwhile."""
        members: dict[str, Counter[str]] = {}
        cut_off: set[str] = set()
        for each in batch.groups:
            key = self.store.connection.keys.of("group", each.group_id)
            launched, spare = await self.store.connection.command("HMGET", key, "launched", "spare")
            marks = await self.store.inspection.marks([f"{each.group_id}.{i}" for i in range(int(launched or 0))])
            members[each.group_id] = Counter("pending" if mark is None else mark.state for mark in marks)
            cut_off |= {each.group_id} if spare else set()
        if await self.store.recovery.server_run_id() == self.run_id:
            self.seen.members |= members
            self.seen.cut_off |= cut_off

    async def until(self, step: int, deadline: float) -> None:
        async with self.trained, asyncio.timeout(deadline):
            await self.trained.wait_for(lambda: self.step >= step)


@dataclass
class LoadedMesh:
    """Every role on its own connection; tasks are replaced to play a crash."""

    url: str
    run: str
    ttl: float
    rng: random.Random
    shape: Shape
    stores: list[TrajectoryStore] = field(default_factory=list)
    workers: dict[int, Worker] = field(default_factory=dict)
    seen: Seen = field(default_factory=Seen)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    leases: Leases = field(init=False)
    trainer: Trainer = field(init=False)

    async def __aenter__(self) -> LoadedMesh:
        self.stores = [await self._connect() for _ in range(5)]
        rules = limits(
            group_size=GROUP_SIZE,
            groups_per_batch=BATCH,
            max_staleness=STALENESS,
            session_ttl_seconds=self.ttl,
            filter_zero_variance=True,
            max_attempts=50,
            most_members=self.shape.most_members,
            resume_order=self.shape.resume_order,
        )
        await self.stores[0].limits.init_run(rules)
        self.leases = Leases(self.shape)
        self.trainer = Trainer(self.stores[1], self.seen)
        self.start_leader()
        self.tasks["trainer"] = asyncio.create_task(self.trainer.run())
        for number in range(3):
            self.start_worker(number)
        return self

    async def __aexit__(self, *error: object) -> None:
        try:
            await self.stop()
        finally:
            for store in self.stores:
                await store.aclose()

    async def stop(self) -> None:
        """End every role where it stands; an error of a role is raised here."""
        for task in self.tasks.values():
            task.cancel()
        results = await asyncio.gather(*self.tasks.values(), return_exceptions=True)
        self.tasks.clear()
        for result in results:
            if isinstance(result, Exception):
                raise result

    def start_leader(self) -> None:
        self.tasks["leader"] = asyncio.create_task(lead(self.stores[0], self.shape, self.seen))

    def start_worker(self, number: int) -> None:
        rng = random.Random(self.rng.random())
        worker = self.workers[number] = Worker(self.stores[2 + number], rng, self.leases)
        self.tasks[f"worker-{number}"] = asyncio.create_task(worker.run())

    async def crash(self, role: str) -> None:
        self.tasks[role].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.tasks[role]
        if role == "trainer":
            old, self.trainer = self.trainer, Trainer(self.stores[1], self.seen)
            self.trainer.files, self.trainer.policies = old.files, old.policies
            self.trainer.step = self.trainer.committed = old.committed
            self.tasks[role] = asyncio.create_task(self.trainer.run())
        elif role == "leader":
            self.start_leader()
        else:
            self.start_worker(int(role.rpartition("-")[2]))

    async def stall_past_the_ttl(self, number: int) -> None:
        """Stall a worker until others have begun again, saved fewer tokens and died; then it is the first to wake."""
        sleeper, others = self.workers[number], [w for n, w in self.workers.items() if n != number]
        for other in others:
            other.begins_again = True
        while not any(_is_behind(w.held.get(i), r) for i, r in sleeper.held.items() for w in others):
            # What it holds may end before another worker is seen to have it: then it stalls once more.
            self.trainer.may_train.set()
            sleeper.stalls = True
            sleeper.awake.set()
            while sleeper.stalls:
                await asyncio.sleep(0.001)
            # Without new policies nothing that it holds becomes stale before its session has expired.
            self.trainer.may_train.clear()
            given_up = time.monotonic() + 10 * self.ttl
            while time.monotonic() < given_up and await self._any_unfinished(list(sleeper.held)):
                if any(_is_behind(w.held.get(i), r) for i, r in sleeper.held.items() for w in others):
                    break
        for other in others:
            other.begins_again = False
            other.awake.clear()
            await other.store.sessions.close(other.session)
        registrations = sleeper.registrations
        sleeper.awake.set()
        while sleeper.registrations == registrations:
            await asyncio.sleep(0.001)
        for other in others:
            other.awake.set()
        self.trainer.may_train.set()

    async def _any_unfinished(self, trajectory_ids: list[str]) -> bool:
        marks = await self.stores[0].inspection.marks(trajectory_ids)
        return any(mark is not None and mark.state not in ("scored", "unscorable") for mark in marks)

    async def _connect(self) -> TrajectoryStore:
        return await TrajectoryStore.connect(StoreConfig(), run=self.run, url=self.url)

    async def account(self) -> dict[str, int]:
        """Return the number of faults by kind, from batch files, ledger and records, not from Redis's counters."""
        batches = self.trainer.files
        groups = {g.group_id: g for b in batches.values() for g in b.groups}
        trained = [g.group_id for b in batches.values() for g in b.groups]
        versions = {p.policy_version: p.train_step for p in self.trainer.policies}
        violations = sum(
            step - 1 - versions[version] > STALENESS
            for step, batch in batches.items()
            for g in batch.groups
            for t in g.trajectories
            for version in t.policy_versions
        )
        ids = [t.response_ids for g in groups.values() for t in g.trajectories]
        store = self.stores[0]
        dropped, states = await store.ledger.dropped_groups(), (await read_truth(store)).groups
        # The newest batch file may have been written before Redis has heard of it.
        live = {name for name, state in states.items() if state != "cut" or name not in groups}
        known = {*trained, *live, *dropped}
        cursor = await store.leadership.cursor()
        tokens = {name: sum(t.response_token_count for t in g.trajectories) for name, g in groups.items()}
        return {
            "lost": sum(f"e0-{i}" not in known for i in range(cursor.index)),
            "trained_twice": len(trained) - len(set(trained)),
            "live_again": len(live & {*trained, *dropped}),
            "dropped_without_reason": sum(reason not in ALLOWED_DROPS for reason in dropped.values()),
            "violations": violations,
            "of_two_writers": sum(bool((np.diff(each) != 1).any()) for each in ids),
            "over_the_pool": max(0, self.seen.most_leased - pool_of(self.shape)),
            "too_many_members": len(self.leases.too_many),
            "wrong_members": sum(self._is_wrong(g) for name, g in groups.items() if name in self.seen.members),
            "wrong_tokens": sum(self.seen.tokens.get(name) != count for name, count in tokens.items()),
        }

    def _is_wrong(self, claimed: Group) -> bool:
        """Tell whether a batch has other members than the scored ones, or the others have not all ended.

        Members are cut off only where more than the needed ones were launched, and once these are scored.
        """
        name, trained = claimed.group_id, len(claimed.trajectories)
        members, is_cut_off = self.seen.members[name], name in self.seen.cut_off
        is_cut_off = is_cut_off or (self.shape.spare > 0 and name not in self.seen.set_aside)
        return (
            not 2 <= members["scored"] == trained
            or members.total() != trained + sum(members[state] for state in NOT_IN_LOSS)
            or not GROUP_SIZE <= members.total() <= self.shape.most_members
            or (trained > GROUP_SIZE if is_cut_off else members["surplus"] > 0)
            or (members["surplus"] > 0 and trained < GROUP_SIZE)
        )

    async def account_of_leases(self) -> dict[str, int]:
        """Return the number of faults in the orders, surplus and tokens of a mesh whose Redis never died."""
        store = self.stores[0]
        counts, truth = await store.mesh.counts(), await read_truth(store)
        left = sum(r.tokens for r in truth.members.values() if r.state not in ("unscorable", *DISCARDED))
        trained = sum(
            t.response_token_count
            for batch in self.trainer.files.values()
            for g in batch.groups
            for t in g.trajectories
            if t.trajectory_id not in truth.members
        )
        wasted = sum(counts.dropped_tokens.values()) + counts.totals.get("restarted_tokens_total", 0)
        surplus = counts.totals.get("surplus_total", 0)
        in_files = {g.group_id for batch in self.trainer.files.values() for g in batch.groups}
        return {
            # A restored Redis may filter a group before it hears of the batch file that has it.
            "trained_and_dropped": len(in_files & (await store.ledger.dropped_groups()).keys()),
            "out_of_order": self.leases.out_of_order,
            "surplus_not_counted": max(0, sum(n["surplus"] for n in self.seen.members.values()) - surplus),
            "surplus_without_length": surplus - sum(counts.surplus_deciles.values()),
            "tokens_not_accounted_for": counts.totals["saved_tokens_total"] - left - trained - wasted,
        }
