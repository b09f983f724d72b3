"""Real run that a simulation is compared with: its processes, its counters while it trains, and its records."""

import contextlib
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.processes import TrainingRun
from rollmesh.errors import DataError
from rollmesh.launcher.timeline_recorder import metric_sums
from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.sim.run_records import (
    RecordedWork,
    RunRecords,
    announcements,
    load_seconds,
    trained_updates,
    work_between,
)

_SAMPLE_SECONDS = 0.5
_ANSWER_SECONDS = 60.0
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
    with (
        httpx.Client(timeout=_ANSWER_SECONDS, verify=False, trust_env=False) as client,
        run.up(data) as launcher,
        _killed(launcher.pid),
    ):
        sampler = RunSampler(run.folder.path, launcher.pid, client)
        deadline = time.monotonic() + _RUN_SECONDS
        while (done := len(announcements(run.folder.path))) < last:
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise DataError(f"{root}: {done} of {last} policies, then it ended or was late\n{run.output[-4000:]}")
            sampler.place(generator_cores, other_cores)
            if done > 1:
                sampler.sample()
            time.sleep(_SAMPLE_SECONDS)
        sampler.sample()
        reward_seconds = sampler.reward_seconds()
    fetch_seconds, swap_seconds = load_seconds(run.folder.path)
    cpu_seconds = sampler.cpu_seconds()
    return RunRecords(
        folder=run.folder.path,
        updates=trained_updates(run.folder.path),
        work=sampler.work(),
        generators=int(data["generator"]["replicas"]),
        generator_cpu_seconds=cpu_seconds["generators"],
        service_cpu_seconds=cpu_seconds["services"],
        reward_seconds=reward_seconds,
        fetch_seconds=fetch_seconds,
        swap_seconds=swap_seconds,
    )


@contextlib.contextmanager
def _killed(launcher: int) -> Iterator[None]:
    try:
        yield
    finally:
        processes = processes_of(launcher)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        # The launcher is waited for by its own parent's handle.
        psutil.wait_procs(processes[1:], timeout=_END_SECONDS)


class RunSampler:
    """Counters of the generators and processor seconds of all processes, about twice a second."""

    def __init__(self, folder: Path, launcher: int, client: httpx.Client) -> None:
        """``launcher`` is the process id of the launcher of the run in ``folder``."""
        self._folder = folder
        self._launcher = launcher
        self._client = client
        self._placed: dict[int, bool] = {}
        self._counters: list[dict[int, dict[str, float]]] = []
        self._seconds: dict[int, tuple[str, float, float]] = {}
        """Service and processor seconds at the first and at the newest sample, by process."""

    def place(self, generator_cores: Sequence[int], other_cores: Sequence[int]) -> None:
        """Keep generators and other processes on their cores; threads that start later follow their process."""
        generators = {endpoint.pid for endpoint in read_endpoints(self._folder, "generator")}
        for pid in (process.pid for process in processes_of(self._launcher)):
            is_generator = pid in generators
            if self._placed.get(pid) != is_generator:
                self._placed[pid] = is_generator
                _pin(pid, generator_cores if is_generator else other_cores)

    def sample(self) -> None:
        """Read all counters once; a generator that does not answer is left out."""
        sums, generators = {}, read_endpoints(self._folder, "generator")
        for endpoint in generators:
            with contextlib.suppress(httpx.HTTPError):
                found = self._metrics(endpoint)
                sums[endpoint.pid] = {name: found[f"rollmesh_generator_{name}_total"] for name in _COUNTERS}
        self._counters.append(sums)
        parts = {endpoint.pid: "generators" for endpoint in generators}
        parts |= {endpoint.pid: "trainer" for endpoint in read_endpoints(self._folder, "trainer")}
        for process in processes_of(self._launcher):
            with contextlib.suppress(psutil.NoSuchProcess):
                times, pid = process.cpu_times(), process.pid
                seconds = times.user + times.system
                first = self._seconds.get(pid, ("", seconds, seconds))[1]
                self._seconds[pid] = (parts.get(pid, "services"), first, seconds)

    def work(self) -> tuple[RecordedWork, ...]:
        """Return the work of each generator between two samples."""
        return tuple(
            work_between(before[pid], after[pid])
            for before, after in pairwise(self._counters)
            for pid in before.keys() & after.keys()
        )

    def cpu_seconds(self) -> dict[str, float]:
        """Return the processor seconds between the first and the last sample, by part."""
        sums = dict.fromkeys(("generators", "trainer", "services"), 0.0)
        for part, first, last in self._seconds.values():
            sums[part] += last - first
        return sums

    def reward_seconds(self) -> float:
        """Return the mean time from the last token to the reward, from the workers' metrics."""
        found = [self._metrics(endpoint) for endpoint in read_endpoints(self._folder, "rollout")]
        total, count = (
            sum(each[f"rollmesh_rollout_reward_seconds_{part}"] for each in found) for part in ("sum", "count")
        )
        return total / count

    def _metrics(self, endpoint: Endpoint) -> dict[str, float]:
        return metric_sums(self._client.get(f"http://{endpoint.admin}/metrics").text)


def processes_of(launcher: int) -> list[psutil.Process]:
    """Return the launcher and every process below it; none after its end."""
    try:
        process = psutil.Process(launcher)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _pin(pid: int, cores: Sequence[int]) -> None:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), cores)
