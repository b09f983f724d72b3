"""Facade of the trajectory queue: one object over the parts that share a connection."""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rollmesh.config.services import StoreConfig
from rollmesh.errors import ConfigError
from rollmesh.mesh import RunLimits
from rollmesh.store.deadletters import DeadLetters
from rollmesh.store.evaluation_requests import Evaluations
from rollmesh.store.generator_registry import GeneratorRegistry
from rollmesh.store.inspection import Inspection
from rollmesh.store.leadership import Leadership
from rollmesh.store.limits import Limits
from rollmesh.store.operator_settings import Settings
from rollmesh.store.policy_registry import PolicyRegistry
from rollmesh.store.prompts import PromptCache
from rollmesh.store.redis_client import create_client
from rollmesh.store.redis_connection import Connection
from rollmesh.store.rollbacks import Rollbacks
from rollmesh.store.step_reports import StepReports
from rollmesh.store.store_metrics import CallObserver
from rollmesh.store.training import Training
from rollmesh.store.trajectories import TrajectoryQueue
from rollmesh.store.unclaimed import Unclaimed
from rollmesh.store.view import View
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
        self.connection = connection
        self._limits = Limits(connection)
        sessions, prompts, settings = Sessions(connection), PromptCache(), Settings(connection)
        self._for_workers(sessions, TrajectoryQueue(connection, self._limits, prompts))
        self._for_leaders(Leadership(connection, self._limits, sessions, prompts))
        self._for_generators(PolicyRegistry(connection, settings), GeneratorRegistry(connection))
        self._for_trainers(Training(connection, self._limits), Rollbacks(connection, settings), Unclaimed(connection))
        view = View(connection, self._limits, settings)
        self._for_operators(view, Evaluations(connection), DeadLetters(connection, self._limits))
        self._for_viewers(Inspection(connection))
        self._for_curves(StepReports(connection))
        self._for_launchers(Scaling(connection, settings))

    def _for_workers(self, sessions: Sessions, queue: TrajectoryQueue) -> None:
        self.open_session = sessions.open_session
        self.heartbeat = sessions.heartbeat
        self.held_by = sessions.held_by
        self.close_session = sessions.close_session
        self.server_run_id = sessions.server_run_id
        self.begin_recovery = sessions.begin_recovery
        self.mark_clean_shutdown = sessions.mark_clean_shutdown
        self.reregister = sessions.reregister

        self.lease = queue.lease
        self.lease_scoring = queue.lease_scoring
        self.fork = queue.fork
        self.append = queue.append
        self.report_first_tokens = queue.report_first_tokens
        self.finish = queue.finish
        self.score = queue.score
        self.release = queue.release
        self.keep_snapshot = queue.keep_snapshot
        self.restart = queue.restart
        self.fail = queue.fail

    def _for_leaders(self, leader: Leadership) -> None:
        self.acquire_leadership = leader.acquire_leadership
        self.renew_leadership = leader.renew_leadership
        self.resign = leader.resign
        self.admit = leader.admit
        self.admit_replays = leader.admit_replays
        self.cursor = leader.cursor
        self.set_desired = leader.set_desired
        self.desired = leader.desired
        self.cut = leader.cut
        self.evict = leader.evict
        self.reap = leader.reap
        self.report_failure = leader.report_failure
        self.failure = leader.failure

    def _for_generators(self, registry: PolicyRegistry, generators: GeneratorRegistry) -> None:
        self.announce_policy = registry.announce_policy
        self.policies = registry.policies
        self.latest_policy = registry.latest_policy
        self.policy = registry.policy
        self.wait_policy = registry.wait_policy
        self.pin_policy = registry.pin_policy
        self.pinned_policy = registry.pinned_policy
        self.effective_policy = registry.effective_policy
        self.register_generator = generators.register_generator
        self.deregister_generator = generators.deregister_generator
        self.generators = generators.generators

    def _for_trainers(self, training: Training, rollbacks: Rollbacks, unclaimed: Unclaimed) -> None:
        self.open_trainer_session = training.open_trainer_session
        self.close_trainer_session = training.close_trainer_session
        self.training_state = training.training_state
        self.claim = training.claim
        self.confirm_batch_file = training.confirm_batch_file
        self.report_trained = training.report_trained
        self.report_committed = training.report_committed
        self.reassert_training = training.reassert_training
        self.rollback = training.rollback
        self.request_rollback = rollbacks.request_rollback
        self.rollback_request = rollbacks.rollback_request
        self.finish_rollback = rollbacks.finish_rollback
        self.unclaimed_trajectories = unclaimed.unclaimed_trajectories

    def _for_operators(self, view: View, evaluations: Evaluations, letters: DeadLetters) -> None:
        self.view = view.view
        self.counts = view.counts
        self.ledger = view.ledger
        self.live_groups = view.live_groups
        self.dropped_groups = view.dropped_groups
        self.forgotten_drops = view.forgotten_drops
        self.set_user_paused = view.set_user_paused
        self.set_launcher_paused = view.set_launcher_paused

        self.request_evaluation = evaluations.request_evaluation
        self.claim_evaluation = evaluations.claim_evaluation
        self.finish_evaluation = evaluations.finish_evaluation
        self.evaluations = evaluations.evaluations

        self.dead_letters = letters.dead_letters
        self.dead_letter = letters.dead_letter
        self.replay_dead_letter = letters.replay_dead_letter
        self.delete_dead_letter = letters.delete_dead_letter

    def _for_launchers(self, scaling: Scaling) -> None:
        self.request_scale = scaling.request_scale
        self.scale_requests = scaling.scale_requests
        self.take_scale_requests = scaling.take_scale_requests
        self.leave_scaling = scaling.leave_scaling

    def _for_viewers(self, inspection: Inspection) -> None:
        self.workers = inspection.workers
        self.scan_held = inspection.scan_held
        self.marks = inspection.marks
        self.trajectory_page = inspection.trajectory_page
        self.inspect = inspection.inspect
        self.gone_at = inspection.gone_at

    def _for_curves(self, reports: StepReports) -> None:
        self.report_steps = reports.report_steps
        self.step_reports = reports.step_reports

    @classmethod
    async def connect(
        cls,
        config: StoreConfig,
        run: str,
        url: str | None = None,
        retry_seconds: float = 20.0,
        observer: CallObserver | None = None,
    ) -> Self:
        """Connect to the run's queue; ``url`` (of the embedded server) takes precedence over ``config.url``.

        ``observer`` receives the duration and failures of every call, for metrics.

        Raises ConfigError without a URL, and StoreUnavailable when the server does not answer within
        ``retry_seconds``, rejects the password, is older than Redis 7.0 or may evict keys.
        """
        target = url or config.url
        if target is None:
            raise ConfigError("store.url is null and no embedded server was given: start one or set store.url")
        return cls(await Connection.open(create_client(target, config), run, retry_seconds, observer))

    async def aclose(self) -> None:
        """Close the connections."""
        await self.connection.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def init_run(self, limits: RunLimits) -> None:
        """Write the fixed limits of the run once; raises Conflict when it was started with other limits."""
        await self._limits.init_run(limits)

    async def limits(self) -> RunLimits:
        """Return the fixed limits of the run."""
        return await self._limits.get()
