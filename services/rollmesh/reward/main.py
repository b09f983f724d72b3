"""The reward process: a pool of verifier processes behind gRPC, and the admin port."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path

from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.errors import RollmeshError
from rollmesh.reward.judges import Judge, build_judge
from rollmesh.reward.pool.isolation import IsolationLevel
from rollmesh.reward.pool.worker_connection import WorkerDied, WorkerTimedOut
from rollmesh.reward.pool.worker_pool import WorkerPool
from rollmesh.reward.pool.worker_spec import worker_spec
from rollmesh.reward.reward_metrics import RewardMetrics
from rollmesh.reward.reward_service import SERVICE_NAME, RewardService
from rollmesh.reward.scoring import Scoring
from rollmesh.runtime.addresses import advertised, bind_host, host_port
from rollmesh.runtime.admin_http import admin_server
from rollmesh.runtime.endpoints import published_endpoint
from rollmesh.runtime.grpc import HealthReporter, create_server
from rollmesh.runtime.health import Health
from rollmesh.runtime.lifecycle import Shutdown, wait_or_shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import PortSecurity
from rollmesh.text import Tokenizer

_BEAT_SECONDS = 2.0
_DEADLINE_SECONDS = 30.0


async def serve(config: RunConfig, index: int, shutdown: Shutdown) -> None:
    """Score answers until ``shutdown``, then finish the answers in progress.

    Raises ConfigError for a verifier that cannot be loaded or never scores an answer, RollmeshError if workers cannot
    be started any more.
    """
    host, security = bind_host(config), PortSecurity.from_config(config.security)
    registry, health = Metrics("reward"), Health()
    metrics = RewardMetrics(registry)
    failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    async with AsyncExitStack() as stack:
        admin_port = await stack.enter_async_context(
            admin_server(registry, health, host, config.network.admin_port, security)
        )
        spec = worker_spec(config)
        pool = await stack.enter_async_context(
            WorkerPool(spec, config.reward.workers, metrics, lambda error: _fail(failure, error))
        )
        judges = await _open_judges(config, stack)
        metrics.workers.set(config.reward.workers)
        metrics.expect([*pool.timeout_means_wrong, *judges, "unknown"])
        await _measure_isolation(pool, metrics)
        scoring = Scoring(
            pool,
            judges,
            metrics,
            default_verifier=config.reward.verifier,
            timeout_seconds=config.reward.timeout_seconds,
            # With reward.on_error=fixed every failure has a value, so a verifier that always fails is accepted too.
            on_unusable_verifier=lambda error: None if config.reward.on_error == "fixed" else _fail(failure, error),
        )
        server = create_server(security)
        RewardService(scoring).add_to(server)
        reporter = HealthReporter(server, SERVICE_NAME)
        address = advertised(config, security.bind(server, host_port(host, config.network.grpc_port)))
        await server.start()
        stack.push_async_callback(server.stop, config.generator.drain_timeout_seconds)
        admin = advertised(config, admin_port)
        with published_endpoint(
            Path(config.folder), service="reward", index=index, grpc=address, admin=admin, run=config.name
        ):
            await reporter.set_serving(True)
            health.set_ready(True)
            await _until_shutdown(shutdown, failure, health)
        health.set_ready(False, "shutting down")
        await reporter.set_serving(False)


async def _open_judges(config: RunConfig, stack: AsyncExitStack) -> dict[str, Judge]:
    """Build the run's verifier if it is asynchronous."""
    tokenizer = Tokenizer(resolve_model(config.model.path))
    judge = build_judge(config.reward.verifier, config.reward.options, tokenizer, config.reward.timeout_seconds)
    if judge is None:
        return {}
    stack.push_async_callback(judge.aclose)
    return {config.reward.verifier: judge}


async def _measure_isolation(pool: WorkerPool, metrics: RewardMetrics) -> None:
    try:
        level = IsolationLevel.from_report(json.loads(await pool.probe()))
    except (WorkerDied, WorkerTimedOut) as error:
        raise RollmeshError(f"reward: a worker process failed at startup: {error}") from error
    metrics.isolated(level)
    get_logger("reward").info("isolation_measured", isolation=str(level), note="no security boundary")
    if "python_code" not in pool.timeout_means_wrong:
        return
    if not level.code.available:
        get_logger("reward").warning("code_cannot_run", message="no answer in Python can be scored on this machine")
    elif remaining := level.code.remaining():
        get_logger("reward").warning("code_is_confined_in_part", code_can="; ".join(remaining))


async def _until_shutdown(shutdown: Shutdown, failure: asyncio.Future[None], health: Health) -> None:
    health.watch("reward", _DEADLINE_SECONDS)
    while not await wait_or_shutdown(shutdown, _BEAT_SECONDS):
        if failure.done():
            failure.result()
        health.beat("reward")


def _fail(failure: asyncio.Future[None], error: BaseException) -> None:
    if not failure.done():
        wrapped = error if isinstance(error, RollmeshError) else RollmeshError(f"reward: the pool failed: {error!r}")
        failure.set_exception(wrapped)
        failure.exception()  # no warning if the loop above ends before it reads the failure
