"""Processes of the queue bench: producer and consumer, ours and bare."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import uvloop

from rollmesh.config.store import StoreConfig
from rollmesh.mesh import Cursor
from rollmesh.store import Append, Finish, NewGroup, Score, TokenDigest, TrajectoryStore
from rollmesh.store.payload import encode_segments
from rollmesh.store.redis_client import create_client
from rollmesh.types import FinishReason, OutcomeKind, Prompt, RewardOutcome, Segment

T = TypeVar("T")

PRODUCER_TASKS = 4
"""Groups in flight at a producer, also in the bare loop."""
ADMITTED_GROUPS = 16
"""Groups per admission: a leader admits as many groups as a train step frees."""
BACKLOG_GROUPS = 64
"""Limit of the finished groups that the consumer has not read."""
_PAUSE_SECONDS = 0.001
_BACKLOG_PAUSE_SECONDS = 0.01
"""Pause at a full backlog, which is about 100 ms of the consumer's work; more polls would load the server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Assignment of one process."""

    url: str
    run: str
    group_size: int
    groups: int
    tokens: int
    """Tokens of a trajectory; half of them are sent in a partial save."""
    leader: str = ""
    trainer: str = ""


@dataclass(slots=True)
class Role:
    """Seconds of every call by operation, and of the whole role."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    started: float = 0.0
    """Wall clock at the first call, comparable between processes of one machine."""
    ended: float = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record the start and the end of the block."""
        self.started = time.time()
        yield
        self.ended = time.time()

    async def timed(self, name: str, call: Awaitable[T]) -> T:
        """Await a call and record its duration."""
        start = time.perf_counter()
        result = await call
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result


RoleMain = Callable[[Work, Role], Coroutine[Any, Any, None]]
"""Work of one process."""


def _new_group(index: int, group_size: int) -> NewGroup:
    """Return a new group with a prompt of 64 tokens."""
    prompt = Prompt(
        prompt_id=str(index), token_ids=np.arange(64, dtype=np.int32), verifier="exact", metadata={"answer": "42"}
    )
    return NewGroup(group_id=f"e0-{index}", prompt=prompt, needed=group_size, epoch=0, index=index)


def admit_groups(store: TrajectoryStore, work: Work, first: int, count: int) -> Awaitable[object]:
    """Return the call that admits ``count`` groups from the admission index ``first``."""
    groups = [_new_group(first + at, work.group_size) for at in range(count)]
    return store.leadership.admit(work.leader, groups, Cursor(index=first), Cursor(index=first + count))


def payload(tokens: int) -> Segment:
    """Return a policy segment with random content."""
    rng = np.random.default_rng(0)
    return Segment(
        token_ids=rng.integers(0, 32_000, tokens, dtype=np.int32),
        behavior_logprobs=-rng.random(tokens, dtype=np.float32),
        policy_version=0,
        kv_min_version=0,
    )


async def produce_group(store: TrajectoryStore, session: str, role: Role, segment: Segment, group_size: int) -> None:
    """Lease the trajectories of one group, and save, finish and score them."""
    leased = await role.timed("lease", store.trajectories.lease(session, group_size))
    ids = [item.trajectory.trajectory_id for item in leased]
    tokens = len(segment)
    saves = [Append(trajectory_id=i, token_offset=0, segments=[segment]) for i in ids]
    await role.timed("partial save", store.trajectories.append(session, saves))
    rest: dict[str, Any] = {"token_offset": tokens, "segments": [segment], "digest": TokenDigest().extended([segment])}
    finishes = [Finish(trajectory_id=i, finish_reason=FinishReason.STOP, **rest) for i in ids]
    await role.timed("finish", store.trajectories.finish(session, finishes))
    outcome = RewardOutcome(kind=OutcomeKind.SCORED, value=1.0, parts={"exact": 1.0})
    scores = [Score(trajectory_id=i, outcome=outcome, shaped_reward=float(at % 2)) for at, i in enumerate(ids)]
    results = await role.timed("score", store.trajectories.score(session, scores))
    if len(results) != group_size or not all(r.status.ok for r in results):
        raise RuntimeError(f"the bench lost a trajectory: {results}")


async def consume_step(store: TrajectoryStore, work: Work, step: int, group_id: str, role: Role) -> None:
    """Consume one batch of one group, from its cut to its trained report."""
    # As in a run, the trainer (there, another process) claims the batch while the leader cuts it.
    _, batch = await asyncio.gather(
        role.timed("cut", store.leadership.cut(work.leader, step, [group_id])),
        role.timed("claim", store.training.claim(work.trainer, step, 10.0)),
    )
    if batch is None or len(batch.groups[0].trajectories) != work.group_size:
        raise RuntimeError(f"the bench claimed a wrong batch at step {step}")
    if batch.groups[0].trajectories[0].response_token_count != work.tokens:
        raise RuntimeError(f"the bench claimed a short trajectory at step {step}")
    await role.timed("confirm", store.training.confirm_batch_file(work.trainer, step, f"digest-{step}"))
    await role.timed("report trained", store.training.report_trained(work.trainer, step))


async def produce(work: Work, role: Role) -> None:
    """Admit, lease, save, finish and score ``work.groups`` groups, with a limited lead over the consumer."""
    segment, admitted = payload(work.tokens // 2), 0

    async def produce_some(session: str, turns: Iterator[int]) -> None:
        for _ in turns:
            await produce_group(store, session, role, segment, work.group_size)

    async with await TrajectoryStore.connect(StoreConfig(), run=work.run, url=work.url) as store:
        sessions = [await store.sessions.open("bench") for _ in range(PRODUCER_TASKS)]
        with role.running():
            while admitted < work.groups:
                if (await store.mesh.view()).ready_groups >= BACKLOG_GROUPS:
                    await asyncio.sleep(_BACKLOG_PAUSE_SECONDS)
                    continue
                count = min(ADMITTED_GROUPS, work.groups - admitted)
                await role.timed("admit", admit_groups(store, work, admitted, count))
                admitted += count
                turns = iter(range(count))
                await asyncio.gather(*(produce_some(session, turns) for session in sessions))


async def consume(work: Work, role: Role) -> None:
    """Cut, claim, confirm and report one group per step, in admission order."""
    async with await TrajectoryStore.connect(StoreConfig(), run=work.run, url=work.url) as store:
        step, last = 1, work.groups
        with role.running():
            while step <= last:
                ready = (await store.mesh.view()).ready
                for view in ready[: last + 1 - step]:
                    await consume_step(store, work, step, view.group_id, role)
                    step += 1
                if not ready:
                    await asyncio.sleep(_PAUSE_SECONDS)


async def produce_bare(work: Work, role: Role) -> None:
    """Add the same payload with XADD, in pipelines of one group."""
    data, turns = bare_payload(work.tokens), iter(range(work.groups))

    async def add_some() -> None:
        for _ in turns:
            async with client.pipeline(transaction=False) as pipe:
                for _ in range(work.group_size):
                    pipe.xadd(work.run, {"d": data})
                await role.timed("XADD", pipe.execute())

    async with create_client(work.url) as client:
        with role.running():
            await asyncio.gather(*(add_some() for _ in range(PRODUCER_TASKS)))


async def consume_bare(work: Work, role: Role) -> None:
    """Read and acknowledge one group at a time, with XREADGROUP and XACK."""
    left = work.groups * work.group_size
    async with create_client(work.url) as client:
        with role.running():
            while left:
                read = client.xreadgroup("bench", "one", {work.run: ">"}, count=work.group_size, block=1000)
                reply: Any = await role.timed("XREADGROUP", read)
                for entries in (reply or {}).values():
                    ids = [name for name, _ in entries[0]]
                    await role.timed("XACK", client.xack(work.run, "bench", *ids))
                    left -= len(ids)


def bare_payload(tokens: int) -> bytes:
    """Return the bytes that our queue stores for one trajectory."""
    return b"".join(encode_segments([payload(tokens // 2)] * 2).elements)


def run_role(main: RoleMain, work: Work) -> Role:
    """Run one role in this process and return its times."""
    role = Role()
    uvloop.run(main(work, role))
    return role
