"""Store of a run on this machine: the server that the run file names, or a supervised embedded server."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial

from rollmesh.config import RunConfig
from rollmesh.errors import StoreUnavailable
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.runtime.health import Waits
from rollmesh.runtime.logging import get_logger
from rollmesh.store import TrajectoryStore
from rollmesh.store.embedded import EmbeddedOptions, EmbeddedServer
from rollmesh.store.redis_connection import StoreCallObserver
from rollmesh.store.trajectory_store import START_SECONDS

_WATCH_SECONDS = 0.5
_ANNOUNCE_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningStore:
    """Connected store, with the URL for the services."""

    store: TrajectoryStore
    url: str


@contextlib.asynccontextmanager
async def running_store(
    config: RunConfig,
    folder: RunFolder,
    *,
    owner: bool = False,
    note: Callable[[str], None] = lambda _: None,
    waits: Waits | None = None,
    retry_seconds: float = 20.0,
) -> AsyncIterator[RunningStore]:
    """Connect to the run's store.

    An embedded server that does not run is started, supervised, and stopped on exit. A server that already runs belongs
    to another command and is left unchanged, unless the caller is its ``owner``, the launcher that holds the folder's
    lock. The owner also takes over a server left by a killed launcher, or started by a command that will stop it.
    ``note`` receives a description of the data lost in a repair of the server's files; ``waits`` shows a server that
    does not answer. A call fails after ``retry_seconds`` without an answer; the owner waits ``START_SECONDS`` for a
    server that is not there yet.
    """
    observer = StoreCallObserver(waits or Waits())
    connect = partial(
        TrajectoryStore.connect,
        config.store,
        config.name,
        retry_seconds=retry_seconds,
        start_seconds=START_SECONDS if owner else None,
        observer=observer,
    )
    if config.store.url is not None:
        async with await connect() as store:
            yield RunningStore(store=store, url=config.store.url)
        return
    server = embedded_server(config, folder, note)
    started = await _started(server)
    stopping = asyncio.Event()
    watch = asyncio.create_task(_keep_up(server, stopping), name="watch-redis") if started or owner else None
    try:
        async with await connect(server.url) as store:
            try:
                yield RunningStore(store=store, url=server.url)
            finally:
                if watch is not None:
                    await _announce_stop(store)
    finally:
        if watch is not None:
            # Do not cancel: a start in progress continues in its thread and would leave a server behind.
            stopping.set()
            try:
                await watch
            finally:
                await asyncio.to_thread(server.stop)


async def _started(server: EmbeddedServer) -> bool:
    """Start the server; if the user stops the command meanwhile, stop it too."""
    starting = asyncio.create_task(asyncio.to_thread(server.start))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        with contextlib.suppress(StoreUnavailable):
            if await starting:
                await asyncio.to_thread(server.stop)
        raise


def embedded_server(
    config: RunConfig, folder: RunFolder, note: Callable[[str], None] = lambda _: None
) -> EmbeddedServer:
    """Return the embedded server of a run folder; it may be stopped."""
    password = config.store.password
    options = EmbeddedOptions(
        appendfsync=config.store.appendfsync,
        maxmemory_bytes=config.store.maxmemory_bytes,
        password=None if password is None else password.get_secret_value(),
    )
    return EmbeddedServer(folder.redis, options, note)


async def _announce_stop(store: TrajectoryStore) -> None:
    """Mark the shutdown as clean in the queue, so that the next start of the server needs no recovery."""
    with contextlib.suppress(StoreUnavailable, TimeoutError):
        async with asyncio.timeout(_ANNOUNCE_SECONDS):
            await store.recovery.mark_clean_shutdown()


async def _keep_up(server: EmbeddedServer, stopping: asyncio.Event) -> None:
    """Restart the server after each crash until ``stopping``; its append-only file restores the queue."""
    log = get_logger("redis")
    while not stopping.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), _WATCH_SECONDS)
            return
        try:
            if server.pid is None:
                log.warning("embedded_redis_gone", folder=str(server.folder))
                await asyncio.to_thread(server.start)
        except (StoreUnavailable, OSError) as error:  # includes a full disk: space may become available
            log.error("embedded_redis_does_not_start", message=str(error))
