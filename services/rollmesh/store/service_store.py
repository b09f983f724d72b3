"""Store of a service process, which waits at its start for a Redis that is not there yet."""

from __future__ import annotations

import asyncio
import time

from rollmesh.errors import StoreUnavailable, Unfinished
from rollmesh.mesh import RunLimits
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.service_host import ServiceHost
from rollmesh.runtime.tasks import Backoff, cancel_and_wait, retry
from rollmesh.store.scripts import cannot_write
from rollmesh.store.store_metrics import StoreCallMetrics
from rollmesh.store.trajectory_store import TrajectoryStore

START_SECONDS = 600.0
"""Time for which a service waits for Redis: its image, its volume, room on a node, a large append-only file."""
_LOG_SECONDS = 5.0
_BACKOFF = Backoff(first_seconds=0.1, longest_seconds=1.0)


async def open_service_store(
    host: ServiceHost, shutdown: Shutdown, retry_seconds: float = 20.0, limits: RunLimits | None = None
) -> TrajectoryStore:
    """Connect to the run's queue, which ``host`` closes, and write the ``limits`` of the run, if any.

    Waits up to ``START_SECONDS`` for a server that is not there, and for one that cannot write yet. The log and
    ``/readyz`` show the last error meanwhile. Raises StoreUnavailable after that time, and at once from a server that
    refuses the password or cannot hold the queue; Unfinished at a shutdown meanwhile.
    """
    config, waits, start = host.config, host.health.waits, time.monotonic()

    async def connect() -> TrajectoryStore:
        store = await host.stack.enter_async_context(
            await TrajectoryStore.connect(
                config.store,
                config.name,
                retry_seconds=retry_seconds,
                start_seconds=START_SECONDS,
                observer=StoreCallMetrics(host.metrics, waits),
            )
        )
        if limits is not None:
            await begin_run(store, limits)
        return store

    connecting = asyncio.create_task(connect(), name="connect-store")
    stopping = asyncio.create_task(shutdown.wait(), name="shutdown")
    try:
        while not connecting.done():
            await asyncio.wait({connecting, stopping}, timeout=_LOG_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done() and not connecting.done():
                raise Unfinished(f"stopped while it waited for its store: {waits.text()}")
            if not connecting.done():
                left = START_SECONDS - (time.monotonic() - start)
                get_logger("store").warning("waits_for_store", message=waits.text(), gives_up_in_seconds=round(left))
        return connecting.result()
    finally:
        await cancel_and_wait(connecting, stopping)


async def begin_run(store: TrajectoryStore, limits: RunLimits) -> None:
    """Write the limits of a run; wait up to ``START_SECONDS`` for a server without its replicas or room on its disk."""
    deadline = time.monotonic() + START_SECONDS

    async def wait(error: StoreUnavailable, delay: float) -> None:
        cause = error.__cause__
        if not isinstance(cause, Exception) or not cannot_write(cause) or time.monotonic() > deadline:
            raise error
        await asyncio.sleep(delay)

    await retry(lambda: store.limits.init_run(limits), StoreUnavailable, _BACKOFF, wait)
