"""One level of the scale bench: a whole mesh of processes with a given number of rollouts in flight."""

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.processes import running_redis, write_run_file
from benchmarks.scale_processes import TEACHER, ProcessOptions
from rollmesh.config import RunConfig
from rollmesh.errors import RollmeshError
from rollmesh.store import EmbeddedServer, TrajectoryStore
from rollmesh.store.queue_types import StoreCounts

THIS_BUILD = Path(__file__).parents[1] / "services"
GROUP_SIZE = 8
POOL_BATCHES = 2.5
"""Batches in flight: 4,000 trajectories per batch with 10,000 in flight, as in docs/architecture.md."""
_MAX_STALENESS = 16
"""Staleness bound, far above the staleness of 2.5 batches in flight; the default of 4 would delay admission."""
_FILLED = 0.98
"""Share of the rollouts in flight with which a level has started."""
_WATCH_SECONDS = 0.25
_START_SECONDS = 300.0
_STOP_SECONDS = 120.0


class ScaleError(RollmeshError):
    """A level did not start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Size and load of one level."""

    in_flight: int
    generators: int
    registered: int
    mean_tokens: int
    chunk_tokens: int
    tokens_per_second: float
    warm_up_seconds: float
    window_seconds: float
    workers: int = 2
    generator_processes: int = 2
    taught: bool = False
    """True if an emulated teacher scores every trajectory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Figures of one level over its window."""

    in_flight: float
    """Mean number of leased trajectories."""
    finished: int
    seconds: float
    tokens: int
    cpu_seconds: dict[str, float]
    """CPU seconds by part of the mesh."""
    samples: dict[str, list[float]]
    """Seconds of event-loop lag by part, of PINGs to Redis, of the leader's views and of its decisions."""
    faults: dict[str, int]
    """Counts over the whole level that must be 0."""
    taught: bool


@dataclass(slots=True)
class _Mesh:
    folder: Path
    load: Load
    build: Path
    server: EmbeddedServer
    store: TrajectoryStore
    processes: dict[str, list[subprocess.Popen[bytes]]] = field(default_factory=dict)

    def start(self, part: str, role: str, index: int, run_file: str = "run.yaml", **emulation: Any) -> None:
        """Start one process of a part of the mesh. Emulated generators always run this build."""
        options = ProcessOptions(
            role=role,
            part=part,
            index=index,
            run_file=str(self.folder / run_file),
            folder=str(self.folder),
            parent=os.getpid(),
            mean_tokens=self.load.mean_tokens,
            emulation=emulation,
        )
        services = THIS_BUILD if role in ("generators", "teacher") else self.build
        path = os.pathsep.join(map(str, (services, Path(__file__).parents[1])))
        with (self.folder / f"{role}-{index}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.scale_processes", json.dumps(asdict(options))],
                env={**os.environ, "PYTHONPATH": path},
                stdout=log,
                stderr=log,
            )
        self.processes.setdefault(part, []).append(process)

    def stop(self, *parts: str) -> None:
        """Stop the processes of these parts with SIGTERM."""
        stopped = [process for part in parts for process in self.processes.pop(part, [])]
        for process in stopped:
            process.terminate()
        for process in stopped:
            process.wait(_STOP_SECONDS)

    def cpu_seconds(self) -> dict[str, float]:
        """Return the CPU seconds of every part so far; those of Redis include the children that rewrite its file."""
        used = {
            part: sum(_cpu(psutil.Process(process.pid)) for process in processes)
            for part, processes in self.processes.items()
        }
        return {"Redis": _cpu(psutil.Process(self.server.pid)), **used}

    async def until(self, goal: str, reached: Callable[[StoreCounts], object]) -> None:
        """Wait until the counts satisfy ``reached``. Raises ScaleError if a process ends or the time limit passes."""
        deadline = time.monotonic() + _START_SECONDS
        while not reached(await self.store.mesh.counts()):
            ended = [p for processes in self.processes.values() for p in processes if p.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = "\n".join(log.read_text()[-2000:] for log in sorted(self.folder.glob("*.log")))
                reason = "a process has ended" if ended else f"not reached in {_START_SECONDS:g} s"
                raise ScaleError(f"{goal}: {reason}\n{logs}")
            await asyncio.sleep(_WATCH_SECONDS)


def _cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system + times.children_user + times.children_system)


async def measure_level(folder: Path, load: Load, build: Path) -> Level:
    """Start the mesh of ``build``, measure the level for its window, stop the mesh, and account for every rollout."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(running_redis(folder / "redis", 6144))
        config = _write_run_files(folder, server.url, load)
        store = await stack.enter_async_context(await TrajectoryStore.connect(config.store, config.name))
        mesh = _Mesh(folder, load, build, server, store)
        stack.callback(lambda: mesh.stop(*mesh.processes))
        await _start(mesh)
        await asyncio.sleep(load.warm_up_seconds)
        before, cpu_before, began = await store.mesh.counts(), mesh.cpu_seconds(), time.time()
        in_flight, pings = await _watch(store, load.window_seconds)
        after, cpu_after, ended = await store.mesh.counts(), mesh.cpu_seconds(), time.time()
        # The workers release their trajectories; the counts are final once the consumer has stopped too.
        for parts in (("leader", "workers"), tuple(mesh.processes)):
            await asyncio.to_thread(mesh.stop, *parts)
        return Level(
            in_flight=float(np.mean(in_flight)),
            finished=_finished(after) - _finished(before),
            seconds=ended - began,
            tokens=after.totals["saved_tokens_total"] - before.totals["saved_tokens_total"],
            cpu_seconds={part: seconds - cpu_before[part] for part, seconds in cpu_after.items()},
            samples={"PING of Redis": pings, **_samples(folder, began, ended)},
            faults=_faults(after, await store.mesh.counts(), _ledger(folder)),
            taught=load.taught,
        )


def _finished(counts: StoreCounts) -> int:
    return counts.totals.get("finished_total", 0)


async def _start(mesh: _Mesh) -> None:
    """Start every process; start the leader before the workers, so that it becomes the leader."""
    load = mesh.load
    mesh.start("consumer", "consumer", 0)
    mesh.start("reward service", "reward", 0)
    if load.taught:
        mesh.start("emulated teacher", "teacher", 0)
    share = -(-load.generators // load.generator_processes)
    for index in range(load.generator_processes):
        generators = min(share, load.generators - index * share)
        registered = 0 if index else load.registered
        emulation: dict[str, Any] = {"generators": generators, "registered": registered}
        emulation["tokens_per_second"] = load.tokens_per_second
        mesh.start("emulated generators", "generators", index, **emulation)
    mesh.start("leader", "rollout", 0, "leader.yaml")
    await mesh.until("the first groups are admitted", lambda counts: counts.totals.get("admitted_total", 0))
    for index in range(load.workers):
        mesh.start("workers", "rollout", 1 + index)
    least = _FILLED * load.in_flight
    await mesh.until(f"{load.in_flight} rollouts in flight", lambda counts: counts.trajectories["leased"] >= least)


async def _watch(store: TrajectoryStore, seconds: float) -> tuple[list[int], list[float]]:
    """Sample the leased trajectories and the seconds of a PING, every quarter of a second."""
    leased, pings, end = [], [], time.monotonic() + seconds
    while time.monotonic() < end:
        begun = time.perf_counter()
        await store.connection.command("PING")
        pings.append(time.perf_counter() - begun)
        (count,) = await store.connection.command("HMGET", store.connection.keys.single("counts"), "leased")
        leased.append(int(count))
        await asyncio.sleep(_WATCH_SECONDS)
    return leased, pings


def _samples(folder: Path, began: float, ended: float) -> dict[str, list[float]]:
    """Read the samples of the probes within the window: lags by part, views and decisions."""
    found: dict[str, list[float]] = {}
    for file in sorted(folder.glob("*.probe")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            if not began <= row.pop("t") <= ended:
                continue
            for name, values in row.items():
                key = f"event loop lag, {file.stem.rpartition('-')[0]}" if name == "lag" else name
                found.setdefault(key, []).extend(values)
    return found


def _ledger(folder: Path) -> list[tuple[str, list[str], int]]:
    """Return group id, trajectory ids and number of wrong answers of every consumed group."""
    return [tuple(row) for line in (folder / "ledger").read_text().splitlines() for row in json.loads(line)]


def _faults(running: StoreCounts, end: StoreCounts, ledger: Sequence[tuple[str, list[str], int]]) -> dict[str, int]:
    """Return counts that must be 0, from Redis (at the window's end and after the stop) and the consumer's ledger."""
    groups, ids = Counter(group for group, _, _ in ledger), Counter(i for _, members, _ in ledger for i in members)
    live = sum(end.trajectories.values())
    admitted = GROUP_SIZE * end.totals["admitted_total"] + end.totals.get("replacements_total", 0)
    return {
        "trajectories in no state": abs(admitted - live - len(ids)),
        "leases beyond one a trajectory": running.totals["leases_total"]
        - running.trajectories["leased"]
        - _finished(running),
        "trajectories consumed twice": sum(count - 1 for count in (*groups.values(), *ids.values())),
        "groups consumed incomplete": sum(len(members) != GROUP_SIZE for _, members, _ in ledger),
        "trajectories with other tokens than were sent": sum(wrong for _, _, wrong in ledger),
        "groups dropped": sum(end.drops.values()),
    }


def _write_run_files(folder: Path, url: str, load: Load) -> RunConfig:
    """Write the run file of the level, and that of the leader, which takes a single rollout; return the first."""
    data: dict[str, Any] = {
        "name": "scale",
        "folder": str(folder),
        "model": {"path": "recipe:countdown"},
        "data": {"max_prompt_tokens": 64},
        "rollout": {
            "max_new_tokens": 2 * load.mean_tokens,
            "partial_save_tokens": 2 * load.chunk_tokens,
            "worker_concurrency": -(-load.in_flight // load.workers),
        },
        "schedule": {
            "groups_per_batch": max(1, round(load.in_flight / POOL_BATCHES / GROUP_SIZE)),
            "group_size": GROUP_SIZE,
            "pool_size": load.in_flight,
            "max_staleness": _MAX_STALENESS,
        },
        "generator": {
            "slots": -(-2 * load.in_flight // load.generators),
            "max_context_tokens": 2 * load.mean_tokens + 64,
            "on_new_version": "keep_kv",
        },
        "trainer": {"train_steps": 1_000_000},
        "store": {"url": url},
        "telemetry": {"log_level": "warning"},
    }
    if load.taught:
        data["teachers"] = {TEACHER: {"model": "recipe:countdown"}}
        data["trainer"]["algorithm"] = {"teacher": {"reverse_kl_coefficient": 1.0, "with_reward": True}}
    write_run_file(folder / "leader.yaml", {**data, "rollout": {**data["rollout"], "worker_concurrency": 1}})
    return write_run_file(folder / "run.yaml", data)
