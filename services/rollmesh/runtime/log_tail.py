"""End of a log file."""

from __future__ import annotations

from pathlib import Path

_TAIL_BYTES = 64 << 10


def tail_lines(file: Path, since: int = 0) -> list[str]:
    """Return the lines with text of the last 64 KiB; skip the first ``since`` bytes. Raises OSError like ``open``."""
    with file.open("rb") as handle:
        handle.seek(max(since, file.stat().st_size - _TAIL_BYTES))
        text = handle.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]
