"""Launcher section: the local processes of a run. Services in a cluster read two of the fields too."""

from __future__ import annotations

from pydantic import Field

from rollmesh.config.section import Section


class LauncherConfig(Section):
    """Local processes of a run."""

    rollout_replicas: int = Field(default=1, ge=1)
    """Number of rollout worker processes."""
    reward_replicas: int = Field(default=1, ge=1)
    """Number of reward services."""
    trainer_processes: int = Field(default=1, ge=1)
    """Number of trainer ranks; more than one starts torchrun with FSDP2."""
    torch_threads: int = Field(default=1, ge=1, le=1024)
    """OMP threads per process on this machine; in a cluster, threads of a generator with the engine torch on a CPU."""
    restart_limit: int = Field(default=20, ge=0)
    """Restarts of one process within ten minutes of its running time before the run fails; its startup time does not
    count."""
    start_timeout_seconds: float = Field(default=300.0, gt=0)
    """Time limit for the publication of the initial policy, and again for a generator to serve it; large models need
    more. Also the time for which no generator may serve an evaluated version, or all may refuse the newest one."""
    host: str = "127.0.0.1"
    """Address to which the local services bind."""
