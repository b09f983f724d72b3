"""Main loop of one worker process: confine the process, then score one answer after another."""

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
    """Function that turns one request into one reply; never raises."""

    needs_replacement: bool
    """True if the process must be replaced."""

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
    """Serve up to ``item_count`` requests, or until the service disconnects or the handler needs a replacement."""
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
        if handler.needs_replacement:
            return
