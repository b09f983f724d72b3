"""Rollout process: a worker, a candidate for leadership, an evaluator and the admin port."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import cast

from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.curriculum.planners import RoundRules
from rollmesh.curriculum.samplers import load_sampler
from rollmesh.rollout.leader import MeshLeader
from rollmesh.rollout.leader_parts import PeriodicEvaluations, RefusedPolicies
from rollmesh.rollout.prompt_supply import PromptDraws
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.addresses import instance_name
from rollmesh.runtime.health import Health
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import PortSecurity
from rollmesh.runtime.service_host import service_host
from rollmesh.runtime.tasks import cancel_and_wait, raise_first_error
from rollmesh.scheduling import Schedule, run_limits
from rollmesh.store import TrajectoryStore
from rollmesh.store.trajectory_store import open_service_store
from rollmesh.tasks.environments.environment_protocol import environment_factory
from rollmesh.tasks.sources.derived import RepeatedPrompts, run_prompts
from rollmesh.tasks.sources.source_protocol import OnChecked, PromptSource, RowSource
from rollmesh.text import Tokenizer
from rollmesh.wire.generation_client import GenerationClient
from rollmesh.wire.scoring_client import RewardClient
from rollmesh.wire.teacher_client import open_teachers
from rollmesh.worker.agent_mark import OutsideProgram
from rollmesh.worker.build import WorkerSettings, worker_deps
from rollmesh.worker.environment_program import EnvironmentProgram
from rollmesh.worker.evaluator import Evaluator, run_evaluator
from rollmesh.worker.program import Program, SingleTurnProgram
from rollmesh.worker.worker import Worker
from rollmesh.worker.worker_session import WorkerSession

_HEARTBEAT_DEADLINE_SECONDS = 120.0


@dataclass(eq=False)
class Replica:
    """Session, worker, leader and evaluator of one process."""

    _session: WorkerSession
    _worker: Worker
    _leader: MeshLeader
    _evaluator: Evaluator | None
    _health: Health

    async def run(self, shutdown: Shutdown) -> None:
        """Run all loops until shutdown; the failure of one ends the replica after a drain."""
        await self._session.open()
        self._health.watch("heartbeat", _HEARTBEAT_DEADLINE_SECONDS)
        heartbeat = asyncio.create_task(
            self._session.keep_alive(lambda: self._health.beat("heartbeat")), name="heartbeat"
        )
        evaluating = [] if self._evaluator is None else [asyncio.create_task(self._evaluator.run(), name="evaluator")]
        loops = [
            asyncio.create_task(self._worker.run(shutdown), name="worker"),
            asyncio.create_task(self._leader.run(shutdown), name="leader"),
        ]
        try:
            await asyncio.wait([heartbeat, *evaluating, *loops], return_when=asyncio.FIRST_COMPLETED)
        finally:
            shutdown.set()
            for task in evaluating:
                task.cancel()
            ended = await asyncio.gather(*loops, *evaluating, return_exceptions=True)
            ended += await cancel_and_wait(heartbeat)
            self._health.unwatch("heartbeat")
            await self._session.close()
        raise_first_error(ended)
        get_logger("rollout").info("stopped")


async def serve(config: RunConfig, index: int, shutdown: Shutdown) -> None:
    """Run one rollout replica until ``shutdown``; partial trajectories are saved and released before it returns.

    Raises ConfigError for an invalid run, StoreUnavailable if Redis does not answer at startup, DataError for prompts
    that cannot be opened.
    """
    async with service_host(config, "rollout", index) as host:
        host.publish()
        store = await open_service_store(host, shutdown, limits=run_limits(config))
        replica = await open_replica(config, index, store, host.stack, host.metrics, host.health, host.security)
        host.health.set_ready(True)
        await replica.run(shutdown)


async def open_replica(
    config: RunConfig,
    index: int,
    store: TrajectoryStore,
    stack: AsyncExitStack,
    registry: Metrics,
    health: Health,
    security: PortSecurity,
) -> Replica:
    """Build a replica with all its dependencies; ``stack`` closes the clients."""
    schedule = Schedule.from_config(config)
    tokenizer = Tokenizer(resolve_model(config.model.path))
    metrics = RolloutMetrics(registry)
    client = await stack.enter_async_context(GenerationClient(security))
    reward = await stack.enter_async_context(RewardClient(config, security=security, waits=health.waits))
    settings = WorkerSettings.from_config(config, tokenizer)
    settings = replace(settings, calls=replace(settings.calls, segment_tokens=schedule.segment_tokens))
    if config.rollout.program == "agent":
        settings = replace(settings, concurrency=0)
    name, program = instance_name(config, "rollout", index), _program(config, tokenizer, metrics)
    teachers = await open_teachers(config, stack, security, health.waits)
    deps = worker_deps(settings, name, store, client, reward, program, metrics, health, teachers=teachers)
    worker = Worker(settings, deps)
    sampler = load_sampler(config.curriculum)

    def open_prompts(on_checked: OnChecked) -> PromptSource:
        source = run_prompts(config, tokenizer, "train", on_checked)
        return source if sampler else RepeatedPrompts(source, schedule.prompt_repeats)

    def open_draws(source: PromptSource) -> PromptDraws:
        assert sampler is not None
        return PromptDraws(cast(RowSource, source), sampler, store.prompt_records, config.seed)

    leader = MeshLeader(
        store,
        schedule,
        open_prompts,
        PeriodicEvaluations(store.evaluations, config.evaluation, config.checkpoints.keep_last),
        candidate=name,
        renew_seconds=config.store.heartbeat_seconds,
        metrics=metrics,
        health=health,
        tokenizer=tokenizer.content,
        open_draws=None if sampler is None else open_draws,
        scoring_problem=lambda: deps.scorer.problem,
        refusals=RefusedPolicies(config.generator.refused_versions_limit, config.launcher.start_timeout_seconds),
        rounds=RoundRules.from_config(config, group_size=schedule.group_size, spare_members=schedule.spare_members),
    )
    # The agents service evaluates agents: they have their sessions there.
    evaluator = None if config.rollout.program == "agent" else run_evaluator(config, deps, tokenizer)
    return Replica(deps.session, worker, leader, evaluator, health)


def _program(config: RunConfig, tokenizer: Tokenizer, metrics: RolloutMetrics) -> Program:
    if config.rollout.program == "single_turn":
        return SingleTurnProgram()
    if config.rollout.program == "agent":
        return OutsideProgram()
    return EnvironmentProgram(
        environment_factory(config.rollout.environment, config.rollout.environment_options),
        tokenizer,
        stop_token_ids=tokenizer.eos_token_ids,
        max_turns=config.rollout.max_turns,
        timeout_seconds=config.rollout.environment_timeout_seconds,
        by_turn=config.trainer.algorithm.credit == "turn",
        metrics=metrics,
    )
