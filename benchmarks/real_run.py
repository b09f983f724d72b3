"""Real run that a simulation is compared with: its processes, its counters while it trains, and its records."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from benchmarks.processes import TrainingRun
from benchmarks.run_sampler import RunSampler, processes_of
from rollmesh.errors import DataError
from rollmesh.sim.run_records import RunRecords, announcements, load_seconds, trained_updates

_SAMPLE_SECONDS = 0.5
_ANSWER_SECONDS = 60.0
_RUN_SECONDS = 900.0
_END_SECONDS = 60.0


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
    return RunRecords(
        folder=run.folder.path,
        updates=trained_updates(run.folder.path),
        work=sampler.work(),
        generators=int(data["generator"]["replicas"]),
        use=sampler.use(),
        reward_seconds=reward_seconds,
        strangers=sampler.strangers(),
        fetch_seconds=fetch_seconds,
        swap_seconds=swap_seconds,
    )


@contextlib.contextmanager
def _killed(launcher: int) -> Iterator[None]:
    """Kill the launcher and the processes that it has started, and wait for their end."""
    try:
        yield
    finally:
        processes = processes_of(launcher)
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        # The launcher is waited for by its own parent's handle.
        psutil.wait_procs(processes[1:], timeout=_END_SECONDS)
