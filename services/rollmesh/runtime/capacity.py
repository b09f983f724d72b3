"""How many service processes this machine can take."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from rollmesh.config import RunConfig
from rollmesh.config.replica_bounds import configured_replicas
from rollmesh.errors import ConfigError
from rollmesh.runtime.endpoints import read_endpoints

PROCESSES_PER_CORE = 8
"""Of all scalable services together. Beyond it they mostly wait for each other."""
MEMORY_SHARE = 0.8
"""Share of the available memory that new processes may take."""
_PROCESS_BYTES = 600 << 20
"""Assumed for a service of which no process runs: the libraries and a small model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is left of a machine."""

    cores: int
    available_bytes: int


def this_machine() -> Machine:
    """Cores that this process may use, and available memory."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return Machine(cores=cores, available_bytes=psutil.virtual_memory().available)


def check_capacity(config: RunConfig, asked: Mapping[str, int], service: str, replicas: int) -> None:
    """Raise ConfigError unless this machine can take so many replicas of a service; ``asked`` are those wanted now."""
    wanted = {**configured_replicas(config), **asked}
    refuse_overload(this_machine(), wanted, service, replicas, _process_bytes(Path(config.folder), service))


def refuse_overload(
    machine: Machine, wanted: Mapping[str, int], service: str, replicas: int, process_bytes: int
) -> None:
    """Raise ConfigError when a machine cannot take the replicas that are added; fewer than before always fit."""
    added = replicas - wanted[service]
    if added <= 0:
        return
    most, total = machine.cores * PROCESSES_PER_CORE, sum(wanted.values()) + added
    if total > most:
        raise ConfigError(
            f"{service}={replicas}: {total} service processes are more than {most}, {PROCESSES_PER_CORE} for each of "
            f"the {machine.cores} cores of this machine; ask with force to start them all the same"
        )
    room = int(MEMORY_SHARE * machine.available_bytes)
    if added * process_bytes > room:
        raise ConfigError(
            f"{service}={replicas}: {added} more processes of about {process_bytes >> 20} MiB each do not fit into "
            f"{room >> 20} MiB, {MEMORY_SHARE:.0%} of the available memory; ask with force to start them all the same"
        )


def _process_bytes(folder: Path, service: str) -> int:
    """Resident memory of the largest running process of a service."""
    sizes: list[int] = []
    for endpoint in read_endpoints(folder, service):
        with contextlib.suppress(psutil.Error):
            sizes.append(psutil.Process(endpoint.pid).memory_info().rss)
    return max(sizes, default=_PROCESS_BYTES)
