"""The scheduler's own time, and the view of the mesh that it decides on.

Under every preset: ``decide`` on a view that allows no cut, and a cut. Beside them the choice of a generator among
1,000, and the view of 2,048 open groups on a real server. Times of decisions are CPU time of this process; of a view,
time of the server in the script.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from benchmarks.frame import Bar, Measure, Quick, at_most, compared
from benchmarks.mesh_views import large_batch_schedule, view_for_cut, view_with_evidence, view_without_cut
from benchmarks.processes import running_redis
from benchmarks.queue import prepare
from benchmarks.queue_roles import Work, admit_groups, payload
from rollmesh.config.store import StoreConfig
from rollmesh.mesh import MeshView
from rollmesh.scheduling import Schedule, decide, needs_groups
from rollmesh.scheduling.axes import AdmissionRule
from rollmesh.scheduling.presets import PRESETS
from rollmesh.store import TrajectoryStore
from rollmesh.store.queue_types import Append
from rollmesh.types import GeneratorRecord, VersionNeed
from rollmesh.worker.routing import Candidates, Placement

BATCHES = (16, 512, 2048)
OPEN_GROUPS = 2048
GENERATORS = 1000
_DECISION_BAR = (at_most("value", 20.0),)
_CUT_BAR = (at_most("value", 5.0),)
_GROUPS_PER_CALL = 64
_TOKENS = 16


def run(*, quick: Quick = False) -> list[Measure]:
    """Measure; ``quick``: fewer repetitions."""
    repetitions = 3 if quick else 15
    measures = [_decisions(batch, repetitions) for batch in BATCHES]
    measures += [_automatic_pools(BATCHES[0], repetitions), _cuts(BATCHES[-1], repetitions)]
    measures += [_choices(placement, repetitions) for placement in Placement]
    with (
        tempfile.TemporaryDirectory(prefix="rollmesh-schedules-") as folder,
        running_redis(Path(folder), 1024) as redis,
    ):
        return measures + asyncio.run(_views(redis.url, repetitions))


def _decisions(batch: int, repetitions: int) -> Measure:
    """Measure ``decide`` without a cut under every preset; the slowest one counts."""
    name = f"decide without a cut, B = {batch:,}"
    return _slowest(name, "us", _DECISION_BAR, lambda preset: _decision_seconds(preset, batch, repetitions) * 1e6)


def _decision_seconds(preset: str, batch: int, repetitions: int) -> float:
    schedule = large_batch_schedule(preset, batch)
    return _seconds_without_cut(preset, schedule, view_without_cut(schedule), repetitions)


def _automatic_pools(batch: int, repetitions: int) -> Measure:
    """Measure ``decide`` without a cut under every preset that may have an automatic pool; the slowest one counts."""

    def microseconds(preset: str) -> float:
        schedule = large_batch_schedule(preset, batch, "schedule.pool_size=auto")
        return _seconds_without_cut(preset, schedule, view_with_evidence(schedule), repetitions) * 1e6

    able = [n for n, p in PRESETS.items() if not p.barrier and p.admission is not AdmissionRule.WAVE]
    return _slowest(f"decide with pool_size auto, B = {batch}", "us", _DECISION_BAR, microseconds, able)


def _seconds_without_cut(preset: str, schedule: Schedule, view: MeshView, repetitions: int) -> float:
    if needs_groups(schedule, view) or decide(schedule, view).cut is not None:
        raise RuntimeError(f"the view of the bench allows a cut under {preset}")

    def decide_once() -> None:
        if not needs_groups(schedule, view):
            decide(schedule, view)

    return cpu_seconds(decide_once, repetitions, calls=1000)


def _cuts(batch: int, repetitions: int) -> Measure:
    """Measure ``decide`` with a cut under every preset; the slowest one counts."""
    return _slowest(
        f"cut, B = {batch:,}", "ms", _CUT_BAR, lambda preset: _cut_seconds(preset, batch, repetitions) * 1e3
    )


def _cut_seconds(preset: str, batch: int, repetitions: int) -> float:
    schedule = large_batch_schedule(preset, batch)
    view = view_for_cut(schedule)
    if len(set(decide(schedule, view).cut or ())) != schedule.groups_per_batch:
        raise RuntimeError(f"the view of the bench allows no cut under {preset}")
    return cpu_seconds(lambda: decide(schedule, view), repetitions, calls=10)


def _slowest(
    name: str, unit: str, bars: tuple[Bar, ...], measure: Callable[[str], float], presets: Iterable[str] = PRESETS
) -> Measure:
    taken = {preset: measure(preset) for preset in presets}
    slowest, fastest = max(taken, key=taken.__getitem__), min(taken, key=taken.__getitem__)
    return compared(f"{name}: {slowest}", taken[slowest], unit, f"fastest preset: {fastest}", taken[fastest], bars)


def _choices(placement: Placement, repetitions: int) -> Measure:
    """Measure the choice for one call and its bookkeeping, beside a scan over all generators."""
    records, need = _generators(), VersionNeed()
    candidates = Candidates(placement)
    candidates.update({record.instance_id: record for record in records})
    running: list[str] = []
    calls = itertools.count()

    def choose() -> None:
        # As in a run, a call ends for each that begins, and each is the next one of some group.
        prompt_id = str(next(calls) // 8)
        chosen = candidates.choose(need, prompt_id=prompt_id)
        assert chosen is not None
        candidates.occupy(chosen.instance_id, _TOKENS, prompt_id)
        running.append(chosen.instance_id)
        if len(running) > 8 * GENERATORS:
            candidates.leave(running.pop(0), _TOKENS)

    def scan() -> None:
        min(records, key=lambda r: ((r.running_count + r.waiting_count) / r.slot_count, r.instance_id))

    for _ in range(8 * GENERATORS):
        choose()
    name = f"choice of a generator among {GENERATORS:,} by {placement}"
    chosen, scanned = (cpu_seconds(call, repetitions, calls=n) * 1e6 for call, n in ((choose, 5000), (scan, 20)))
    return compared(name, chosen, "us", "scan over all generators", scanned, _DECISION_BAR)


def _generators() -> list[GeneratorRecord]:
    return [
        GeneratorRecord(
            instance_id=f"{number:016x}",
            address=f"10.0.{number // 256}.{number % 256}:50051",
            policy_version=7,
            running_count=number % 17,
            waiting_count=0,
            slot_count=64,
            kv_token_capacity=65_536,
            kv_tokens_used=number % 4096,
            serving=True,
        )
        for number in range(GENERATORS)
    ]


async def _views(url: str, repetitions: int) -> list[Measure]:
    """Measure the script and the payload of a view without and with single groups."""
    work = await prepare(Work(url=url, run="views", group_size=1, groups=0, tokens=_TOKENS), OPEN_GROUPS)
    async with await TrajectoryStore.connect(StoreConfig(), run=work.run, url=url) as store:
        await _open_groups(store, work)
        microseconds, sent = {}, {}
        for groups in (False, True):
            microseconds[groups], sent[groups] = await _view_cost(store, groups=groups, calls=20 * repetitions)
    name, baseline = f"view of {OPEN_GROUPS:,} open groups without single groups", "with single groups"
    return [
        compared(f"{name}, script", microseconds[False], "us", baseline, microseconds[True]),
        compared(f"{name}, payload", sent[False], "bytes", baseline, sent[True]),
    ]


async def _open_groups(store: TrajectoryStore, work: Work) -> None:
    """Open groups of one trajectory, each with saved tokens."""
    session, segments = await store.sessions.open("bench"), [payload(_TOKENS)]
    for first in range(0, OPEN_GROUPS, _GROUPS_PER_CALL):
        await admit_groups(store, work, first, _GROUPS_PER_CALL)
        leased = [item.trajectory.trajectory_id for item in await store.trajectories.lease(session, _GROUPS_PER_CALL)]
        saves = [Append(trajectory_id=name, token_offset=0, segments=segments) for name in leased]
        await store.trajectories.append(session, saves)
    view = await store.mesh.view()
    if not len(view.stalest_open) == sum(count for _, count in view.unclaimed_by_step) == OPEN_GROUPS:
        raise RuntimeError(f"the bench opened {view.open_groups} groups, {len(view.stalest_open)} of them are listed")


async def _view_cost(store: TrajectoryStore, *, groups: bool, calls: int) -> tuple[float, float]:
    """Return microseconds of the server in the script, and bytes that it sends, per view."""
    before = await _server_totals(store)
    idle = await _server_totals(store)
    for _ in range(calls):
        await store.mesh.view(groups=groups)
    after = await _server_totals(store)
    script, sent = (after[at] - idle[at] - (idle[at] - before[at]) for at in range(2))
    return script / calls, sent / calls


async def _server_totals(store: TrajectoryStore) -> tuple[float, float]:
    """Return the server's microseconds in functions, and its bytes sent, since its start."""
    commands: dict[str, Any] = await store.connection.command("INFO", "commandstats")
    stats: dict[str, Any] = await store.connection.command("INFO", "stats")
    scripts = (values for name, values in commands.items() if name.startswith(("cmdstat_fcall", "cmdstat_evalsha")))
    return sum(float(values["usec"]) for values in scripts), float(stats["total_net_output_bytes"])


def cpu_seconds(work: Callable[[], object], repetitions: int, *, calls: int) -> float:
    """Return the median CPU seconds of one call, over ``repetitions`` loops of ``calls`` after one that warms up."""
    taken = []
    for _ in range(repetitions + 1):
        start = time.process_time()
        for _ in range(calls):
            work()
        taken.append((time.process_time() - start) / calls)
    return statistics.median(taken[1:])
