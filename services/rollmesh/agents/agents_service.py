"""Service behind the OpenAI-compatible API: unrecorded calls, and for agent runs a worker with its sessions."""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from rollmesh.agents.agent_session import AgentSession, EndedSession, session_ended
from rollmesh.agents.agents_metrics import OpenAiMetrics
from rollmesh.agents.chat_format import ChatFormats
from rollmesh.agents.connections import Drain, OtherReplicas
from rollmesh.agents.openai_errors import Elsewhere, OpenAiError, gone, invalid, not_known_yet, unavailable
from rollmesh.agents.recorded_calls import RecordedCalls
from rollmesh.agents.session_manager import SessionManager, is_session_id
from rollmesh.agents.session_rewards import Rewards
from rollmesh.agents.unrecorded import UnrecordedCalls
from rollmesh.config import RunConfig
from rollmesh.errors import RollmeshError, StoreError, StoreUnavailable
from rollmesh.runtime.addresses import instance_name
from rollmesh.runtime.endpoints import AdminClient
from rollmesh.runtime.health import Health, Waits
from rollmesh.runtime.lifecycle import Shutdown, wait_or_shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import OPEN, PortSecurity
from rollmesh.runtime.tasks import cancel_and_wait, raise_first_error
from rollmesh.store import TrajectoryStore
from rollmesh.store.evaluation_requests import due_at_end
from rollmesh.text import Tokenizer
from rollmesh.types import PolicyRecord
from rollmesh.wire.generation_client import GenerationClient
from rollmesh.wire.scoring_client import RewardClient
from rollmesh.wire.teacher_client import open_teachers
from rollmesh.worker.agent_mark import root_of
from rollmesh.worker.build import WorkerSettings, worker_deps
from rollmesh.worker.evaluator import Evaluator, run_evaluator
from rollmesh.worker.generation_calls import Caller, SaveLimits
from rollmesh.worker.generator_pool import GeneratorPool
from rollmesh.worker.known_policies import NewestPolicy
from rollmesh.worker.routing import Placement
from rollmesh.worker.worker import Worker
from rollmesh.worker.worker_metrics import WorkerMetrics
from rollmesh.worker.worker_session import WorkerSession

_UNRECORDED_SAVING = SaveLimits(chunk_token_count=8, unacknowledged_token_limit=0)
"""Tokens per piece of an unrecorded answer; recorded answers arrive in pieces as they are saved."""
_POLL_SECONDS = 0.5
_SWEEP_SECONDS = 0.5
_ANSWER_SECONDS = 2.0
"""Time for answers that are nearly complete; shorter than the HTTP server's grace period, which closes connections
without an answer."""
_COMPLETE_SECONDS = 1.0
_HEARTBEAT_DEADLINE_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Agents:
    """Parts of the service that exist only with rollout.program=agent."""

    session_manager: SessionManager
    recorded: RecordedCalls
    rewards: Rewards
    others: OtherReplicas


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiService:
    """Dependencies of the API's routes."""

    config: RunConfig
    store: TrajectoryStore
    formats: ChatFormats
    metrics: OpenAiMetrics
    unrecorded: UnrecordedCalls
    agents: Agents | None
    """None unless rollout.program=agent."""
    drain: Drain

    @property
    def agent_parts(self) -> Agents:
        """Parts of the service for agent runs; OpenAiError in any other run."""
        if self.agents is None:
            raise invalid(
                f"sessions: this run makes its own rollouts (rollout.program={self.config.rollout.program}); set "
                "rollout.program=agent to train on the sessions of outside agents",
                None,
                "no_sessions",
            )
        return self.agents

    async def active_session(self, session_id: str, *, here: bool) -> AgentSession:
        """Return the session for a call to continue; OpenAiError if it has ended or is unknown."""
        session = await self.find_session(session_id, here=here)
        if isinstance(session, EndedSession):
            raise session_ended(session_id, session.ended)
        return session

    async def find_session(self, session_id: str, *, here: bool) -> AgentSession | EndedSession:
        """Return a session, including ended ones; OpenAiError like ``check_place``, or if it is unknown."""
        await self.check_place(session_id, here=here)
        session = self.agent_parts.session_manager.find(session_id)
        if session is not None:
            return session
        raise OpenAiError(
            404,
            f"session {session_id}: unknown; it was never opened here, ended long ago, or had no call yet when its "
            "service crashed; open a new session: POST /v1/sessions",
            code="session_not_found",
        )

    async def check_place(self, session: str, *, here: bool) -> None:
        """Raise Elsewhere if another replica has a session, and another OpenAiError while none has it yet.

        ``session``: id or name. ``here``: no other replica is asked.
        """
        sessions, others = self.agent_parts.session_manager, self.agent_parts.others
        found = sessions.find(session)
        if found is not None and found.ended != "lost":  # a session that this process lost may be in another one
            return
        place = await others.place_of(root_of(session) if is_session_id(session) else session)
        if place is None or sessions.find(session) is not found:
            return
        if place.address not in ("", others.address) and not here:
            raise Elsewhere(session, partial(others.forward, address=place.address, session=session))
        if place.lives and found is None:
            raise not_known_yet(session)

    async def policies(self) -> tuple[Mapping[int, int], PolicyRecord | None]:
        """Return the number of serving generators by policy version, and the newest announced policy."""
        serving = Counter(record.policy_version for record in await self.store.generators.live() if record.serving)
        return serving, await self.store.policies.latest()

    async def check_published(self, policy_version: int | None) -> None:
        """Raise OpenAiError if a policy version was never published; None is the newest one."""
        if policy_version is None or await self.store.policies.get(policy_version) is not None:
            return
        newest = await self.store.policies.latest()
        known = "none is published yet" if newest is None else f"published are 0 to {newest.policy_version}"
        raise OpenAiError(
            404,
            f"model: policy version {policy_version} does not exist ({known}); {self.config.name!r} is the newest",
            param="model",
            code="model_not_found",
        )

    async def complete(self) -> bool:
        """Tell whether the run needs no more rollouts, for training or for an evaluation."""
        return await _complete(self.config, self.store)


@asynccontextmanager
async def openai_service(
    config: RunConfig,
    index: int,
    store: TrajectoryStore,
    tokenizer: Tokenizer,
    registry: Metrics,
    health: Health,
    shutdown: Shutdown,
    address: str,
    security: PortSecurity = OPEN,
) -> AsyncIterator[OpenAiService]:
    """Run the service and its loops; a failed loop sets ``shutdown``, and its error is raised at the end.

    ``address``: host:port where other replicas reach its API. On exit every active trajectory is saved and released,
    which does not count as an attempt.
    """
    metrics = OpenAiMetrics(registry)
    formats = await asyncio.to_thread(ChatFormats, config, tokenizer)
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(GenerationClient(security))
        drain = await stack.enter_async_context(drain_at(shutdown, partial(_complete, config, store)))
        settings = WorkerSettings.from_config(config, tokenizer)
        loops = Loops(shutdown)
        agents: Agents | None = None
        if config.rollout.program == "agent":
            reward = await stack.enter_async_context(RewardClient(config, security=security))
            teachers = await open_teachers(config, stack, security, health.waits)
            session_manager = SessionManager(metrics, config.rollout)
            name, worker_metrics = instance_name(config, "agents", index), WorkerMetrics(registry)
            deps = worker_deps(
                settings, name, store, client, reward, session_manager, worker_metrics, health, address, teachers
            )
            worker = Worker(settings, deps, session_manager.waiting)
            generators, policies = deps.generators, deps.policies
            http = await stack.enter_async_context(AdminClient(security))
            agents = Agents(
                session_manager=session_manager,
                recorded=RecordedCalls(tokenizer, session_manager, worker, metrics, settings),
                rewards=Rewards(session_manager, settings.budget, config.trainer.algorithm.credit),
                others=OtherReplicas(store.sessions, address, http, drain),
            )
            evaluator = run_evaluator(config, deps, tokenizer)
            loops.start(_work(worker, evaluator, deps.session, health, loops.stop), "agents-worker")
            loops.start(_sweep(session_manager, health.waits, loops.stop), "agents-sweep")
        else:
            generators = GeneratorPool(store.generators, placement=Placement(config.rollout.placement))
            policies = NewestPolicy(store.policies)
            loops.start(_refresh_registry(generators, policies, health, loops.stop), "openai-registry")
        stack.push_async_callback(loops.end)
        caller = Caller(client, generators, policies, replace(settings.calls, saving=_UNRECORDED_SAVING), metrics)
        yield OpenAiService(
            config=config,
            store=store,
            formats=formats,
            metrics=metrics,
            unrecorded=UnrecordedCalls(tokenizer, caller, generators, config.generator.max_context_tokens),
            agents=agents,
            drain=drain,
        )


async def _complete(config: RunConfig, store: TrajectoryStore) -> bool:
    if config.rollout.program != "agent":
        return False
    state = await store.training.state()
    if max(state.trained_step, state.cut_step) < config.trainer.train_steps:
        return False
    return not await _evaluations_left(config, store)


async def _evaluations_left(config: RunConfig, store: TrajectoryStore) -> bool:
    """Tell whether the end of the run still needs agents for an evaluation, also for one that nobody requested yet."""
    records, newest, evaluation = await store.evaluations.all(), await store.policies.latest(), config.evaluation
    done = {record.request.policy_version for record in records if record.result is not None}
    if len(done) < len(records):
        return True
    if not (evaluation.before_and_after or evaluation.every_versions):
        return False
    if newest is None or newest.train_step < config.trainer.train_steps:
        return True
    due = {*due_at_end(evaluation, newest.policy_version, config.checkpoints.keep_last)}
    if evaluation.before_and_after:
        due.add(newest.policy_version)
    return not due <= done


class Loops:
    """Background tasks whose failure ends the process."""

    def __init__(self, shutdown: Shutdown) -> None:
        self.stop = asyncio.Event()
        """Set by ``end``: the tasks that watch it end."""
        self._shutdown = shutdown
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._done)
        self._tasks.append(task)

    async def end(self) -> None:
        """Stop the tasks and wait for their ends."""
        self.stop.set()
        await self.ended()

    async def ended(self) -> None:
        raise_first_error(await asyncio.gather(*self._tasks, return_exceptions=True))

    def _done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            get_logger("agents").error("loop_failed", loop=task.get_name(), exc_info=error)
            self._shutdown.set()


async def _work(
    worker: Worker, evaluator: Evaluator, session: WorkerSession, health: Health, stop: asyncio.Event
) -> None:
    """Run one worker session with its evaluations, from the first heartbeat to the last release."""
    while True:
        try:
            await session.open()
            break
        except StoreUnavailable as error:
            get_logger("agents").warning("store_unavailable", message=str(error))
        if await wait_or_shutdown(stop, _POLL_SECONDS):
            return
    health.watch("heartbeat", _HEARTBEAT_DEADLINE_SECONDS)
    heartbeat = asyncio.create_task(session.keep_alive(lambda: health.beat("heartbeat")), name="heartbeat")
    working = asyncio.create_task(worker.run(stop), name="worker")
    evaluating = asyncio.create_task(evaluator.run(), name="evaluator")
    try:
        await asyncio.wait([working, evaluating], return_when=asyncio.FIRST_COMPLETED)
    finally:
        stop.set()
        ended = await cancel_and_wait(evaluating)
        ended += await asyncio.gather(working, return_exceptions=True)
        await cancel_and_wait(heartbeat)
        health.unwatch("heartbeat")
        await session.close()
    raise_first_error(ended)


async def _sweep(session_manager: SessionManager, waits: Waits, stop: Shutdown) -> None:
    while not await wait_or_shutdown(stop, _SWEEP_SECONDS):
        session_manager.sweep(waits)


async def _refresh_registry(generators: GeneratorPool, policies: NewestPolicy, health: Health, stop: Shutdown) -> None:
    """Refresh the registry in a process without a worker."""
    health.watch("registry", _HEARTBEAT_DEADLINE_SECONDS)
    while True:
        health.beat("registry")
        try:
            await policies.refresh()
            await generators.refresh()
        except RollmeshError as error:
            get_logger("openai").warning("registry_not_read", message=str(error))
        if await wait_or_shutdown(stop, _POLL_SECONDS):
            return


@asynccontextmanager
async def drain_at(shutdown: Shutdown, complete: Callable[[], Awaitable[bool]]) -> AsyncIterator[Drain]:
    """Provide a notice sent on ``shutdown``: immediately if the run is complete, otherwise after a grace period."""
    notice = asyncio.create_task(_notice(shutdown, complete), name="drain")
    try:
        yield lambda: asyncio.shield(notice)
    finally:
        await cancel_and_wait(notice)


async def _notice(shutdown: Shutdown, complete: Callable[[], Awaitable[bool]]) -> OpenAiError:
    await shutdown.wait()
    deadline = time.monotonic() + _ANSWER_SECONDS
    try:
        async with asyncio.timeout(_COMPLETE_SECONDS):
            if await complete():
                return gone("the run has ended: it needs no more rollouts", "run_complete")
    except (TimeoutError, StoreError):
        pass  # Redis may already be shut down
    await asyncio.sleep(deadline - time.monotonic())
    return unavailable(
        "the agents service is shutting down; retry: the session continues after its restart", "shutting_down"
    )
