"""Locks of files between processes, and the lock of a run folder with its holder."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from rollmesh.errors import ConfigError

LOCK_FILE = "lock"
_RECORDED_SECONDS = 600.0
"""Age of the timeline from which a launcher on another host counts as ended; it writes a line about every second."""


@dataclass(frozen=True, slots=True)
class LockHolder:
    """A launcher that holds the lock of a run folder, or held it when its machine failed."""

    pid: int
    host: str
    """Name of its host; empty if it was written by an earlier version."""

    @property
    def is_here(self) -> bool:
        """True if its process would be visible from this host."""
        return self.host in ("", socket.gethostname())

    def __str__(self) -> str:
        """Return ``pid P on HOST``."""
        return f"pid {self.pid} on {self.host}" if self.host else f"pid {self.pid}"


def lock_text() -> str:
    """Return the content of the file while this process holds the lock."""
    return f"{os.getpid()} {socket.gethostname()}"


def lock_holder(folder: Path) -> LockHolder | None:
    """Read the file; None if it is missing, empty or unreadable."""
    try:
        pid, _, host = (folder / LOCK_FILE).read_text(encoding="utf-8").strip().partition(" ")
        return LockHolder(int(pid), host)
    except (OSError, ValueError):
        return None


def launcher_process(folder: Path) -> psutil.Process | None:
    """Return the process of the launcher that holds the lock; None if it has ended or runs on another host."""
    holder = lock_holder(folder)
    if holder is None or not holder.is_here:
        return None
    try:
        process, written = psutil.Process(holder.pid), (folder / LOCK_FILE).stat().st_mtime
        # A process that began after the file was written has taken over the id of an ended launcher.
        is_it = process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= written
    except (OSError, ValueError, psutil.Error):
        return None
    return process if is_it else None


def has_launcher(folder: Path) -> bool:
    """Tell whether the process that the lock file names still runs; it is read, never locked, by commands.

    True for a launcher of another host that records the run.
    """
    holder = lock_holder(folder)
    if holder is None:
        return False
    return launcher_process(folder) is not None if holder.is_here else bool(distant_launcher(folder))


def distant_launcher(folder: Path) -> str:
    """Return ``pid P on HOST`` of a launcher on another host; empty without one.

    Its process cannot be seen from here, so it counts only while it records the run.
    """
    holder = lock_holder(folder)
    if holder is None or holder.is_here:
        return ""
    try:
        changed = max(path.stat().st_mtime for path in folder.glob("*") if path.name in (LOCK_FILE, "timeline.jsonl"))
    except (OSError, ValueError):
        return ""
    return str(holder) if time.time() - changed < _RECORDED_SECONDS else ""


def started_by_launcher(folder: Path) -> bool:
    """Tell whether the launcher that holds the lock has started this process, or is this process."""
    holder = lock_holder(folder)
    if holder is None or not holder.is_here:
        return False
    return holder.pid in (os.getpid(), *(parent.pid for parent in psutil.Process().parents()))


def lock_file(file: IO[str], *, wait: bool = False) -> bool:
    """Lock an open file until it is closed; return False if another process holds it, or ``wait`` for that one.

    Raises ConfigError if its file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        raise ConfigError(
            f"{Path(file.name).parent}: its file system has no locks ({error.strerror}); use a folder on a local disk, "
            "or mount this one with locks (NFS: version 4, or lockd; Lustre: -o flock)"
        ) from error
    return True


@contextmanager
def locked_folder(folder: Path, remedy: str) -> Iterator[IO[str]]:
    """Hold the lock of a run folder; yield its file, with which a child keeps the lock that outlives this process.

    Raises ConfigError, which ends with the ``remedy``, if another launcher holds it.
    """
    with (folder / LOCK_FILE).open("a+") as lock:
        if not lock_file(lock):
            holder = lock_holder(folder) or "pid unknown"
            raise ConfigError(f"folder={folder}: another launcher ({holder}) runs there; {remedy}")
        lock.truncate(0)
        lock.write(lock_text())
        lock.flush()
        try:
            yield lock
        finally:
            lock.truncate(0)
