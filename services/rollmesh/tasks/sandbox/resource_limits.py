"""Resource limits of a confined process."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimits:
    """What one confined process and its children may use."""

    address_space_bytes: int
    """Virtual memory of each process."""
    cpu_seconds: int
    """Processor time of each process."""
    process_count: int
    """Processes and threads of the uid at once; never binds root."""
    file_bytes: int
    """Size of each file written."""
    open_file_count: int
    """Open files of each process."""


def apply_limits(limits: ResourceLimits, *, own_uid: bool) -> None:
    """Limit this process for good; limits already lower stay.

    A uid that is shared with other processes (``own_uid`` false) keeps room for those it already runs.
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
    """Set soft and hard limit to ``value``, or to the hard limit in force if that is lower."""
    limits = [limit for limit in (value, resource.getrlimit(kind)[1]) if limit != resource.RLIM_INFINITY]
    lowest = min(limits, default=resource.RLIM_INFINITY)
    resource.setrlimit(kind, (lowest, lowest))


def running_thread_count(uid: int) -> int:
    """Threads of one uid on this machine, as RLIMIT_NPROC counts them."""
    count = 0
    for process in psutil.process_iter():
        try:
            if process.uids().real == uid:
                count += process.num_threads()
        except psutil.Error:  # ended meanwhile
            continue
    return count


def own_address_space_bytes() -> int:
    """Virtual memory of this process."""
    return int(psutil.Process().memory_info().vms)
