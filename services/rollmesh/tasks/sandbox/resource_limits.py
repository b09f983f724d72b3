"""Resource limits of a confined process."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimits:
    """Resources that one confined process and its children may use."""

    address_space_bytes: int
    """Virtual memory of each process."""
    cpu_seconds: int
    """Processor time of each process."""
    process_count: int
    """Processes and threads of the uid at once; does not apply to root."""
    file_bytes: int
    """Size of each file written."""
    open_file_count: int
    """Open files of each process."""


def apply_limits(limits: ResourceLimits, *, own_uid: bool) -> None:
    """Limit this process irrevocably; lower limits stay.

    For a shared uid (``own_uid`` false) the process limit is raised by the threads that the uid already runs.
    """
    process_count = limits.process_count + (0 if own_uid else running_thread_count(os.getuid()))
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_NPROC, process_count),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_file_count),
        (resource.RLIMIT_AS, limits.address_space_bytes),
    ):
        lower_limit(kind, value)


def lower_limit(kind: int, value: int) -> None:
    """Set the soft and the hard limit to ``value``, or to the current hard limit if that is lower."""
    limits = [limit for limit in (value, resource.getrlimit(kind)[1]) if limit != resource.RLIM_INFINITY]
    lowest = min(limits, default=resource.RLIM_INFINITY)
    resource.setrlimit(kind, (lowest, lowest))


def running_thread_count(uid: int) -> int:
    """Count the threads of one uid on this machine, in the way of RLIMIT_NPROC."""
    count = 0
    for process in psutil.process_iter():
        try:
            if process.uids().real == uid:
                count += process.num_threads()
        except psutil.Error:  # the process has ended
            continue
    return count


def own_address_space_bytes() -> int:
    """Return the virtual memory of this process."""
    return int(psutil.Process().memory_info().vms)
