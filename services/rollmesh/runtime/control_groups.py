"""Limits of the control groups (v1 and v2) of this process: a container has them where its machine has more."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True, slots=True, kw_only=True)
class _Files:
    """Names of one version of the interface."""

    memory_limit: str
    memory_usage: str
    reclaimable: str
    """Line of memory.stat: bytes of files, which the kernel frees before the limit is reached."""


_V1 = _Files(
    memory_limit="memory.limit_in_bytes", memory_usage="memory.usage_in_bytes", reclaimable="total_inactive_file"
)
_V2 = _Files(memory_limit="memory.max", memory_usage="memory.current", reclaimable="inactive_file")


def available_memory(proc: Path = Path("/proc/self")) -> int | None:
    """Return the bytes that the groups of a process still allow; None without a limit."""
    allowed = []
    for files, folder in _folders(proc, "memory"):
        with suppress(OSError, ValueError):  # no limit: "max", or no such file in the root group
            limit = int((folder / files.memory_limit).read_text())
            usage = int((folder / files.memory_usage).read_text())
            allowed.append(max(0, limit - usage + _reclaimable(files, folder)))
    return min(allowed, default=None)


def _reclaimable(files: _Files, folder: Path) -> int:
    with suppress(OSError):  # gVisor has no memory.stat
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(stat.get(files.reclaimable, 0))
    return 0


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


def _folders(proc: Path, controller: str) -> Iterator[tuple[_Files, Path]]:
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
