"""Processes of a run on this machine, and the ends of their logs."""

from __future__ import annotations

from rollmesh.gateway.models.api_model import ApiModel


class ProcessView(ApiModel):
    """One process of the launcher, or one that has ended and has left a log."""

    name: str
    """Service and index, such as ``trainer-0``; ``launcher-0`` is the launcher, ``redis`` its Redis."""
    pid: int | None
    """Process id; null if it does not run on this machine."""
    memory_bytes: int | None
    """Resident memory of the process and its children."""
    cpu_share: float | None
    """CPU seconds per second since the previous read, children included; null at the first read."""
    log_bytes: int | None
    """Size of its log; null without one."""


class ProcessList(ApiModel):
    """Processes of the run."""

    processes: list[ProcessView]
    """Processes by name; empty if the run folder is not on this machine."""


class LogTail(ApiModel):
    """End of the log of one process."""

    name: str
    """Service and index."""
    lines: list[str]
    """Last lines, oldest first."""
