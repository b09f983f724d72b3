"""Real run that a simulation is compared with: its processes, its counters while it trains, and its records."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any

import httpx
import psutil

from rollmesh.bench.processes import TrainingRun
from rollmesh.errors import DataError
from rollmesh.launcher.timeline_recorder import metric_sums
from rollmesh.report.recorded_run import read_json_lines
from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.sim.run_records import EngineWork, ProcessorUse, RunRecords, TrainedUpdate

_SAMPLE_SECONDS = 0.5
_RUN_SECONDS = 900.0
_END_SECONDS = 60.0
_COUNTERS = ("decode_steps", "generated_tokens", "prefill_tokens", "busy_seconds")


def real_run(
    root: Path, data: Mapping[str, Any], generator_cores: Sequence[int], other_cores: Sequence[int]
) -> RunRecords:
    """Train up to the step before the last one on these cores, then kill every process of the run.

    The last step is left out because services end with it. Raises DataError with the launcher's output for a run that
    ends or is late.
    """
    run, last = TrainingRun(root), int(data["trainer"]["train_steps"])
    sampler = _Sampler(run.folder.path)
    with run.up(data) as launcher, _killed(launcher.pid):
        deadline = time.monotonic() + _RUN_SECONDS
        while (done := _announced(run.folder.logs)) < last:
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise DataError(f"{root}: {done} of {last} policies, then it ended or was late\n{run.output[-4000:]}")
            sampler.place(launcher.pid, generator_cores, other_cores)
            if done > 1:
                sampler.sample(launcher.pid)
            time.sleep(_SAMPLE_SECONDS)
        sampler.sample(launcher.pid)
        reward_seconds = sampler.reward_seconds()
    return RunRecords(
        folder=run.folder.path,
        updates=_updates(run.folder.path),
        work=sampler.work(),
        generators=int(data["generator"]["replicas"]),
        use=sampler.use(),
        reward_seconds=reward_seconds,
        strangers=sampler.strangers(),
        **_load_seconds(run.folder.logs),
    )


@contextlib.contextmanager
def _killed(launcher: int) -> Iterator[None]:
    """Kill the launcher and the processes that it has started, and wait for their end."""
    try:
        yield
    finally:
        processes = _processes(launcher)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        # The launcher is waited for by its own parent's handle.
        psutil.wait_procs(processes[1:], timeout=_END_SECONDS)


class _Sampler:
    """Counters of the generators and processor seconds of all processes, about twice a second."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._client = httpx.Client(timeout=10.0, verify=False, trust_env=False)
        self._placed: dict[int, bool] = {}
        self._counters: list[dict[int, dict[str, float]]] = []
        self._seconds: dict[int, tuple[str, float, float]] = {}
        """Service and processor seconds at the first and at the newest sample, by process."""
        self._strangers: list[int] = []

    def place(self, launcher: int, generator_cores: Sequence[int], other_cores: Sequence[int]) -> None:
        """Keep generators and other processes on their cores; threads that start later follow their process."""
        generators = {endpoint.pid for endpoint in read_endpoints(self._folder, "generator")}
        for pid in (process.pid for process in _processes(launcher)):
            is_generator = pid in generators
            if self._placed.get(pid) != is_generator:
                self._placed[pid] = is_generator
                _pin(pid, generator_cores if is_generator else other_cores)

    def sample(self, launcher: int) -> None:
        """Read all counters once; a generator that does not answer is left out."""
        sums = {}
        for endpoint in read_endpoints(self._folder, "generator"):
            with contextlib.suppress(httpx.HTTPError):
                found = self._metrics(endpoint)
                sums[endpoint.pid] = {name: found[f"rollmesh_generator_{name}_total"] for name in _COUNTERS}
        self._counters.append(sums)
        trainers = {endpoint.pid for endpoint in read_endpoints(self._folder, "trainer")}
        processes = _processes(launcher)
        # This process runs too, now.
        running = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) - 1
        self._strangers.append(max(0, running - sum(_runnable_threads(process.pid) for process in processes)))
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                times, pid = process.cpu_times(), process.pid
                part = "generators" if pid in sums else "trainer" if pid in trainers else "services"
                seconds = times.user + times.system
                self._seconds[pid] = (part, self._seconds.get(pid, ("", seconds))[1], seconds)

    def work(self) -> tuple[EngineWork, ...]:
        """Return the work of each generator between two samples."""
        return tuple(
            EngineWork(
                steps=after[pid]["decode_steps"] - before[pid]["decode_steps"],
                tokens=after[pid]["generated_tokens"] - before[pid]["generated_tokens"],
                prefill_tokens=after[pid]["prefill_tokens"] - before[pid]["prefill_tokens"],
                busy_seconds=after[pid]["busy_seconds"] - before[pid]["busy_seconds"],
            )
            for before, after in pairwise(self._counters)
            for pid in before.keys() & after.keys()
        )

    def use(self) -> ProcessorUse:
        """Return the processor seconds between the first and the last sample."""
        sums = dict.fromkeys(("generators", "trainer", "services"), 0.0)
        for part, first, last in self._seconds.values():
            sums[part] += last - first
        return ProcessorUse(**sums)

    def strangers(self) -> float:
        """Return the mean number of runnable threads of the machine that are not of the run."""
        return fmean(self._strangers)

    def reward_seconds(self) -> float:
        """Return the mean time from the last token to the reward, from the workers' metrics."""
        found = [self._metrics(endpoint) for endpoint in read_endpoints(self._folder, "rollout")]
        total, count = (
            sum(each[f"rollmesh_rollout_reward_seconds_{part}"] for each in found) for part in ("sum", "count")
        )
        return total / count

    def _metrics(self, endpoint: Endpoint) -> dict[str, float]:
        return metric_sums(self._client.get(f"http://{endpoint.admin}/metrics").text)


def _processes(launcher: int) -> list[psutil.Process]:
    """Return the launcher and every process below it; none after its end."""
    try:
        process = psutil.Process(launcher)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _runnable_threads(pid: int) -> int:
    count = 0
    for file in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            count += file.read_text().rpartition(")")[2].split()[0] == "R"
    return count


def _pin(pid: int, cores: Sequence[int]) -> None:
    """Keep every thread of a process on these cores."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), cores)


def _announced(logs: Path) -> int:
    """Return the number of announced policies, the initial one included."""
    return len(_events(logs, "trainer-*.log", "policy_announced"))


def _updates(folder: Path) -> tuple[TrainedUpdate, ...]:
    cuts = {event["train_step"]: _time(event) for event in _events(folder / "logs", "rollout-*.log", "batch_cut")}
    announced = {
        event["train_step"]: _time(event) for event in _events(folder / "logs", "trainer-*.log", "policy_announced")
    }
    return tuple(
        TrainedUpdate(
            tokens=int(line["batch"]["trained_tokens"]),
            cut_at=cuts[line["train_step"]],
            gradient_seconds=float(line["seconds"]["gradient"]),
            trained_at=float(line["time"]),
            announced_at=announced[line["train_step"]],
        )
        for line in read_json_lines(folder / "metrics.jsonl").records
        if line["train_step"] in announced
    )


def _load_seconds(logs: Path) -> dict[str, float]:
    """Return the mean seconds of loads after the first ones, without and of their pauses."""
    loads = [event for event in _events(logs, "generator-*.log", "policy_in_service") if event["train_step"]]
    pauses = [float(event["pause_seconds"]) for event in loads]
    fetches = [float(event["seconds"]) - pause for event, pause in zip(loads, pauses, strict=True)]
    return {"fetch_seconds": sum(fetches) / len(loads), "swap_seconds": sum(pauses) / len(loads)}


def _events(logs: Path, pattern: str, name: str) -> list[dict[str, Any]]:
    lines = (line for log in sorted(logs.glob(pattern)) for line in log.read_text().splitlines())
    return [json.loads(line) for line in lines if f'"event": "{name}"' in line]


def _time(event: Mapping[str, Any]) -> float:
    return datetime.fromisoformat(str(event["timestamp"])).timestamp()
