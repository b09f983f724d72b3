"""Whole rollout replicas over scripted neighbours and a real store."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

from rollmesh.config import RunConfig
from rollmesh.config.rollout import EvalConfig, RewardConfig
from rollmesh.curriculum.budgets import Budget
from rollmesh.curriculum.planners import RoundRules
from rollmesh.mesh import RunLimits
from rollmesh.rollout.leader import MeshLeader
from rollmesh.rollout.leader_parts import PeriodicEvaluations
from rollmesh.rollout.main import Replica
from rollmesh.rollout.prompt_supply import PromptDraws
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.scheduling import Schedule
from rollmesh.store import TrajectoryStore
from rollmesh.tasks.sources.source_protocol import PromptSource
from rollmesh.types import SamplingParams
from rollmesh.wire.generation_client import GenerationClient
from rollmesh.wire.scoring_client import RewardClient
from rollmesh.wire.teacher_client import TeacherClient
from rollmesh.worker.build import WorkerSettings, worker_deps
from rollmesh.worker.evaluator import Evaluator
from rollmesh.worker.generation_calls import CallLimits, SaveLimits
from rollmesh.worker.program import Program, SingleTurnProgram
from rollmesh.worker.worker import Worker
from rollmesh.worker.worker_session import WorkerSession

from .scripted import STOP, VOCAB, ScriptedCluster, ScriptedPrompts, ScriptedTrainer

CONTEXT = 4096


def schedule(preset: str = "copris", train_steps: int = 3, **overrides: object) -> Schedule:
    config = {
        "name": "replicas",
        "folder": "runs/replicas",
        "model": {"path": "model"},
        "trainer": {"train_steps": train_steps},
        "schedule": {"preset": preset, "groups_per_batch": 2, "group_size": 4, **overrides},
    }
    return Schedule.from_config(RunConfig.model_validate(config))


def limits(plan: Schedule, **overrides: object) -> RunLimits:
    values = {
        "group_size": plan.group_size,
        "groups_per_batch": plan.groups_per_batch,
        "max_staleness": plan.max_staleness,
        "max_attempts": 3,
        # No session ends here by the clock, unless a test says so: replicas may share a machine that stalls.
        "session_ttl_seconds": 60.0,
        "filter_zero_variance": False,
        "mask_old_segments": False,
        "train_steps": plan.train_steps,
    }
    return RunLimits(**{**values, **overrides})  # type: ignore[arg-type]


@dataclass
class Running:
    """One replica and what a test looks at."""

    replica: Replica
    metrics: Metrics
    health: Health
    session: WorkerSession
    shutdown: asyncio.Event
    task: asyncio.Task[None]
    plan: Schedule = field(init=False)
    cluster: ScriptedCluster = field(init=False)
    trainer: ScriptedTrainer = field(init=False)
    """Plan and neighbours, in a whole mesh."""

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0

    async def stop(self) -> None:
        self.shutdown.set()
        await asyncio.wait_for(self.task, 60)


def build(
    store: TrajectoryStore,
    generation: GenerationClient,
    reward: RewardClient,
    plan: Schedule,
    *,
    index: int = 0,
    budget: int = 64,
    token_budget: Budget | None = None,
    turn_budget: Budget | None = None,
    chunk: int = 8,
    chunk_timeout: float = 60.0,
    grace: float = 30.0,
    heartbeat: float = 0.5,
    concurrency: int = 64,
    first_pause: float = 0.01,
    program: Program | None = None,
    prompts: PromptSource | None = None,
    reward_config: RewardConfig | None = None,
    evaluation: EvalConfig | None = None,
    unserved_seconds: float = 30.0,
    rounds: RoundRules | None = None,
    open_draws: Callable[[PromptSource], PromptDraws] | None = None,
    teachers: Mapping[str, TeacherClient] = MappingProxyType({}),
) -> tuple[Replica, Metrics, Health, WorkerSession]:
    registry, health = Metrics("rollout"), Health()
    metrics = RolloutMetrics(registry)
    settings = WorkerSettings(
        params=SamplingParams(stop_token_ids=(STOP,)),
        calls=CallLimits(
            vocab_size=VOCAB,
            max_context_tokens=CONTEXT,
            saving=SaveLimits(chunk_token_count=chunk, unacknowledged_token_limit=2 * chunk),
            chunk_timeout_seconds=chunk_timeout,
            segment_tokens=plan.segment_tokens,
        ),
        reward=reward_config or RewardConfig(),
        budget=budget,
        token_budget=token_budget,
        turn_budget=turn_budget,
        concurrency=concurrency,
        heartbeat_seconds=heartbeat,
        drain_seconds=60.0,  # as for the sessions; a generator that ignores interrupts is given up after ``grace``
        interrupt_grace_seconds=grace,
        first_pause_seconds=first_pause,
    )
    program, source = program or SingleTurnProgram(), prompts or ScriptedPrompts()
    name = f"rollout-{index}"
    deps = worker_deps(settings, name, store, generation, reward, program, metrics, health, teachers=teachers)
    worker = Worker(settings, deps)
    leader = MeshLeader(
        store,
        plan,
        lambda _: source,
        PeriodicEvaluations(store.evaluations, evaluation or EvalConfig(), keep_last=6),
        candidate=name,
        renew_seconds=heartbeat,
        metrics=metrics,
        health=health,
        rounds=rounds,
        open_draws=open_draws,
    )
    evaluator = Evaluator(
        deps,
        evaluation or EvalConfig(),
        budget=budget,
        stop_token_ids=(STOP,),
        open_prompts=lambda: source,
        section="data.source",
        unserved_seconds=unserved_seconds,
    )
    return Replica(deps.session, worker, leader, evaluator, health), registry, health, deps.session


@asynccontextmanager
async def running(*arguments: object, **options: object) -> AsyncIterator[Running]:
    """A replica at work; stopped in order at the end, unless the test has done so."""
    replica, metrics, health, session = build(*arguments, **options)  # type: ignore[arg-type]
    shutdown = asyncio.Event()
    task = asyncio.create_task(replica.run(shutdown))
    run = Running(replica, metrics, health, session, shutdown, task)
    try:
        yield run
    finally:
        if not task.done():
            await run.stop()
        elif not task.cancelled():
            task.result()
