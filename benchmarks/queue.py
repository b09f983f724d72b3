"""Full lives of trajectories in the queue, beside a bare stream of the same payload.

One producer and one consumer process on an embedded server with AOF everysec. A life is lease, one partial save,
finish, score, ready, cut, claim (the payload is decoded), batch-file confirmation, trained; batches have one group. The
bare loop is XADD / XREADGROUP / XACK with the same number of entries per call. Both alternate; medians count.

Then the CPU of an operation for increasing numbers of resident trajectories, which alternate too.
"""

import asyncio
import contextlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.frame import Measure, Quick, at_least, at_most, compared
from benchmarks.processes import running_redis
from rollmesh.config.store import StoreConfig
from rollmesh.mesh import Cursor, Desired, RunLimits
from rollmesh.store import Append, Finish, NewGroup, Score, TokenDigest, TrajectoryStore
from rollmesh.store.payload import encode_segments
from rollmesh.store.redis_client import create_client
from rollmesh.types import FinishReason, OutcomeKind, PolicyRecord, Prompt, RewardOutcome, Segment

GROUP_SIZES = (8, 16)
"""Group sizes: the default of a run file, and a larger one. Calls are batched by group, so each trajectory of a larger
group costs less."""
LIFE_TOKENS, FLAT_TOKENS = 2048, 256
PRODUCER_TASKS = 4
"""Groups in flight at a producer, also in the bare loop."""
ADMITTED_GROUPS = 16
"""Groups per admission: a leader admits as many groups as a train step frees."""
BACKLOG_GROUPS = 64
"""Limit of the finished groups that the consumer has not read."""
_PAUSE_SECONDS = 0.001
_BACKLOG_PAUSE_SECONDS = 0.01
"""Pause at a full backlog, which is about 100 ms of the consumer's work; more polls would load the server."""
_FLAT_GROUP_SIZE = 16
_FLAT_SAMPLES = 30
_OPERATIONS = 10
"""Operations of a cycle: admission, lease, save, finish, score, view, cut, claim, confirmation, trained report."""
_UNBOUNDED = 1 << 20


def run(*, quick: Quick = False) -> list[Measure]:
    """Measure; the ratio of lives per second is ours divided by bare, so larger is better."""
    rounds, trajectories = (1, 960) if quick else (11, 6000)
    resident = [1_000, 4_000] if quick else [1_000, 10_000, 100_000]
    with tempfile.TemporaryDirectory(prefix="rollmesh-queue-") as folder, running_redis(Path(folder), 4096) as server:
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            measures = [_lives(server.url, pool, rounds, size, trajectories) for size in GROUP_SIZES]
        return measures + asyncio.run(_flatness(Path(folder) / "flat", resident, cycles=40 if quick else 450))


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


Span = tuple[float, float]
"""Wall clock at the first and after the last call of a process, comparable between processes of one machine."""
RoleMain = Callable[[Work], Coroutine[Any, Any, Span]]
"""Work of one process."""


def _lives(url: str, pool: ProcessPoolExecutor, rounds: int, group_size: int, trajectories: int) -> Measure:
    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    for number in range(-1, rounds):
        # The first pair of runs warms up the processes and does not count.
        groups = trajectories // group_size if number >= 0 else 20
        for arm, values in rates.items():
            name = f"{arm}-{group_size}-{number}"
            work = Work(url=url, run=name, group_size=group_size, groups=groups, tokens=LIFE_TOKENS)
            work = asyncio.run(_prepare(work, stream=arm == "bare"))
            mains = (produce, consume) if arm == "ours" else (produce_bare, consume_bare)
            starts, ends = zip(*pool.map(_run_role, mains, (work, work)), strict=True)
            asyncio.run(_delete_keys(url, f"{{{name}}}:*", name))
            if number >= 0:
                values.append(groups * group_size / (max(ends) - min(starts)))
    name = f"lives of {LIFE_TOKENS}-token trajectories, group size {group_size}"
    median = {arm: statistics.median(values) for arm, values in rates.items()}
    bars = (at_least("ratio", 0.25), at_least("value", 1000.0))
    return compared(name, median["ours"], "1/s", "bare XADD/XREADGROUP/XACK", median["bare"], bars)


def _run_role(main: RoleMain, work: Work) -> Span:
    span: Span = uvloop.run(main(work))
    return span


async def _prepare(work: Work, *, stream: bool = False) -> Work:
    """Initialize the run, or a bare stream; return the work with its leader and trainer."""
    async with await TrajectoryStore.connect(StoreConfig(), run=work.run, url=work.url) as store:
        if stream:
            await store.connection.command("XGROUP", "CREATE", work.run, "bench", "$", "MKSTREAM")
            return work
        limits = RunLimits(
            group_size=work.group_size,
            groups_per_batch=8,
            max_staleness=_UNBOUNDED,
            max_attempts=5,
            session_ttl_seconds=600.0,
            filter_zero_variance=False,
            mask_old_segments=False,
            train_steps=_UNBOUNDED,
        )
        await store.limits.init_run(limits)
        leader = await store.leadership.acquire("bench")
        if leader is None:
            raise RuntimeError(f"the run {work.run} of the bench already has a leader")
        trainer = await store.training.open_session("bench")
        record = PolicyRecord(policy_version=0, train_step=0, path="0", manifest_digest="0")
        await store.policies.announce(trainer, record)
        await store.leadership.set_desired(leader, Desired(pool_size=_UNBOUNDED))
        return replace(work, leader=leader, trainer=trainer)


async def _delete_keys(url: str, *patterns: str) -> None:
    async with await TrajectoryStore.connect(StoreConfig(), run="bench", url=url) as store:
        for pattern in patterns:
            keys = await store.connection.command("KEYS", pattern)
            for at in range(0, len(keys), 500):
                await store.connection.command("UNLINK", *keys[at : at + 500])


async def produce(work: Work) -> Span:
    """Admit, lease, save, finish and score ``work.groups`` groups, with a limited lead over the consumer."""
    segment, admitted = payload(work.tokens // 2), 0

    async def produce_some(session: str, turns: Iterator[int]) -> None:
        for _ in turns:
            await produce_group(store, session, segment, work.group_size)

    async with await TrajectoryStore.connect(StoreConfig(), run=work.run, url=work.url) as store:
        sessions = [await store.sessions.open("bench") for _ in range(PRODUCER_TASKS)]
        started = time.time()
        while admitted < work.groups:
            if (await store.mesh.view()).ready_groups >= BACKLOG_GROUPS:
                await asyncio.sleep(_BACKLOG_PAUSE_SECONDS)
                continue
            count = min(ADMITTED_GROUPS, work.groups - admitted)
            await admit_groups(store, work, admitted, count)
            admitted += count
            turns = iter(range(count))
            await asyncio.gather(*(produce_some(session, turns) for session in sessions))
        return started, time.time()


async def admit_groups(store: TrajectoryStore, work: Work, first: int, count: int) -> None:
    """Admit ``count`` groups from the admission index ``first``, with prompts of 64 tokens."""
    ids, metadata = np.arange(64, dtype=np.int32), {"answer": "42"}
    groups = [
        NewGroup(
            group_id=f"e0-{index}",
            prompt=Prompt(prompt_id=str(index), token_ids=ids, verifier="exact", metadata=metadata),
            needed=work.group_size,
            epoch=0,
            index=index,
        )
        for index in range(first, first + count)
    ]
    await store.leadership.admit(work.leader, groups, Cursor(index=first), Cursor(index=first + count))


async def produce_group(store: TrajectoryStore, session: str, segment: Segment, group_size: int) -> None:
    """Lease the trajectories of one group, and save, finish and score them."""
    leased = await store.trajectories.lease(session, group_size)
    ids = [item.trajectory.trajectory_id for item in leased]
    saves = [Append(trajectory_id=i, token_offset=0, segments=[segment]) for i in ids]
    await store.trajectories.append(session, saves)
    digest = TokenDigest().extended([segment])
    rest: dict[str, Any] = {"token_offset": len(segment), "segments": [segment], "digest": digest}
    finishes = [Finish(trajectory_id=i, finish_reason=FinishReason.STOP, **rest) for i in ids]
    await store.trajectories.finish(session, finishes)
    outcome = RewardOutcome(kind=OutcomeKind.SCORED, value=1.0, parts={"exact": 1.0})
    scores = [Score(trajectory_id=i, outcome=outcome, shaped_reward=float(at % 2)) for at, i in enumerate(ids)]
    results = await store.trajectories.score(session, scores)
    if len(results) != group_size or not all(r.status.ok for r in results):
        raise RuntimeError(f"the bench lost a trajectory: {results}")


async def consume(work: Work) -> Span:
    """Cut, claim, confirm and report one group per step, in admission order."""
    async with await TrajectoryStore.connect(StoreConfig(), run=work.run, url=work.url) as store:
        step, last, started = 1, work.groups, time.time()
        while step <= last:
            ready = (await store.mesh.view()).ready
            for view in ready[: last + 1 - step]:
                await consume_step(store, work, step, view.group_id)
                step += 1
            if not ready:
                await asyncio.sleep(_PAUSE_SECONDS)
        return started, time.time()


async def consume_step(store: TrajectoryStore, work: Work, step: int, group_id: str) -> None:
    """Consume one batch of one group, from its cut to its trained report."""
    # As in a run, the trainer (there, another process) claims the batch while the leader cuts it.
    _, batch = await asyncio.gather(
        store.leadership.cut(work.leader, step, [group_id]),
        store.training.claim(work.trainer, step, 10.0),
    )
    if batch is None or len(batch.groups[0].trajectories) != work.group_size:
        raise RuntimeError(f"the bench claimed a wrong batch at step {step}")
    if batch.groups[0].trajectories[0].response_token_count != work.tokens:
        raise RuntimeError(f"the bench claimed a short trajectory at step {step}")
    await store.training.confirm_batch_file(work.trainer, step, f"digest-{step}")
    await store.training.report_trained(work.trainer, step)


async def produce_bare(work: Work) -> Span:
    """Add the same payload with XADD, in pipelines of one group."""
    data, turns = bare_payload(work.tokens), iter(range(work.groups))

    async def add_some() -> None:
        for _ in turns:
            async with client.pipeline(transaction=False) as pipe:
                for _ in range(work.group_size):
                    pipe.xadd(work.run, {"d": data})
                await pipe.execute()

    async with create_client(work.url) as client:
        started = time.time()
        await asyncio.gather(*(add_some() for _ in range(PRODUCER_TASKS)))
        return started, time.time()


async def consume_bare(work: Work) -> Span:
    """Read and acknowledge one group at a time, with XREADGROUP and XACK."""
    left = work.groups * work.group_size
    async with create_client(work.url) as client:
        started = time.time()
        while left:
            reply: Any = await client.xreadgroup("bench", "one", {work.run: ">"}, count=work.group_size, block=1000)
            for entries in (reply or {}).values():
                ids = [name for name, _ in entries[0]]
                await client.xack(work.run, "bench", *ids)
                left -= len(ids)
        return started, time.time()


def payload(tokens: int) -> Segment:
    """Return a policy segment with random content."""
    rng = np.random.default_rng(0)
    return Segment(
        token_ids=rng.integers(0, 32_000, tokens, dtype=np.int32),
        behavior_logprobs=-rng.random(tokens, dtype=np.float32),
        policy_version=0,
        kv_min_version=0,
    )


def bare_payload(tokens: int) -> bytes:
    """Return the bytes that our queue stores for one trajectory."""
    return b"".join(encode_segments([payload(tokens // 2)] * 2).elements)


@dataclass(slots=True)
class _Resident:
    """Queue with a number of resident trajectories, on a separate server."""

    name: str
    store: TrajectoryStore
    work: Work
    session: str
    segment: Segment
    cursor: int = 0
    step: int = 1
    samples: list[float] = field(default_factory=list)
    """CPU seconds per operation, one value for each sample."""

    async def add(self, count: int) -> None:
        """Admit and complete groups."""
        await admit_groups(self.store, self.work, self.cursor, count)
        for _ in range(count):
            await produce_group(self.store, self.session, self.segment, self.work.group_size)
        self.cursor += count

    async def sample(self, cycles: int) -> None:
        """Measure the CPU of client and server per operation; a cycle adds a group and consumes the oldest one."""
        before = await self._cpu_seconds()
        for _ in range(cycles):
            await self.add(1)
            oldest = (await self.store.mesh.view()).ready[0].group_id
            await consume_step(self.store, self.work, self.step, oldest)
            self.step += 1
        self.samples.append((await self._cpu_seconds() - before) / (_OPERATIONS * cycles))

    async def _cpu_seconds(self) -> float:
        """Return the CPU seconds of this process and of the server's main thread."""
        info = await self.store.connection.command("INFO", "cpu")
        server = float(info["used_cpu_user_main_thread"]) + float(info["used_cpu_sys_main_thread"])
        return time.process_time() + server

    async def used_bytes(self) -> int:
        """Return the memory that the server uses."""
        return int((await self.store.connection.command("INFO", "memory"))["used_memory"])

    async def settle(self) -> None:
        """Wait until the server has rewritten its append-only file after a fill."""
        for _ in range(1200):
            if not (await self.store.connection.command("INFO", "persistence"))["aof_rewrite_in_progress"]:
                return
            await asyncio.sleep(0.05)
        raise RuntimeError("the server did not finish the rewrite of its append-only file in time")


async def _flatness(folder: Path, sizes: list[int], cycles: int) -> list[Measure]:
    """Measure the CPU time of server and client per operation for increasing queue sizes; the sizes alternate.

    The control server holds as many bytes as the largest queue, nearly all of them in keys outside the queue: it
    measures the cost of memory outside the processor's caches.
    """
    async with contextlib.AsyncExitStack() as stack:
        queues = [await _resident(stack, folder, f"{size} resident", size) for size in sizes]
        largest = await queues[-1].used_bytes()
        control = await _resident(stack, folder, f"{sizes[0]} resident and other keys of {largest >> 20} MiB", sizes[0])
        ballast, number = bare_payload(FLAT_TOKENS), 0
        while await control.used_bytes() < largest:
            sets = [("SET", f"ballast:{at}", ballast) for at in range(number, number + 500)]
            await control.store.connection.commands(sets)
            number += 500
        await control.settle()
        for _ in range(_FLAT_SAMPLES):
            for queue in (*queues, control):
                await queue.sample(max(1, cycles // _FLAT_SAMPLES))
    costs = [1e6 * statistics.median(queue.samples) for queue in queues]
    name, other = f"CPU of an operation on {_FLAT_GROUP_SIZE}", 1e6 * statistics.median(control.samples)
    growth, bars = max(costs) / min(costs), (at_most("value", 1.2),)
    return [
        *(
            compared(f"{name}, {queue.name}", cost, "us", queues[0].name, costs[0])
            for queue, cost in zip(queues, costs, strict=True)
        ),
        Measure(name="largest over smallest of these", value=growth, unit="ratio", bars=bars),
        compared(f"{name}, {queues[-1].name}, beside the control", costs[-1], "us", control.name, other),
    ]


async def _resident(stack: contextlib.AsyncExitStack, folder: Path, name: str, size: int) -> _Resident:
    """Start a server whose queue has ``size`` trajectories in ready groups."""
    url = stack.enter_context(running_redis(folder / name.replace(" ", "-"), 4096)).url
    work = await _prepare(Work(url=url, run="flatness", group_size=_FLAT_GROUP_SIZE, groups=0, tokens=FLAT_TOKENS))
    store = await stack.enter_async_context(await TrajectoryStore.connect(StoreConfig(), run=work.run, url=url))
    session = await store.sessions.open("bench")
    queue = _Resident(name=name, store=store, work=work, session=session, segment=payload(FLAT_TOKENS // 2))
    while (missing := size // work.group_size - queue.cursor) > 0:
        await queue.add(min(BACKLOG_GROUPS, missing))
    await queue.settle()
    return queue
