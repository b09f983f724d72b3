"""Settings and dependencies of a worker: the same for rollout services, the agents service and tests."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Self

from rollmesh.config import RunConfig
from rollmesh.config.rollout import RewardConfig
from rollmesh.curriculum.budgets import Budget, load_budget
from rollmesh.runtime.health import Health
from rollmesh.store import TrajectoryStore
from rollmesh.text import Tokenizer
from rollmesh.types import SamplingParams
from rollmesh.wire.generation_client import GenerationClient
from rollmesh.wire.scoring_client import RewardClient
from rollmesh.wire.teacher_client import TeacherClient
from rollmesh.worker.generation_calls import Caller, CallLimits, SaveLimits
from rollmesh.worker.generator_pool import GeneratorPool, Interrupter
from rollmesh.worker.known_policies import NewestPolicy, TrajectoryBudgets
from rollmesh.worker.program import Program
from rollmesh.worker.routing import Placement
from rollmesh.worker.saving import Saver
from rollmesh.worker.trajectory_scoring import TeacherScorer, TrajectoryScorer
from rollmesh.worker.worker_metrics import WorkerMetrics
from rollmesh.worker.worker_session import WorkerSession


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Sampling, limits and intervals of a worker."""

    params: SamplingParams
    calls: CallLimits
    reward: RewardConfig
    budget: int
    """Tokens of a response, environment tokens included."""
    concurrency: int
    """Trajectories without an outcome that the worker runs at once."""
    heartbeat_seconds: float
    drain_seconds: float
    """Time at shutdown until running calls are interrupted."""
    token_budget: Budget | None = None
    """Budget by the train step of a trajectory's first policy; None for ``budget``."""
    turn_budget: Budget | None = None
    placement: Placement = Placement.CALLS
    interrupt_grace_seconds: float = 3.0
    first_pause_seconds: float = 0.5
    """Time that a failed first attempt keeps its lease; doubled with every further attempt."""

    @classmethod
    def from_config(cls, config: RunConfig, tokenizer: Tokenizer) -> Self:
        """Return the settings of a run file."""
        rollout, curriculum = config.rollout, config.curriculum

        def budget(field: str, most: int) -> Budget | None:
            name, options = getattr(curriculum, field), getattr(curriculum, f"{field}_options")
            return load_budget(field, name, options, most=most, train_steps=config.trainer.train_steps)

        return cls(
            params=rollout.sampling(config.seed, tokenizer.eos_token_ids),
            calls=CallLimits(
                vocab_size=tokenizer.vocab_size,
                max_context_tokens=config.generator.max_context_tokens,
                saving=SaveLimits.of(rollout.partial_save_tokens),
                chunk_timeout_seconds=rollout.chunk_timeout_seconds,
            ),
            reward=config.reward,
            budget=rollout.max_new_tokens,
            token_budget=budget("token_budget", rollout.max_new_tokens),
            turn_budget=budget("turn_budget", rollout.max_turns),
            concurrency=rollout.worker_concurrency,
            heartbeat_seconds=config.store.heartbeat_seconds,
            placement=Placement(rollout.placement),
            drain_seconds=config.generator.drain_timeout_seconds / 2,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDeps:
    """Dependencies of a worker."""

    store: TrajectoryStore
    session: WorkerSession
    saver: Saver
    generators: GeneratorPool
    policies: NewestPolicy
    caller: Caller
    interrupter: Interrupter
    budgets: TrajectoryBudgets
    scorer: TrajectoryScorer
    program: Program
    metrics: WorkerMetrics
    health: Health


def worker_deps(
    settings: WorkerSettings,
    name: str,
    store: TrajectoryStore,
    generation: GenerationClient,
    reward: RewardClient,
    program: Program,
    metrics: WorkerMetrics,
    health: Health,
    address: str = "",
    teachers: Mapping[str, TeacherClient] = MappingProxyType({}),
) -> WorkerDeps:
    """Build the dependencies of the worker ``name``; its process may share them with other users.

    ``address``: host:port of its sessions of agents. ``teachers``: clients of the teachers, by name.
    """
    session = WorkerSession(store.sessions, name, settings.heartbeat_seconds, metrics, address)
    generators, policies = GeneratorPool(store.generators, placement=settings.placement), NewestPolicy(store.policies)

    async def record(setting: str, content: str) -> str:
        return await session.call(lambda _: store.leadership.record_content(setting, content))

    taught = TeacherScorer(teachers, record, metrics) if teachers else None
    return WorkerDeps(
        store=store,
        session=session,
        saver=Saver(store.trajectories, session),
        generators=generators,
        policies=policies,
        caller=Caller(generation, generators, policies, settings.calls, metrics, health.waits),
        interrupter=Interrupter(generation, generators, settings.interrupt_grace_seconds),
        budgets=TrajectoryBudgets(store.policies, settings.budget, settings.token_budget, settings.turn_budget),
        scorer=TrajectoryScorer(reward, settings.reward, settings.budget, metrics, health.waits, taught),
        program=program,
        metrics=metrics,
        health=health,
    )
