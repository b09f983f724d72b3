"""Whether a file may have changed, without reading it."""

from __future__ import annotations

from pathlib import Path

Stamp = tuple[int, int, int]


def stamp_of(file: Path) -> Stamp:
    """Another one once a file is replaced, grows or shrinks; OSError without the file.

    The time alone would not tell: many file systems count it in ticks of some milliseconds. Only a file that is written
    in place and keeps its size is left to it.
    """
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns
