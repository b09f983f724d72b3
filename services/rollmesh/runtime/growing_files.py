"""Files that another process appends to: JSON lines, and logs."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_MOST_BYTES = 4 << 20


@dataclass(slots=True)
class JsonLinesTail:
    """Position in a growing JSON-lines file; ``read`` returns the new objects."""

    file: Path
    most_bytes: int = _MOST_BYTES
    """Maximum bytes of one ``read``; a long file takes several reads."""
    exists: bool = False
    """True when the last ``read`` found the file."""
    from_start: bool = False
    """True when the last ``read`` began at the first line, which replaces the objects of earlier reads."""
    _offset: int = 0
    _inode: int = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the objects of complete new lines; a file that was replaced or truncated is read again from its start.

        Lines without a JSON object and lines longer than ``most_bytes`` are skipped.
        """
        try:
            handle = self.file.open("rb")
        except FileNotFoundError:
            self.exists, self.from_start = False, False
            return []
        with handle:
            self._rewind_if_rewritten(handle)
            self.exists, self.from_start = True, self._offset == 0
            handle.seek(self._offset)
            data = handle.read(self.most_bytes)
            complete, newline, _ = data.rpartition(b"\n")
            if not newline and len(data) == self.most_bytes:
                self._skip_line(handle)
                return []
        self._offset += len(complete) + len(newline)
        records = []
        for line in complete.splitlines():
            with suppress(ValueError):
                records.append(json.loads(line))
        return [record for record in records if isinstance(record, dict)]

    def rewind(self) -> None:
        """Make the next ``read`` begin at the first line."""
        self._offset = 0

    def _skip_line(self, handle: BinaryIO) -> None:
        position = self._offset + self.most_bytes
        while part := handle.read(self.most_bytes):
            head, newline, _ = part.partition(b"\n")
            if newline:
                self._offset = position + len(head) + 1
                return
            position += len(part)

    def _rewind_if_rewritten(self, handle: BinaryIO) -> None:
        """Rewind when the file was rewritten.

        Neither size nor inode is sufficient: a rewritten file may be longer than the old one, and file systems reuse
        inodes. The last byte read must also be the end of a line.
        """
        found = os.fstat(handle.fileno())
        same = found.st_ino == self._inode and found.st_size >= self._offset
        if same and self._offset:
            handle.seek(self._offset - 1)
            same = handle.read(1) == b"\n"
        if not same:
            self._offset = 0
        self._inode = found.st_ino


_TAIL_BYTES = 64 << 10


def tail_lines(file: Path, since: int = 0) -> list[str]:
    """Return the lines with text of the last 64 KiB; skip the first ``since`` bytes. Raises OSError like ``open``."""
    with file.open("rb") as handle:
        handle.seek(max(since, file.stat().st_size - _TAIL_BYTES))
        text = handle.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]
