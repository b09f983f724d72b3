"""The trajectory queue of a run, one object per role over a shared connection, and how a service waits for it."""

import asyncio
import time
from typing import Self

from rollmesh.config.store import StoreConfig
from rollmesh.errors import ConfigError, StoreUnavailable, Unfinished
from rollmesh.mesh import RunLimits
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.service_host import ServiceHost
from rollmesh.runtime.tasks import Backoff, cancel_and_wait, retry
from rollmesh.store.drop_ledger import DeadLetters, DropLedger
from rollmesh.store.evaluation_requests import Evaluations
from rollmesh.store.generator_registry import GeneratorRegistry, ReloadLeases
from rollmesh.store.inspection import Inspection
from rollmesh.store.leadership import GroupRounds, Leadership, RestartedGroups
from rollmesh.store.limits import Limits
from rollmesh.store.operator_settings import Scaling, Settings
from rollmesh.store.payload import PromptCache
from rollmesh.store.policy_registry import PolicyRegistry, Rollbacks
from rollmesh.store.prompt_records import PromptRecords
from rollmesh.store.redis_client import create_client
from rollmesh.store.redis_connection import Connection, StoreCallObserver
from rollmesh.store.scripts import cannot_write
from rollmesh.store.training import StepReports, Training
from rollmesh.store.trajectories import TrajectoryQueue
from rollmesh.store.unclaimed import Unclaimed
from rollmesh.store.view import MeshReader
from rollmesh.store.worker_sessions import Recovery, Sessions

START_SECONDS = 600.0
"""Time for which a service waits for Redis: its image, its volume, room on a node, a large append-only file."""
_LOG_SECONDS = 5.0
_BACKOFF = Backoff(first_seconds=0.1, longest_seconds=1.0)


class TrajectoryStore:
    """The trajectory queue of one run.

    Every call may raise StoreUnavailable (Redis is unreachable, full or recovering: retry later, nothing is lost),
    SessionLost (the caller's session, trainer session or leadership is not current) and Conflict (the queue is not in
    the expected state). Calls are idempotent, and are retried here for up to ``retry_seconds`` while Redis is
    unreachable.
    """

    def __init__(self, connection: Connection) -> None:
        prompts = PromptCache()
        self.connection = connection
        self.limits = Limits(connection)
        self.settings = Settings(connection)
        self.recovery = Recovery(connection, self.limits)
        self.sessions = Sessions(connection, self.limits)
        self.trajectories = TrajectoryQueue(connection, self.limits, prompts)
        self.leadership = Leadership(connection, self.limits, self.sessions, prompts)
        self.restarted = RestartedGroups(connection, self.limits)
        self.rounds = GroupRounds(connection, self.limits)
        self.mesh = MeshReader(connection, self.limits, self.settings)
        self.ledger = DropLedger(connection, self.limits)
        self.prompt_records = PromptRecords(connection, self.limits)
        self.policies = PolicyRegistry(connection, self.settings)
        self.generators = GeneratorRegistry(connection)
        self.reloads = ReloadLeases(connection, self.limits)
        self.training = Training(connection, self.limits, self.prompt_records, self.policies)
        self.rollbacks = Rollbacks(connection, self.settings)
        self.unclaimed = Unclaimed(connection, self.limits)
        self.step_reports = StepReports(connection, self.limits)
        self.evaluations = Evaluations(connection, self.limits)
        self.dead_letters = DeadLetters(connection, self.limits)
        self.inspection = Inspection(connection, self.limits)
        self.scaling = Scaling(connection, self.settings)

    @classmethod
    async def connect(
        cls,
        config: StoreConfig,
        run: str,
        url: str | None = None,
        retry_seconds: float = 20.0,
        start_seconds: float | None = None,
        observer: StoreCallObserver | None = None,
    ) -> Self:
        """Connect to the run's queue; ``url`` (of the embedded server) takes precedence over ``config.url``.

        ``observer`` receives the duration and failures of every call.

        Raises ConfigError without a URL, and StoreUnavailable when the server does not answer within
        ``start_seconds`` (by default ``retry_seconds``), rejects the password, is older than Redis 7.0 or may evict
        keys.
        """
        target = url or config.url
        if target is None:
            raise ConfigError("store.url is null and no embedded server was given: start one or set store.url")
        return cls(await Connection.open(create_client(target, config), run, retry_seconds, start_seconds, observer))

    async def aclose(self) -> None:
        await self.connection.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


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
                observer=StoreCallObserver(waits, host.metrics),
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
