"""File stamp, to detect changes of a file without reading it."""

from __future__ import annotations

from pathlib import Path

Stamp = tuple[int, int, int]


def stamp_of(file: Path) -> Stamp:
    """Return (inode, size, mtime), which changes when the file is replaced or resized; raises OSError if it is missing.

    The time alone is not sufficient, because many file systems store it in steps of some milliseconds. Only a write in
    place that keeps the size depends on the time.
    """
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
