"""Processes and threads of the trainer on the cores of this machine, for ``launcher.trainer_processes: auto``.

Generators and teachers compute on cores too, and on a core that does both another rank gains nothing: those are left
out. On the others a process tries a train step in each way before the services start (``rollmesh.trainer.core_trial``).
The choice is kept in the run folder, so that a run that continues on as many cores replays its steps with the same
ranks.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rollmesh.config import RunConfig
from rollmesh.config.generator import GeneratorConfig
from rollmesh.config.teachers import TeacherConfig
from rollmesh.file_writes import write_text
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.service_specs import thread_variables
from rollmesh.runtime.capacity import has_gpu

CORES_FILE = "trainer-cores.json"
_LEAST_GAIN = 0.9
"""Share of the time of a way at which one with more processes or threads takes its place."""
_TRIAL_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreWay:
    """One way to use the cores."""

    processes: int
    threads: int
    """Of each process."""
    seconds: float | None = None
    """Of a train step on random answers; None if it was not tried, or failed."""

    def __str__(self) -> str:
        processes, threads = "es" if self.processes > 1 else "", "s" if self.threads > 1 else ""
        return f"{self.processes} process{processes} of {self.threads} thread{threads}"


def idle_cores(config: RunConfig, cores: int, *, on_gpu: bool) -> int:
    """Return the cores that no generator or teacher computes on, at least one; ``on_gpu``: this machine has a GPU."""
    teachers = (teacher for teacher in config.teachers.values() if teacher.address is None)
    servers: list[GeneratorConfig | TeacherConfig] = [config.generator, *teachers]
    here = (each for each in servers if each.engine == "torch")
    busy = sum(each.replicas for each in here if each.device == "cpu" or not on_gpu)
    return max(1, cores - busy * config.launcher.torch_threads)


def fastest(ways: Sequence[CoreWay], threads: int) -> CoreWay:
    """Return the way to take: a later one where it is a tenth faster; one process of ``threads`` if all failed."""
    best = CoreWay(processes=1, threads=threads)
    for way in ways:
        if way.seconds is not None and (best.seconds is None or way.seconds <= _LEAST_GAIN * best.seconds):
            best = way
    return best


async def trainer_way(config: RunConfig, folder: RunFolder, note: Callable[[str], None], cores: int) -> CoreWay:
    """Return the processes and threads of the trainer on a machine of ``cores``: the run file's, or measured ones."""
    processes, threads = config.launcher.trainer_processes, config.launcher.torch_threads
    if processes != "auto":
        return CoreWay(processes=processes, threads=threads)
    idle, way = idle_cores(config, cores, on_gpu=has_gpu()), CoreWay(processes=1, threads=threads)
    if idle == 1:
        note(f"trainer: {way}, because the generators (and teachers) compute on the other cores")
        return way
    if config.trainer.optimizer == "adamw_8bit":
        return way  # its moments cannot be split over processes
    file = folder.path / CORES_FILE
    if (kept := _kept(file, idle)) is not None:
        note(f"trainer: {kept}, as measured before")
        return kept
    note(f"measuring the processes and threads of the trainer on {idle} of {cores} cores")
    ways = await _tried(folder, idle)
    way = fastest(ways, threads)
    if way.seconds is not None:
        write_text(file, json.dumps({"cores": idle, "taken": asdict(way), "tried": [asdict(each) for each in ways]}))
    times = ("failed or too slow" if each.seconds is None else f"{each.seconds:.3g} s" for each in ways)
    steps = ", ".join(f"{each} {time}" for each, time in zip(ways, times, strict=True))
    note(f"trainer: {way}; a train step takes: {steps or 'unknown'}")
    return way


def _kept(file: Path, cores: int) -> CoreWay | None:
    """Return the choice of an earlier start on as many cores; None without one that can be read."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["cores"] == cores:
            return CoreWay(**record["taken"])
    return None


async def _tried(folder: RunFolder, cores: int) -> list[CoreWay]:
    """Run the trial; one that fails or takes too long has no ways, or fewer."""
    command = (sys.executable, "-P", "-m", "rollmesh.trainer.core_trial", str(folder.config_file), str(cores))
    with (folder.logs / "trainer-cores.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *command,
            str(os.getpid()),
            env={**os.environ, **thread_variables(1)},
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
        )
    assert process.stdout is not None
    ways: list[CoreWay] = []
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(_TRIAL_SECONDS):
                async for line in process.stdout:
                    ways.append(CoreWay(**json.loads(line)))
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    return ways
