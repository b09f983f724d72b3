"""Repair of the append-only file of an embedded server that refuses to load it.

A machine that loses power may leave zeros, or half a record, at the end of a file. The server's check tool truncates
the file after its last whole record. A folder that it cannot repair is renamed, and the server starts empty. The run
continues in both cases, as after any restart of Redis that lost its last writes.
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
"""Log lines of a server that exits because of damaged files; a full disk or an occupied port logs other lines."""


def reports_damage(log: str) -> bool:
    """Tell whether the log of a failed start reports damaged files."""
    return _DAMAGED.search(log) is not None


def cut(files: Path, binary: Path) -> str:
    """Truncate the newest append-only file after its last whole record, and keep a copy of the damaged file.

    Returns a description of the loss; empty when the tool found nothing to truncate. Raises OSError.
    """
    increments = sorted(files.glob("*.incr.aof"), key=lambda file: int(file.name.split(".")[-3]))
    if not increments:
        return ""
    file = increments[-1]
    kept = file.with_name(f"{file.name}.damaged-{time.time_ns()}")
    shutil.copy2(file, kept)
    before = file.stat().st_size
    # One binary is both server and check tool, selected by argv[0]. The tool asks for confirmation.
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
    """Rename the folder of the append-only files; returns a description of the loss. Raises OSError."""
    kept = files.with_name(f"{files.name}.damaged-{time.time_ns()}")
    size = sum(file.stat().st_size for file in files.iterdir())
    os.rename(files, kept)
    return (
        f"the append-only files of the embedded Redis cannot be repaired: the queue starts empty and its {size:,} "
        f"bytes are kept in {kept}; trajectories that were in progress are generated again"
    )
