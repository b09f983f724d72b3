"""Workers of the loaded mesh: they lease, write, rest, begin again, stall and die."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from rollmesh.errors import Conflict, SessionLost, StoreUnavailable
from rollmesh.mesh import ResumeOrder
from rollmesh.segments import slice_segment
from rollmesh.sim.queue_model.records import length_bucket
from rollmesh.store import (
    Append,
    Finish,
    HeldTokens,
    LeasedTrajectory,
    ReleaseReason,
    Score,
    TrajectoryStore,
    WriteStatus,
)
from rollmesh.types import FinishReason, Segment

from .store_mesh import UNSCORABLE, digest_of, held, scored, segment

GROUP_SIZE, BATCH = 3, 3
RESTARTS, RELEASES, RESTS = 0.05, 0.05, 0.05
"""Probabilities that a step of a trajectory loses its environment, that it loses its worker, and that it rests."""
LAGGING, OUT_OF = 3, 36
"""In a mesh that begins groups again, members of so many of this many groups in a row save one chunk and wait to be too
stale. The next ones come after that: otherwise those that wait would fill the window or the pool."""


@dataclass(frozen=True)
class Shape:
    """Groups of a load, and the orders in which they start, continue and are cut."""

    spare: int = 0
    """Members launched above the needed ones."""
    begins_again: bool = False
    """True if the leader restarts or sets aside some of the stale groups, in place of evicting them."""
    has_ranks: bool = False
    """True if groups start by rank within a block."""
    resume_order: ResumeOrder = ResumeOrder.ADMISSION
    cuts_shortest: bool = False
    """True if the ready groups with the fewest tokens are cut first."""

    @property
    def most_members(self) -> int:
        """Most members of a group: with one spare member, one is replaced; with two, none."""
        return GROUP_SIZE + 2 if self.spare else 2 * GROUP_SIZE

    def start_rank(self, index: int) -> int | None:
        """Rank of a group: neighbours differ, and it is the same whenever the group is admitted again."""
        return index * 37 % 128 if self.has_ranks else None

    def lags_first(self, trajectory_id: str) -> bool:
        """Tell whether a trajectory stops after its first chunk, before it begins again.

        So many members of a group do that the others do not complete it.
        """
        number = int(trajectory_id.rpartition(".")[2])
        return self.begins_again and number <= self.spare and index_of(trajectory_id) % OUT_OF < LAGGING

    def place(self, trajectory_id: str, tokens: int) -> tuple[int, ...]:
        """Place of a waiting trajectory among those with which it is leased."""
        index, number = index_of(trajectory_id), int(trajectory_id.rpartition(".")[2])
        block = index // BATCH
        if not tokens:
            rank = self.start_rank(index)
            return (1, index, number) if rank is None else (1, block, rank, index, number)
        match self.resume_order:
            case ResumeOrder.MOST_TOKENS:
                return (0, block, -length_bucket(tokens), index, number)
            case ResumeOrder.NEAREST_END:
                return (0, block)  # The lengths of its siblings when it was released are not known.
            case ResumeOrder.ADMISSION:
                return (0, index, number)


@dataclass
class Rollout:
    """Tokens in the worker's memory; ``saved`` of them are in the queue.

    Every beginning counts its ids up from a number of its own, so a trajectory of two writers shows.
    """

    trajectory_id: str
    target: int
    first: int
    incarnation: int = 0
    segments: list[Segment] = field(default_factory=list)
    saved: int = 0
    finished: bool = False

    @property
    def next_id(self) -> int:
        return int(self.segments[-1].token_ids[-1]) + 1 if self.segments else self.first

    def stated(self) -> HeldTokens:
        return held(self.trajectory_id, *self.segments, incarnation=self.incarnation)

    @property
    def tokens(self) -> int:
        return sum(map(len, self.segments))

    def unsaved(self) -> list[Segment]:
        at, parts = 0, []
        for part in self.segments:
            if at + len(part) > self.saved:
                parts.append(slice_segment(part, max(0, self.saved - at)))
            at += len(part)
        return parts


@dataclass
class Leases:
    """Leases of all workers of a mesh."""

    shape: Shape
    resting: set[str] = field(default_factory=set)
    """Trajectories that rest with tokens."""
    continued: int = 0
    """Number of leases after a rest, with its tokens."""
    too_many: set[str] = field(default_factory=set)
    """Members beyond the most members of their group."""
    out_of_order: int = 0
    """Neighbours in a reply that are not in the order of the load."""
    overtaken: int = 0
    """Neighbours in a reply of which the later one was admitted before the other."""

    def note(self, leased: Sequence[LeasedTrajectory]) -> None:
        """Note the reply of one call."""
        members = [(each.trajectory.trajectory_id, each.trajectory.response_token_count) for each in leased]
        for name, tokens in members:
            self.continued += name in self.resting and tokens > 0
            self.resting.discard(name)
            if int(name.rpartition(".")[2]) >= self.shape.most_members:
                self.too_many.add(name)
        self.out_of_order += sum(self.shape.place(*a) > self.shape.place(*b) for a, b in pairwise(members))
        self.overtaken += sum(index_of(a) > index_of(b) and bool(m) == bool(n) for (a, m), (b, n) in pairwise(members))


@dataclass
class Worker:
    """Leases, writes, rests, finishes and scores; dies when told to (its session is simply forgotten).

    Now and then it loses an environment and begins again, and it stalls while ``awake`` is not set.
    """

    store: TrajectoryStore
    rng: random.Random
    leases: Leases
    awake: asyncio.Event = field(default_factory=asyncio.Event)
    registrations: int = 0
    stalls: bool = False
    """It stalls in the midst of a trajectory, as soon as that has saved eight tokens."""
    begins_again: bool = False
    """It has lost the environment of whatever others have begun."""
    session: str = ""
    run_id: str = ""
    held: dict[str, Rollout] = field(default_factory=dict)
    waiting: list[str] = field(default_factory=list)
    """Finished trajectories of dead workers, taken over for scoring."""

    async def run(self) -> None:
        alive = False
        self.awake.set()
        while True:
            try:
                if not alive:
                    # A session may end before its first heartbeat: then the next one is opened.
                    await self.start()
                    await self.register()
                    alive = True
                await self.step()
            except SessionLost:
                alive = False
            except (StoreUnavailable, Conflict):
                await asyncio.sleep(0.01)

    async def start(self) -> None:
        self.session = await self.store.sessions.open("worker")
        self.run_id = await self.store.sessions.heartbeat(self.session)

    async def step(self) -> None:
        run_id = await self.store.sessions.heartbeat(self.session)
        if run_id != self.run_id:
            await self.register()
            self.run_id = run_id
        for leased in await self.store.trajectories.lease_scoring(self.session, 2):
            self.waiting.append(leased.trajectory.trajectory_id)
        leases = await self.store.trajectories.lease(self.session, self.rng.randint(1, 4))
        self.leases.note(leases)
        for leased in leases:
            trajectory = leased.trajectory
            done = trajectory.response_token_count
            self.held[trajectory.trajectory_id] = Rollout(
                trajectory.trajectory_id,
                target=done + self.rng.choice([2, 4, 8, 30]),
                first=self.rng.randrange(1 << 30),
                incarnation=leased.incarnation,
                segments=list(trajectory.segments),
                saved=done,
            )
            if done and self.begins_again:
                await self.restart(self.held[trajectory.trajectory_id])
        newest = await self.store.policies.latest()
        for rollout in list(self.held.values()):
            await self.advance(rollout, newest.policy_version if newest else 0)
        for trajectory_id in self.waiting:
            await self.score(trajectory_id)
        self.waiting.clear()
        await asyncio.sleep(0.001)
        await self.awake.wait()

    async def advance(self, rollout: Rollout, version: int) -> None:
        if rollout.finished:
            if await self.score(rollout.trajectory_id) is WriteStatus.REFUSED:
                rollout.finished = False  # Redis came back with a state before its end: it is finished again.
            else:
                self.held.pop(rollout.trajectory_id, None)
            return
        lags = rollout.incarnation == 0 and self.leases.shape.lags_first(rollout.trajectory_id)
        if lags and rollout.saved:
            return
        if self.rng.random() < RESTARTS:
            await self.restart(rollout)
            return
        if self.rng.random() < RELEASES:
            await self.release(rollout, ReleaseReason.DRAINED)
            return
        if rollout.saved and not self.begins_again and self.rng.random() < RESTS:
            self.leases.resting.add(rollout.trajectory_id)  # Another worker may lease it before this one goes on.
            await self.release(rollout, ReleaseReason.RESTED)
            return
        if rollout.tokens < rollout.target:
            rollout.segments.append(segment(self.rng.randint(1, 4), version, rollout.next_id))
        last = rollout.tokens >= rollout.target and not lags
        for _ in range(3):
            result = await self.write(rollout, last)
            if result.status.ok:
                rollout.saved, rollout.finished = rollout.tokens, last
                if self.stalls and rollout.saved >= 8 and not last:
                    self.stalls = False
                    self.awake.clear()
                    await self.awake.wait()
                return
            if result.status is WriteStatus.LOST or result.saved_token_count in (rollout.saved, rollout.tokens + 1):
                break
            rollout.saved = min(result.saved_token_count, rollout.tokens)
        await self.release(rollout, ReleaseReason.FAILED)

    async def release(self, rollout: Rollout, reason: ReleaseReason) -> None:
        self.held.pop(rollout.trajectory_id, None)
        await self.store.trajectories.release(self.session, [rollout.trajectory_id], reason)

    async def restart(self, rollout: Rollout) -> None:
        (incarnation,) = await self.store.trajectories.restart(self.session, [rollout.trajectory_id])
        if incarnation is None:
            del self.held[rollout.trajectory_id]
            return
        rollout.incarnation, rollout.first = incarnation, self.rng.randrange(1 << 30)
        rollout.segments, rollout.saved = [], 0

    async def write(self, rollout: Rollout, last: bool):  # type: ignore[no-untyped-def]
        words = {
            "trajectory_id": rollout.trajectory_id,
            "token_offset": rollout.saved,
            "segments": rollout.unsaved(),
            "incarnation": rollout.incarnation,
            "digest": digest_of(rollout.segments, rollout.saved),
        }
        if last:
            return (
                await self.store.trajectories.finish(self.session, [Finish(**words, finish_reason=FinishReason.STOP)])
            )[0]
        return (await self.store.trajectories.append(self.session, [Append(**words)]))[0]

    async def score(self, trajectory_id: str) -> WriteStatus:
        value = self.rng.choice([0.0, 0.0, 1.0, 1.0, 0.5])
        outcome = UNSCORABLE if self.rng.random() < 0.05 else scored(value)
        (result,) = await self.store.trajectories.score(
            self.session, [Score(trajectory_id=trajectory_id, outcome=outcome, shaped_reward=value)]
        )
        return result.status

    async def register(self) -> None:
        answers = await self.store.sessions.reregister(self.session, [r.stated() for r in self.held.values()])
        for answer in answers:
            if answer.kept:
                self.held[answer.trajectory_id].saved = min(
                    answer.saved_token_count, self.held[answer.trajectory_id].tokens
                )
            else:
                del self.held[answer.trajectory_id]
        self.registrations += 1


def index_of(name: str) -> int:
    """Admission index of a group, from its name or that of a member."""
    return int(name.partition("-")[2].partition(".")[0])
