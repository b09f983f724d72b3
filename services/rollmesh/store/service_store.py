"""Store of a service process, which waits at its start for a Redis that is not there yet."""

from __future__ import annotations

import asyncio
import time

from rollmesh.errors import Unfinished
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.service_host import ServiceHost
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.store.store_metrics import StoreCallMetrics
from rollmesh.store.trajectory_store import TrajectoryStore

START_SECONDS = 600.0
"""Time for which a service waits for Redis: its image, its volume, room on a node, a large append-only file."""
_LOG_SECONDS = 5.0


async def open_service_store(host: ServiceHost, shutdown: Shutdown, retry_seconds: float = 20.0) -> TrajectoryStore:
    """Connect to the run's queue, which ``host`` closes; wait up to ``START_SECONDS`` for the server.

    The log and ``/readyz`` show the last error meanwhile. Raises StoreUnavailable after that time, and at once from a
    server that refuses the password or cannot hold the queue; Unfinished at a shutdown meanwhile.
    """
    config, waits, start = host.config, host.health.waits, time.monotonic()
    connect = TrajectoryStore.connect(
        config.store,
        config.name,
        retry_seconds=retry_seconds,
        start_seconds=START_SECONDS,
        observer=StoreCallMetrics(host.metrics, waits),
    )
    connecting = asyncio.create_task(connect, name="connect-store")
    stopping = asyncio.create_task(shutdown.wait(), name="shutdown")
    try:
        while not connecting.done():
            await asyncio.wait({connecting, stopping}, timeout=_LOG_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done() and not connecting.done():
                raise Unfinished(f"stopped while it waited for its store: {waits.text()}")
            if not connecting.done():
                left = START_SECONDS - (time.monotonic() - start)
                get_logger("store").warning("waits_for_store", message=waits.text(), gives_up_in_seconds=round(left))
        return await host.stack.enter_async_context(connecting.result())
    finally:
        await cancel_and_wait(connecting, stopping)
