"""``rollmesh bench queue``: full lives of trajectories in the queue, with a bare stream of the same payload.

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
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rollmesh.bench.measure import Figure, Measure, at_least, at_most, compared
from rollmesh.bench.queue_roles import (
    Role,
    Work,
    bare_payload,
    consume_step,
    new_group,
    payload,
    produce_group,
    run_role,
)
from rollmesh.config.services import StoreConfig
from rollmesh.mesh import Cursor, Desired, RunLimits
from rollmesh.store import EmbeddedOptions, EmbeddedServer, TrajectoryStore
from rollmesh.types import PolicyRecord, Segment

LIFE_TOKENS, FLAT_TOKENS = 2048, 256
GROUP_SIZES = (8, 16)
"""Group sizes: the default of a run file, and a larger one. Calls are batched by group, so each trajectory of a larger
group costs less."""
_LIVES_BARS = (at_least(Figure.RATIO, 0.25), at_least(Figure.VALUE, 1000.0))
_FLAT_BARS = (at_most(Figure.VALUE, 1.2),)
_FLAT_GROUP_SIZE = 16
_FILL_GROUPS = 64
_FLAT_SAMPLES = 30
_SETTLE_CHECKS = 1200


def run(*, quick: bool = False) -> list[Measure]:
    """Measure; the ratio of lives per second is ours divided by bare, so larger is better."""
    rounds, trajectories = (1, 960) if quick else (11, 6000)
    resident = [1_000, 4_000] if quick else [1_000, 10_000, 100_000]
    with tempfile.TemporaryDirectory(prefix="rollmesh-queue-") as folder:
        server = EmbeddedServer(Path(folder), EmbeddedOptions(maxmemory_bytes=4 << 30))
        server.start()
        try:
            with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as pool:
                measures = [
                    measure for size in GROUP_SIZES for measure in _lives(server.url, pool, rounds, size, trajectories)
                ]
            return measures + asyncio.run(_flatness(Path(folder) / "flat", resident, cycles=40 if quick else 450))
        finally:
            server.kill()


def _lives(url: str, pool: ProcessPoolExecutor, rounds: int, group_size: int, trajectories: int) -> list[Measure]:
    ours, bare, seconds = [], [], dict[str, list[float]]()
    for number in range(-1, rounds):
        # The first pair of runs warms up the processes and does not count.
        groups = trajectories // group_size if number >= 0 else 20
        rate, roles = _round(url, pool, number, group_size, groups)
        bare_rate, bare_roles = _bare_round(url, pool, number, group_size, groups)
        if number < 0:
            continue
        ours.append(rate)
        bare.append(bare_rate)
        for role in (*roles, *bare_roles):
            for name, values in role.seconds.items():
                seconds.setdefault(name, []).extend(values)
    name = f"lives of {LIFE_TOKENS}-token trajectories, group size {group_size}"
    measures = [
        compared(
            name, statistics.median(ours), "1/s", "bare XADD/XREADGROUP/XACK", statistics.median(bare), _LIVES_BARS
        ),
    ]
    for operation, values in seconds.items():
        for percent in (50, 99):
            value = 1000 * float(np.percentile(values, percent))
            measures.append(Measure(name=f"{operation} of {group_size}, p{percent}", value=value, unit="ms"))
    return measures


def _round(url: str, pool: ProcessPoolExecutor, number: int, group_size: int, groups: int) -> tuple[float, list[Role]]:
    run_name = f"lives-{group_size}-{number}"
    work = asyncio.run(_prepare(url, run_name, group_size, groups, LIFE_TOKENS))
    futures = [pool.submit(run_role, name, work) for name in ("produce", "consume")]
    roles = [future.result() for future in futures]
    asyncio.run(_delete_keys(url, f"{{{run_name}}}:*"))
    return _rate(roles, work), roles


def _bare_round(
    url: str, pool: ProcessPoolExecutor, number: int, group_size: int, groups: int
) -> tuple[float, list[Role]]:
    stream = f"bare-{group_size}-{number}"
    work = Work(url=url, run=stream, group_size=group_size, groups=groups, tokens=LIFE_TOKENS)
    asyncio.run(_make_stream(url, stream))
    futures = [pool.submit(run_role, name, work) for name in ("produce_bare", "consume_bare")]
    roles = [future.result() for future in futures]
    asyncio.run(_delete_keys(url, stream))
    return _rate(roles, work), roles


def _rate(roles: list[Role], work: Work) -> float:
    """Return trajectories per second, from the first to the last call of both processes."""
    return work.groups * work.group_size / (max(r.ended for r in roles) - min(r.started for r in roles))


async def _prepare(url: str, run_name: str, group_size: int, groups: int, tokens: int) -> Work:
    async with await TrajectoryStore.connect(StoreConfig(), run=run_name, url=url) as store:
        await store.limits.init_run(
            RunLimits(
                group_size=group_size,
                groups_per_batch=8,
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
            raise RuntimeError(f"the run {run_name} of the bench already has a leader")
        trainer = await store.training.open_session("bench")
        record = PolicyRecord(policy_version=0, train_step=0, path="0", manifest_digest="0")
        await store.policies.announce(trainer, record)
        await store.leadership.set_desired(leader, Desired(pool_size=1 << 20))
        return Work(
            url=url,
            run=run_name,
            group_size=group_size,
            groups=groups,
            tokens=tokens,
            leader=leader,
            trainer=trainer,
        )


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
        index = self.cursor
        await self.store.leadership.admit(
            self.work.leader, [new_group(index, self.work.group_size)], Cursor(index=index), Cursor(index=index + 1)
        )
        await produce_group(self.store, self.session, role, segment, self.work.group_size)
        oldest = (await self.store.mesh.view()).ready[0].group_id
        await consume_step(self.store, self.work, self.step, oldest, role)
        self.cursor, self.step = index + 1, self.step + 1

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
    server = EmbeddedServer(folder / name.replace(" ", "-"), EmbeddedOptions(maxmemory_bytes=4 << 30))
    server.start()
    stack.callback(server.kill)
    work = await _prepare(server.url, "flatness", _FLAT_GROUP_SIZE, 0, FLAT_TOKENS)
    store = await stack.enter_async_context(await TrajectoryStore.connect(StoreConfig(), run=work.run, url=server.url))
    queue = _Resident(name=name, store=store, work=work, session=await store.sessions.open("bench"))
    queue.cursor = await _fill(store, work, queue.session, 0, size)
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


async def _fill(store: TrajectoryStore, work: Work, session: str, cursor: int, size: int) -> int:
    """Add ready groups until ``size`` trajectories are resident; return the new cursor."""
    segment = payload(FLAT_TOKENS // 2)
    while (missing := size // work.group_size - (await store.mesh.view()).ready_groups) > 0:
        count = min(_FILL_GROUPS, missing)
        groups = [new_group(cursor + at, work.group_size) for at in range(count)]
        await store.leadership.admit(work.leader, groups, Cursor(index=cursor), Cursor(index=cursor + count))
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
