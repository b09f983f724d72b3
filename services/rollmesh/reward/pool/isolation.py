"""The level of isolation that this machine gives, measured from inside a worker process when the service starts.

It is reported, not promised: no level of it is a security boundary.
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
    """What confines a worker process, and inside it the code of answers."""

    uid: int
    own_uid: bool
    """Nothing else runs under the worker's uid, so limits count and kills reach only what is its own."""
    memory_limited: bool
    processes_limited: bool
    code: SandboxLevel

    @staticmethod
    def from_report(report: Mapping[str, Any]) -> IsolationLevel:
        """Rebuild from ``probe_worker``'s report."""
        return IsolationLevel(**{**report, "code": SandboxLevel(**report["code"])})

    def properties(self) -> dict[str, bool]:
        """Every property by name, for metrics."""
        own = {name: getattr(self, name) for name in ("own_uid", "memory_limited", "processes_limited")}
        return {**own, **{f"code_{name}": value for name, value in asdict(self.code).items()}}

    def __str__(self) -> str:
        held = [name.replace("_", " ") for name, value in self.properties().items() if value]
        missing = [name.replace("_", " ") for name, value in self.properties().items() if not value]
        return f"uid {self.uid}; has: {', '.join(held) or 'nothing'}; lacks: {', '.join(missing) or 'nothing'}"


def probe_worker(confinement: WorkerConfinement, birth: int) -> dict[str, object]:
    """Try out the limits of this worker process; plain JSON values."""
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
    """Whether one more process is possible where the limit says none is: root is not bound by it."""
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
