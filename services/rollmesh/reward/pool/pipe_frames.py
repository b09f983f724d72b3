"""Length-prefixed frames between the service and its worker processes.

Workers run what strangers wrote, so nothing that comes from one is unpickled or trusted in its length.
"""

from __future__ import annotations

import socket
import struct

LARGEST_REQUEST_BYTES = 64 << 20
LARGEST_REPLY_BYTES = 1 << 20
_HEADER = struct.Struct("<I")


class FrameError(Exception):
    """The other side sent something that is no frame, or ended in the middle of one."""


class FrameBuffer:
    """Cuts a byte stream into frames."""

    def __init__(self, largest_bytes: int) -> None:
        self._largest_bytes = largest_bytes
        self._data = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Frames completed by ``data``; raises FrameError for a frame over the limit."""
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
    """One frame."""
    return _HEADER.pack(len(payload)) + payload


def receive_frame(connection: socket.socket, largest_bytes: int) -> bytes | None:
    """Block until a whole frame is there; None when the other side has closed between frames."""
    header = _receive(connection, _HEADER.size)
    if not header:
        return None
    (size,) = _HEADER.unpack(header)
    if size > largest_bytes:
        raise FrameError(f"frame of {size} bytes, the limit is {largest_bytes}")
    payload = _receive(connection, size)
    if len(payload) < size:
        raise FrameError("the stream ended inside a frame")
    return payload


def _receive(connection: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = connection.recv(min(size - len(data), 1 << 20))
        if not part:
            if data:
                raise FrameError("the stream ended inside a frame")
            break
        data += part
    return bytes(data)
