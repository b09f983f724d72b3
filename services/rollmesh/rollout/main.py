"""Rollout process: a worker, a candidate for leadership, an evaluator and the admin port."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.rollout.evaluation.evaluator import Evaluator, EvaluatorDeps
from rollmesh.rollout.evaluation.periodic import PeriodicEvaluations
from rollmesh.rollout.leader import MeshLeader
from rollmesh.rollout.refused_policies import RefusedPolicies
from rollmesh.rollout.replica import Replica
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.addresses import advertised, bind_host, instance_name
from rollmesh.runtime.admin_http import admin_server
from rollmesh.runtime.endpoints import published_endpoint
from rollmesh.runtime.health import Health
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import PortSecurity
from rollmesh.scheduling import resolve_schedule, run_limits
from rollmesh.store import TrajectoryStore
from rollmesh.store.store_metrics import StoreCallMetrics
from rollmesh.tasks.environments.environment_factory import environment_factory
from rollmesh.tasks.sources.agent import AgentPrompts
from rollmesh.tasks.sources.source_factory import build_prompt_source
from rollmesh.tasks.sources.source_protocol import OnChecked, PromptSource
from rollmesh.text import Tokenizer
from rollmesh.wire.generation_client import GenerationClient
from rollmesh.wire.reward_client import RewardClient
from rollmesh.worker.build import WorkerSettings, build_worker, worker_deps
from rollmesh.worker.programs import Program, SingleTurnProgram
from rollmesh.worker.programs.environment import EnvironmentProgram
from rollmesh.worker.programs.outside import OutsideProgram


async def serve(config: RunConfig, index: int, shutdown: Shutdown) -> None:
    """Run one rollout replica until ``shutdown``; partial trajectories are saved and released before it returns.

    Raises ConfigError for an invalid run, StoreUnavailable if Redis does not answer at startup, DataError for prompts
    that cannot be opened.
    """
    metrics, health, security = Metrics("rollout"), Health(), PortSecurity.from_config(config.security)
    async with AsyncExitStack() as stack:
        admin_port = await stack.enter_async_context(
            admin_server(metrics, health, bind_host(config), config.network.admin_port, security)
        )
        stack.enter_context(
            published_endpoint(
                Path(config.folder),
                service="rollout",
                index=index,
                grpc="",
                admin=advertised(config, admin_port),
                run=config.name,
            )
        )
        observer = StoreCallMetrics(metrics)
        store = await stack.enter_async_context(
            await TrajectoryStore.connect(config.store, config.name, observer=observer)
        )
        replica = await open_replica(config, index, store, stack, metrics, health, security)
        health.set_ready(True)
        await replica.run(shutdown)
        health.set_ready(False, "shutting down")


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
    schedule = replace(
        resolve_schedule(config.schedule, config.trainer.train_steps),
        longest_trajectory_tokens=config.rollout.max_new_tokens,
        partial_save_tokens=config.rollout.partial_save_tokens,
    )
    tokenizer = Tokenizer(resolve_model(config.model.path))
    await store.limits.init_run(run_limits(config))
    metrics = RolloutMetrics(registry)
    client = await stack.enter_async_context(GenerationClient(security))
    reward = await stack.enter_async_context(RewardClient(config, security=security))
    settings = WorkerSettings.from_config(config, tokenizer)
    if config.rollout.program == "agent":
        settings = replace(settings, concurrency=0)
    name, program = instance_name(config, "rollout", index), _program(config, tokenizer, metrics)
    deps = worker_deps(settings, name, store, client, reward, program, metrics, health)
    worker = build_worker(settings, deps)
    leader = MeshLeader(
        store,
        schedule,
        lambda on_checked: _prompts(config, tokenizer, on_checked),
        PeriodicEvaluations(store.evaluations, config.evaluation, config.checkpoints.keep_last),
        candidate=name,
        renew_seconds=config.store.heartbeat_seconds,
        metrics=metrics,
        health=health,
        refusals=RefusedPolicies(config.generator.refused_versions_limit, config.launcher.start_timeout_seconds),
    )
    evaluator = Evaluator(
        EvaluatorDeps(
            store=store,
            session=deps.session,
            caller=deps.caller,
            generators=deps.generators,
            scorer=deps.scorer,
            program=program,
            open_prompts=lambda: build_prompt_source(config.data, tokenizer, config.evaluation.seed, "eval"),
            metrics=metrics,
            unserved_seconds=config.launcher.start_timeout_seconds,
        ),
        config.evaluation,
        budget=config.rollout.max_new_tokens,
        stop_token_ids=tokenizer.eos_token_ids,
    )
    return Replica(deps.session, worker, leader, evaluator, health)


def _prompts(config: RunConfig, tokenizer: Tokenizer, on_checked: OnChecked) -> PromptSource:
    is_agent = config.rollout.program == "agent"
    source = build_prompt_source(config.data, tokenizer, config.seed, keep_messages=is_agent, on_checked=on_checked)
    if not is_agent:
        return source
    return AgentPrompts(source, tokenizer, config.rollout.agent.contexts)


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
        metrics=metrics,
    )
