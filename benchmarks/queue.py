"""Full lives of trajectories in the queue, with a bare stream of the same payload.

One producer and one consumer process on an embedded server with AOF everysec. A life is lease, one partial save,
finish, score, ready, cut, claim (the payload is decoded), batch-file confirmation, trained; batches have one group. The
bare loop is XADD / XREADGROUP / XACK with the same number of entries per call. Both alternate; medians count.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from benchmarks.frame import Measure, Quick, at_least, at_most, compared
from benchmarks.processes import running_redis
from benchmarks.queue_roles import (
    Role,
    RoleMain,
    Work,
    admit_groups,
    bare_payload,
    consume,
    consume_bare,
    consume_step,
    payload,
    produce,
    produce_bare,
    produce_group,
    run_role,
)
from rollmesh.config.store import StoreConfig
from rollmesh.mesh import Desired, RunLimits
from rollmesh.store import TrajectoryStore
from rollmesh.types import PolicyRecord, Segment

LIFE_TOKENS, FLAT_TOKENS = 2048, 256
GROUP_SIZES = (8, 16)
"""Group sizes: the default of a run file, and a larger one. Calls are batched by group, so each trajectory of a larger
group costs less."""
_LIVES_BARS = (at_least("ratio", 0.25), at_least("value", 1000.0))
_FLAT_BARS = (at_most("value", 1.2),)
_FLAT_GROUP_SIZE = 16
_FILL_GROUPS = 64
_FLAT_SAMPLES = 30
_SETTLE_CHECKS = 1200


def run(*, quick: Quick = False) -> list[Measure]:
    """Measure; the ratio of lives per second is ours divided by bare, so larger is better."""
    rounds, trajectories = (1, 960) if quick else (11, 6000)
    resident = [1_000, 4_000] if quick else [1_000, 10_000, 100_000]
    with tempfile.TemporaryDirectory(prefix="rollmesh-queue-") as folder, running_redis(Path(folder), 4096) as server:
        with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
            measures = [
                measure for size in GROUP_SIZES for measure in _lives(server.url, pool, rounds, size, trajectories)
            ]
        return measures + asyncio.run(_flatness(Path(folder) / "flat", resident, cycles=40 if quick else 450))


def _lives(url: str, pool: ProcessPoolExecutor, rounds: int, group_size: int, trajectories: int) -> list[Measure]:
    rates: dict[str, list[float]] = {"ours": [], "bare": []}
    seconds: dict[str, list[float]] = {}
    for number in range(-1, rounds):
        # The first pair of runs warms up the processes and does not count.
        groups = trajectories // group_size if number >= 0 else 20
        for arm, values in rates.items():
            name = f"{arm}-{group_size}-{number}"
            work = Work(url=url, run=name, group_size=group_size, groups=groups, tokens=LIFE_TOKENS)
            rate, roles = _ours(work, pool) if arm == "ours" else _bare(work, pool)
            if number < 0:
                continue
            values.append(rate)
            for operation, durations in (item for role in roles for item in role.seconds.items()):
                seconds.setdefault(operation, []).extend(durations)
    name = f"lives of {LIFE_TOKENS}-token trajectories, group size {group_size}"
    median = {arm: statistics.median(values) for arm, values in rates.items()}
    return [
        compared(name, median["ours"], "1/s", "bare XADD/XREADGROUP/XACK", median["bare"], _LIVES_BARS),
        *(
            Measure(name=f"{operation} of {group_size}, p{percent}", value=float(value), unit="ms")
            for operation, durations in seconds.items()
            for percent, value in zip((50, 99), 1000 * np.percentile(durations, (50, 99)), strict=True)
        ),
    ]


def _ours(work: Work, pool: ProcessPoolExecutor) -> tuple[float, list[Role]]:
    work = asyncio.run(prepare(work))
    result = _run_both(pool, (produce, consume), work)
    asyncio.run(_delete_keys(work.url, f"{{{work.run}}}:*"))
    return result


def _bare(work: Work, pool: ProcessPoolExecutor) -> tuple[float, list[Role]]:
    asyncio.run(_make_stream(work.url, work.run))
    result = _run_both(pool, (produce_bare, consume_bare), work)
    asyncio.run(_delete_keys(work.url, work.run))
    return result


def _run_both(pool: ProcessPoolExecutor, mains: tuple[RoleMain, RoleMain], work: Work) -> tuple[float, list[Role]]:
    """Run both processes; return trajectories per second from the first to the last call, and the roles."""
    roles = list(pool.map(run_role, mains, (work, work)))
    return work.groups * work.group_size / (max(r.ended for r in roles) - min(r.started for r in roles)), roles


async def prepare(work: Work, groups_per_batch: int = 8) -> Work:
    """Initialize the run; return the work with its leader and trainer."""
    async with await TrajectoryStore.connect(StoreConfig(), run=work.run, url=work.url) as store:
        await store.limits.init_run(
            RunLimits(
                group_size=work.group_size,
                groups_per_batch=groups_per_batch,
                max_staleness=1 << 20,
                max_attempts=5,
                session_ttl_seconds=600.0,
                filter_zero_variance=False,
                mask_old_segments=False,
                train_steps=1 << 20,
            )
        )
        leader = await store.leadership.acquire("bench")
        if leader is None:
            raise RuntimeError(f"the run {work.run} of the bench already has a leader")
        trainer = await store.training.open_session("bench")
        record = PolicyRecord(policy_version=0, train_step=0, path="0", manifest_digest="0")
        await store.policies.announce(trainer, record)
        await store.leadership.set_desired(leader, Desired(pool_size=1 << 20))
        return replace(work, leader=leader, trainer=trainer)


async def _make_stream(url: str, stream: str) -> None:
    async with await TrajectoryStore.connect(StoreConfig(), run="bench", url=url) as store:
        await store.connection.command("XGROUP", "CREATE", stream, "bench", "$", "MKSTREAM")


async def _delete_keys(url: str, pattern: str) -> None:
    async with await TrajectoryStore.connect(StoreConfig(), run="bench", url=url) as store:
        keys = await store.connection.command("KEYS", pattern.replace("[", "\\["))
        for at in range(0, len(keys), 500):
            await store.connection.command("UNLINK", *keys[at : at + 500])


@dataclass(slots=True)
class _Resident:
    """Queue with a number of resident trajectories, on a separate server."""

    name: str
    store: TrajectoryStore
    work: Work
    session: str
    cursor: int = 0
    step: int = 1
    samples: list[float] = field(default_factory=list)
    """CPU seconds per operation, one value for each sample."""

    async def cycle(self, role: Role, segment: Segment) -> None:
        """Admit and complete one group, and consume the oldest group."""
        await admit_groups(self.store, self.work, self.cursor, 1)
        await produce_group(self.store, self.session, role, segment, self.work.group_size)
        oldest = (await self.store.mesh.view()).ready[0].group_id
        await consume_step(self.store, self.work, self.step, oldest, role)
        self.cursor, self.step = self.cursor + 1, self.step + 1

    async def sample(self, cycles: int, segment: Segment) -> None:
        """Measure the CPU time of client and server per operation, over ``cycles`` groups."""
        role, before = Role(), await _cpu_seconds(self.store)
        for _ in range(cycles):
            await self.cycle(role, segment)
        operations = 2 * cycles + sum(map(len, role.seconds.values()))
        self.samples.append((await _cpu_seconds(self.store) - before) / operations)


async def _flatness(folder: Path, sizes: list[int], cycles: int) -> list[Measure]:
    """Measure the CPU time of server and client per operation for increasing queue sizes; the sizes alternate.

    The control server holds as many bytes as the largest queue, nearly all of them in keys outside the queue: it
    measures the cost of memory outside the processor's caches.
    """
    segment = payload(FLAT_TOKENS // 2)
    async with contextlib.AsyncExitStack() as stack:
        queues = [await _resident(stack, folder, f"{size} resident", size) for size in sizes]
        largest = await _used_bytes(queues[-1].store)
        control = await _resident(stack, folder, f"{sizes[0]} resident and other keys of {largest >> 20} MiB", sizes[0])
        await _add_ballast(control.store, largest)
        for _ in range(_FLAT_SAMPLES):
            for queue in (*queues, control):
                await queue.sample(max(1, cycles // _FLAT_SAMPLES), segment)
    costs = [1e6 * statistics.median(queue.samples) for queue in queues]
    measures = [
        compared(f"CPU of an operation on {_FLAT_GROUP_SIZE}, {queue.name}", cost, "us", queues[0].name, costs[0])
        for queue, cost in zip(queues, costs, strict=True)
    ]
    name, cost = f"CPU of an operation on {_FLAT_GROUP_SIZE}", 1e6 * statistics.median(control.samples)
    return [
        *measures,
        Measure(name="largest over smallest of these", value=max(costs) / min(costs), unit="ratio", bars=_FLAT_BARS),
        compared(f"{name}, {queues[-1].name}", costs[-1], "us", control.name, cost),
    ]


async def _resident(stack: contextlib.AsyncExitStack, folder: Path, name: str, size: int) -> _Resident:
    url = stack.enter_context(running_redis(folder / name.replace(" ", "-"), 4096)).url
    work = await prepare(Work(url=url, run="flatness", group_size=_FLAT_GROUP_SIZE, groups=0, tokens=FLAT_TOKENS))
    store = await stack.enter_async_context(await TrajectoryStore.connect(StoreConfig(), run=work.run, url=url))
    queue = _Resident(name=name, store=store, work=work, session=await store.sessions.open("bench"))
    queue.cursor = await _fill(store, work, queue.session, size)
    await _settled(store)
    return queue


async def _used_bytes(store: TrajectoryStore) -> int:
    return int((await store.connection.command("INFO", "memory"))["used_memory"])


async def _add_ballast(store: TrajectoryStore, until: int) -> None:
    """Fill the server with plain strings of a trajectory's size until it uses ``until`` bytes."""
    data, number = bytes(bare_payload(FLAT_TOKENS)), 0
    while await _used_bytes(store) < until:
        await store.connection.commands([("SET", f"ballast:{number + at}", data) for at in range(500)])
        number += 500
    await _settled(store)


async def _fill(store: TrajectoryStore, work: Work, session: str, size: int) -> int:
    """Add ready groups until ``size`` trajectories are resident; return the cursor."""
    segment, cursor = payload(FLAT_TOKENS // 2), 0
    while (missing := size // work.group_size - (await store.mesh.view()).ready_groups) > 0:
        count = min(_FILL_GROUPS, missing)
        await admit_groups(store, work, cursor, count)
        for _ in range(count):
            await produce_group(store, session, Role(), segment, work.group_size)
        cursor += count
    return cursor


async def _settled(store: TrajectoryStore) -> None:
    """Wait until the server has rewritten its append-only file after the fill."""
    for _ in range(_SETTLE_CHECKS):
        if not (await store.connection.command("INFO", "persistence"))["aof_rewrite_in_progress"]:
            return
        await asyncio.sleep(0.05)
    raise RuntimeError("the server did not finish the rewrite of its append-only file in time")


async def _cpu_seconds(store: TrajectoryStore) -> float:
    """Return the CPU seconds of this process and of the server's main thread."""
    info = await store.connection.command("INFO", "cpu")
    server = float(info["used_cpu_user_main_thread"]) + float(info["used_cpu_sys_main_thread"])
    return time.process_time() + server
