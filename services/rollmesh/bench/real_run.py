"""Real run that a simulation is compared with: its processes, its counters while it trains, and its records."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import psutil

from rollmesh.bench.processes import TrainingRun
from rollmesh.bench.run_sampler import RunSampler, processes_of
from rollmesh.errors import DataError
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.report.recorded_run import Record, read_json_lines
from rollmesh.sim.run_records import RunRecords, TrainedUpdate

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
        while (done := len(_announcements(run.folder.logs))) < last:
            if launcher.poll() is not None or time.monotonic() > deadline:
                raise DataError(f"{root}: {done} of {last} policies, then it ended or was late\n{run.output[-4000:]}")
            sampler.place(generator_cores, other_cores)
            if done > 1:
                sampler.sample()
            time.sleep(_SAMPLE_SECONDS)
        sampler.sample()
        reward_seconds = sampler.reward_seconds()
    fetch_seconds, swap_seconds = _load_seconds(run.folder.logs)
    return RunRecords(
        folder=run.folder.path,
        updates=_updates(run.folder),
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


def _announcements(logs: Path) -> dict[int, float]:
    """Return the times at which policies were announced, by train step; the initial one has 0."""
    return {event["train_step"]: _time(event) for event in _events(logs, "trainer-*.log", "policy_announced")}


def _updates(folder: RunFolder) -> tuple[TrainedUpdate, ...]:
    cuts = {event["train_step"]: _time(event) for event in _events(folder.logs, "rollout-*.log", "batch_cut")}
    announced = _announcements(folder.logs)
    copied = {event["train_step"]: _time(event) for event in _events(folder.logs, "trainer-*.log", "step_trained")}
    return tuple(
        TrainedUpdate(
            tokens=int(line["batch"]["trained_tokens"]),
            forward_tokens=int(line["forward_tokens"]),
            cut_at=cuts[line["train_step"]],
            gradient_seconds=float(line["seconds"]["gradient"]),
            trained_at=float(line["time"]),
            copied_at=copied[line["train_step"]],
            announced_at=announced[line["train_step"]],
        )
        for line in read_json_lines(folder.metrics).records
        if line["train_step"] in announced
    )


def _load_seconds(logs: Path) -> tuple[float, float]:
    """Return the mean seconds of loads after the first ones, without and of their pauses."""
    loads = [event for event in _events(logs, "generator-*.log", "policy_in_service") if event["train_step"]]
    pauses = [float(event["pause_seconds"]) for event in loads]
    fetches = [float(event["seconds"]) - pause for event, pause in zip(loads, pauses, strict=True)]
    return sum(fetches) / len(loads), sum(pauses) / len(loads)


def _events(logs: Path, pattern: str, name: str) -> list[Record]:
    records = (record for log in sorted(logs.glob(pattern)) for record in read_json_lines(log).records)
    return [record for record in records if record.get("event") == name]


def _time(event: Record) -> float:
    return datetime.fromisoformat(str(event["timestamp"])).timestamp()
