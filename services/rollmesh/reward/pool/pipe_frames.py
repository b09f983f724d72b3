"""Length-prefixed frames between the service and its worker processes.

Workers run untrusted code, so their data is never unpickled and its lengths are checked.
"""

from __future__ import annotations

import struct
from typing import BinaryIO

LARGEST_REQUEST_BYTES = 64 << 20
LARGEST_REPLY_BYTES = 1 << 20
_HEADER = struct.Struct("<I")


class FrameError(Exception):
    """Invalid frame, or end of the stream inside a frame."""


class FrameBuffer:
    """Splitter of a byte stream into frames."""

    def __init__(self, largest_bytes: int) -> None:
        self._largest_bytes = largest_bytes
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Return the frames completed by ``data``; raises FrameError for a frame over the limit."""
        self._data += data
        frames = []
        while len(self._data) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._data)
            if size > self._largest_bytes:
                raise FrameError(f"frame of {size} bytes, the limit is {self._largest_bytes}")
            if len(self._data) < _HEADER.size + size:
                break
            frames.append(bytes(self._data[_HEADER.size : _HEADER.size + size]))
            del self._data[: _HEADER.size + size]
        return frames


def frame(payload: bytes) -> bytes:
    """Encode one frame."""
    return _HEADER.pack(len(payload)) + payload


def receive_frame(stream: BinaryIO, largest_bytes: int) -> bytes | None:
    """Block until a whole frame has arrived; return None if the peer has closed the connection between frames."""
    header = stream.read(_HEADER.size)
    if not header:
        return None
    size = _HEADER.unpack(header)[0] if len(header) == _HEADER.size else 0
    if size > largest_bytes:
        raise FrameError(f"frame of {size} bytes, the limit is {largest_bytes}")
    payload = stream.read(size)
    if len(header) < _HEADER.size or len(payload) < size:
        raise FrameError("the stream ended inside a frame")
    return payload
