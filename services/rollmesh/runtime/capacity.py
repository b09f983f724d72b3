"""Capacity check: the number of service processes that this machine, or its container, can run."""

import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.config.replica_bounds import configured_replicas, replica_field
from rollmesh.config.teachers import teacher_service
from rollmesh.errors import ConfigError
from rollmesh.runtime.endpoints import read_endpoints

PROCESSES_PER_CORE = 8
"""Maximum processes per core, over all scalable services; with more, processes mostly wait for a core."""
MEMORY_SHARE = 0.8
"""Share of the available memory that new processes may use."""
_LEAST_PROCESS_BYTES = 200 << 20
"""Memory of a service process with the smallest model."""
_PROCESS_BYTES = 600 << 20
"""Assumed size of a process of a service without a running process: the libraries and a small model."""
_GPU_DEVICES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd", "/dev/nvhost-gpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Available resources of a machine."""

    cores: int
    available_bytes: int


def this_machine() -> Machine:
    """Return the cores that this process may use and the available memory, within the limits of its container."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    available, quota, limit = psutil.virtual_memory().available, cpu_quota(), available_memory()
    return Machine(
        cores=cores if quota is None else min(cores, math.ceil(quota)),
        available_bytes=available if limit is None else min(available, limit),
    )


def has_gpu() -> bool:
    """Tell whether this machine has a GPU device."""
    return any(Path(device).exists() for device in _GPU_DEVICES)


def check_capacity(config: RunConfig, requested: Mapping[str, int], service: str, replicas: int) -> None:
    """Raise ConfigError unless this machine has the capacity for ``replicas`` of a service.

    ``requested`` are the current scale requests, which override the replicas of the run file.
    """
    sizes: list[int] = []
    for endpoint in read_endpoints(Path(config.folder), service):
        with suppress(psutil.Error):
            sizes.append(psutil.Process(endpoint.pid).memory_info().rss)
    current = {**configured_replicas(config), **requested}
    refuse_overload(this_machine(), current, service, replicas, max(sizes, default=_PROCESS_BYTES))


def check_configured(config: RunConfig, machine: Machine) -> None:
    """Raise ConfigError when the run file starts more service processes than a machine has cores and memory for."""
    replicas, ranks = configured_replicas(config), config.launcher.least_trainer_processes
    total, limit = sum(replicas.values()), machine.cores * PROCESSES_PER_CORE
    if ranks > limit:
        raise ConfigError(
            f"launcher.trainer_processes={ranks}: more than {limit}, {PROCESSES_PER_CORE} for each of the "
            f"{machine.cores} cores of this machine; lower it, or use --force"
        )
    service = max(replicas, key=lambda name: replicas[name])
    starts = f"{replica_field(config, service)}={replicas[service]}: the run file starts {total} service processes"
    if total > limit:
        raise ConfigError(
            f"{starts}, more than {limit}, {PROCESSES_PER_CORE} for each of the {machine.cores} cores of this machine; "
            "lower it, or use --force"
        )
    needed = total * _LEAST_PROCESS_BYTES
    needed += replicas["generator"] * _weight_bytes(config.model.path, config.generator.device)
    for name, teacher in config.teachers.items():
        needed += replicas.get(teacher_service(name), 0) * _weight_bytes(str(teacher.model), teacher.device)
    if needed > machine.available_bytes:
        raise ConfigError(
            f"{starts}, which need {needed >> 20} MiB; {machine.available_bytes >> 20} MiB of memory are available: "
            "lower it, or use --force"
        )


def refuse_overload(
    machine: Machine, current: Mapping[str, int], service: str, replicas: int, process_bytes: int
) -> None:
    """Raise ConfigError when a machine has no capacity for the added replicas; fewer replicas always fit."""
    added = replicas - current[service]
    if added <= 0:
        return
    limit, total = machine.cores * PROCESSES_PER_CORE, sum(current.values()) + added
    if total > limit:
        raise ConfigError(
            f"{service}={replicas}: {total} service processes are more than {limit}, {PROCESSES_PER_CORE} for each of "
            f"the {machine.cores} cores of this machine; use force to start them anyway"
        )
    available = int(MEMORY_SHARE * machine.available_bytes)
    if added * process_bytes > available:
        raise ConfigError(
            f"{service}={replicas}: {added} more processes of about {process_bytes >> 20} MiB each do not fit into "
            f"{available >> 20} MiB, {MEMORY_SHARE:.0%} of the available memory; use force to start them anyway"
        )


def _weight_bytes(model: str, device: str) -> int:
    """Return the bytes of the weight files that a process with this model and device reads into memory."""
    if device != "cpu":
        return 0
    try:
        return sum(file.stat().st_size for file in resolve_model(model).glob("*.safetensors"))
    except (ConfigError, OSError):
        return 0  # the checks of the model name the problem


_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = ("memory.max", "memory.current", "inactive_file")
"""Names of the two versions of control groups: limit, usage, and the line of memory.stat with the bytes of files, which
the kernel frees before the limit is reached."""


def available_memory(proc: Path = Path("/proc/self")) -> int | None:
    """Return the bytes that the groups of a process still allow; None without a limit."""
    allowed = []
    for (limit_file, usage_file, reclaimable), folder in _folders(proc, "memory"):
        with suppress(OSError, ValueError):  # no limit: "max", or no such file in the root group
            left = int((folder / limit_file).read_text()) - int((folder / usage_file).read_text())
            with suppress(OSError):  # gVisor has no memory.stat
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                left += int(stat.get(reclaimable, 0))
            allowed.append(max(0, left))
    return min(allowed, default=None)


def cpu_quota(proc: Path = Path("/proc/self")) -> float | None:
    """Return the processors that the groups of a process allow, for example 1.5; None without a quota."""
    quotas = []
    for files, folder in _folders(proc, "cpu"):
        with suppress(OSError, ValueError):
            if files is _V2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota, period = (int((folder / f"cpu.cfs_{name}_us").read_text()) for name in ("quota", "period"))
            if quota > 0:  # -1 is none
                quotas.append(quota / period)
    return min(quotas, default=None)


def _folders(proc: Path, controller: str) -> Iterator[tuple[tuple[str, str, str], Path]]:
    """Yield the folders of the process's group and of all groups above it."""
    try:
        mounts = (proc / "mountinfo").read_text().splitlines()
        groups = (proc / "cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return
    paths = {name: path for _, names, path in (line.split(":", 2) for line in groups) for name in names.split(",")}
    for line in mounts:
        place, _, kind = line.partition(" - ")
        root, mount = place.split()[3:5]
        name, _, options = kind.split(" ", 2)  # the source between them may be empty
        files = {"cgroup": _V1, "cgroup2": _V2}.get(name)
        key = "" if files is _V2 else controller
        if files is None or key not in paths or (key and controller not in options.split(",")):
            continue
        group = PurePosixPath(paths[key])
        # A mount may show a part of the tree only, in which the group of the process is.
        below = group.relative_to(root) if group.is_relative_to(root) else PurePosixPath(".")
        folder = Path(mount) / below
        yield from ((files, each) for each in (folder, *folder.parents) if each.is_relative_to(mount))
