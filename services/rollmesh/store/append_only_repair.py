"""Repairing the append-only file of an embedded server that refuses to load it.

A machine that loses power may leave zeros, or half a record, at the end of a file. The server's own check tool cuts the
file after its last whole record. A folder that it cannot repair is set aside, and the server starts empty: a run
continues from either, as after any restart of Redis that forgot its last writes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from contextlib import suppress
from pathlib import Path

_TOOL_SECONDS = 600.0
_DAMAGED = re.compile(
    r"(Bad file format|Unexpected end of file|Unknown command .*) reading the append only file"
    r"|RDB preamble of the AOF file|rdb file reading failure|Wrong signature|Internal error in RDB"
    r"|AOF manifest(?! file .* for reading)|AOF MANIFEST FILE ERROR"
)
"""What the server logs before it ends for the content of its files. A full disk or a taken port reads differently."""


def names_damage(log: str) -> bool:
    """Whether the log of a failed start says that the content of a file is at fault."""
    return _DAMAGED.search(log) is not None


def cut(files: Path, binary: Path) -> str:
    """Cut the newest append-only file after its last whole record, and keep a copy of the damaged one.

    Returns what was lost; empty when the tool found nothing to cut. Raises OSError.
    """
    increments = sorted(files.glob("*.incr.aof"), key=lambda file: int(file.name.split(".")[-3]))
    if not increments:
        return ""
    file = increments[-1]
    kept = file.with_name(f"{file.name}.damaged-{time.time_ns()}")
    shutil.copy2(file, kept)
    before = file.stat().st_size
    # One binary is server and check tool; its name says which. The tool asks before it cuts.
    name = binary.name.replace("server", "check-aof")
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(
            [name, "--fix", str(file)],
            executable=str(binary),
            input=b"y\n",
            capture_output=True,
            timeout=_TOOL_SECONDS,
            check=False,
        )
    lost = before - file.stat().st_size
    if lost <= 0:
        kept.unlink()
        return ""
    return (
        f"the append-only file of the embedded Redis was damaged: its last {lost:,} of {before:,} bytes are lost, "
        f"and with them the newest writes to the queue; the damaged file is kept as {kept}"
    )


def set_aside(files: Path) -> str:
    """Rename the folder of the append-only files; returns what was lost. Raises OSError."""
    kept = files.with_name(f"{files.name}.damaged-{time.time_ns()}")
    size = sum(file.stat().st_size for file in files.iterdir())
    os.rename(files, kept)
    return (
        f"the append-only files of the embedded Redis are damaged beyond repair: the queue starts empty, its {size:,} "
        f"bytes are kept in {kept}; rollouts that were in progress are generated again"
    )
