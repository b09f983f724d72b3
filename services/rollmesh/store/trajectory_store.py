"""The trajectory queue of a run: one object per role, over a shared connection."""

from __future__ import annotations

from typing import Self

from rollmesh.config.store import StoreConfig
from rollmesh.errors import ConfigError
from rollmesh.store.deadletters import DeadLetters
from rollmesh.store.drop_ledger import DropLedger
from rollmesh.store.evaluation_requests import Evaluations
from rollmesh.store.generator_registry import GeneratorRegistry
from rollmesh.store.group_rounds import GroupRounds
from rollmesh.store.inspection import Inspection
from rollmesh.store.leadership import Leadership
from rollmesh.store.limits import Limits
from rollmesh.store.operator_settings import Settings
from rollmesh.store.payload import PromptCache
from rollmesh.store.policy_registry import PolicyRegistry, Rollbacks
from rollmesh.store.prompt_records import PromptRecords
from rollmesh.store.recovery import Recovery
from rollmesh.store.redis_client import create_client
from rollmesh.store.redis_connection import Connection
from rollmesh.store.reload_leases import ReloadLeases
from rollmesh.store.restarted_groups import RestartedGroups
from rollmesh.store.step_reports import StepReports
from rollmesh.store.store_metrics import StoreCallWaits
from rollmesh.store.training import Training
from rollmesh.store.trajectories import TrajectoryQueue
from rollmesh.store.unclaimed import Unclaimed
from rollmesh.store.view import MeshReader
from rollmesh.store.wanted_replicas import Scaling
from rollmesh.store.worker_sessions import Sessions


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
        self.recovery = Recovery(connection)
        self.sessions = Sessions(connection)
        self.trajectories = TrajectoryQueue(connection, self.limits, prompts)
        self.leadership = Leadership(connection, self.limits, self.sessions, prompts)
        self.restarted = RestartedGroups(connection, self.limits)
        self.rounds = GroupRounds(connection)
        self.mesh = MeshReader(connection, self.limits, self.settings)
        self.ledger = DropLedger(connection)
        self.prompt_records = PromptRecords(connection, self.limits)
        self.policies = PolicyRegistry(connection, self.settings)
        self.generators = GeneratorRegistry(connection)
        self.reloads = ReloadLeases(connection)
        self.training = Training(connection, self.limits, self.prompt_records, self.policies)
        self.rollbacks = Rollbacks(connection, self.settings)
        self.unclaimed = Unclaimed(connection)
        self.step_reports = StepReports(connection)
        self.evaluations = Evaluations(connection)
        self.dead_letters = DeadLetters(connection, self.limits)
        self.inspection = Inspection(connection)
        self.scaling = Scaling(connection, self.settings)

    @classmethod
    async def connect(
        cls,
        config: StoreConfig,
        run: str,
        url: str | None = None,
        retry_seconds: float = 20.0,
        start_seconds: float | None = None,
        observer: StoreCallWaits | None = None,
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
        """Close the connections."""
        await self.connection.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
