"""Following a JSON-lines file that another process writes."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

_MOST_BYTES = 4 << 20


@dataclass(slots=True)
class JsonLinesTail:
    """Follows a growing JSON-lines file; ``read`` returns the objects that are new."""

    file: Path
    most_bytes: int = _MOST_BYTES
    """Most that one ``read`` takes in: a long history is caught up with read by read."""
    exists: bool = False
    """Whether the last ``read`` found the file."""
    from_start: bool = False
    """Whether the last ``read`` began at the first line: what earlier ones returned has been written anew."""
    _offset: int = 0
    _inode: int = 0

    def read(self) -> list[dict[str, Any]]:
        """Complete new lines; a file that was replaced or cut (a restart tidies it) is read again from its start.

        Lines that hold no JSON object, and those longer than ``most_bytes``, are skipped.
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
        return [record for line in complete.splitlines() if (record := _record(line)) is not None]

    def rewind(self) -> None:
        """Let the next ``read`` begin at the first line."""
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
        """A rewritten file may be longer than what was read of the old one, so its size alone says nothing; nor does
        the inode, which a file system gives out again: what was read must have ended a line here too."""
        found = os.fstat(handle.fileno())
        same = found.st_ino == self._inode and found.st_size >= self._offset
        if same and self._offset:
            handle.seek(self._offset - 1)
            same = handle.read(1) == b"\n"
        if not same:
            self._offset = 0
        self._inode = found.st_ino


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
