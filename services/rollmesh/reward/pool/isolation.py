"""The level of isolation on this machine, measured inside a worker process at startup.

It is a report, not a guarantee: no level is a security boundary.
"""

from __future__ import annotations

import mmap
import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from rollmesh.reward.pool.confinement import WorkerConfinement
from rollmesh.tasks.sandbox.probe import SandboxLevel, probe_sandbox


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationLevel:
    """Measured confinement of a worker process, and of the code of answers inside it."""

    uid: int
    own_uid: bool
    """True if no other process has the worker's uid, so limits and kills apply only to the worker's processes."""
    memory_limited: bool
    processes_limited: bool
    code: SandboxLevel

    @staticmethod
    def from_report(report: Mapping[str, Any]) -> IsolationLevel:
        """Rebuild from ``probe_worker``'s report."""
        return IsolationLevel(**{**report, "code": SandboxLevel(**report["code"])})

    def properties(self) -> dict[str, bool]:
        """Return every property by name, for metrics."""
        worker = {name: getattr(self, name) for name in ("own_uid", "memory_limited", "processes_limited")}
        return {**worker, **{f"code_{name}": value for name, value in asdict(self.code).items()}}

    def __str__(self) -> str:
        present = [name.replace("_", " ") for name, value in self.properties().items() if value]
        missing = [name.replace("_", " ") for name, value in self.properties().items() if not value]
        return f"uid {self.uid}; has: {', '.join(present) or 'nothing'}; lacks: {', '.join(missing) or 'nothing'}"


def probe_worker(confinement: WorkerConfinement, birth: int) -> dict[str, object]:
    """Test the limits of this worker process; returns JSON values."""
    return {
        "uid": os.getuid(),
        "own_uid": os.getuid() == confinement.uid(birth),
        "memory_limited": not _can_reserve(2 * confinement.memory_limit_bytes),
        "processes_limited": not _can_fork_at_the_limit(),
        "code": asdict(probe_sandbox()),
    }


def _can_reserve(size: int) -> bool:
    with suppress(OSError, OverflowError, ValueError):
        mmap.mmap(-1, size).close()
        return True
    return False


def _can_fork_at_the_limit() -> bool:
    """Tell whether a fork succeeds although the process limit forbids it: the limit does not apply to root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, hard))
    try:
        child = os.fork()
    except OSError:
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True
