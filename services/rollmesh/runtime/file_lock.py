"""Locks of files between processes, with a remedy where the file system has none."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from rollmesh.errors import ConfigError


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
