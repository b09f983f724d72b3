"""The life of one worker process: confined, then one answer after the other until told to end."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Protocol

from rollmesh.reward.pool.confinement import WorkerConfinement, allow_cpu, confine_worker
from rollmesh.reward.pool.pipe_frames import LARGEST_REQUEST_BYTES, frame, receive_frame

SCORE = b"S"
PROBE = b"P"


class Handler(Protocol):
    """Turns one request into one reply; never raises."""

    worn_out: bool
    """Whether the process should be replaced."""

    def __call__(self, payload: bytes) -> bytes: ...


def run_worker(
    connection: socket.socket,
    handler: Handler,
    confinement: WorkerConfinement,
    birth: int,
    *,
    timeout_seconds: float,
    item_count: int,
    probe: Callable[[], dict[str, object]],
) -> None:
    """Serve requests until the service closes the connection, the handler is worn out, or enough were served."""
    confine_worker(confinement, birth)
    for _ in range(item_count):
        request = receive_frame(connection, LARGEST_REQUEST_BYTES + 1)
        if request is None:
            return
        kind, payload = request[:1], request[1:]
        if kind == PROBE:
            connection.sendall(frame(json.dumps(probe()).encode()))
            continue
        allow_cpu(timeout_seconds)
        connection.sendall(frame(handler(payload)))
        if handler.worn_out:
            return
