"""The reward process: a pool of verifier processes behind gRPC, and the admin port."""

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace

from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.errors import RollmeshError
from rollmesh.reward.confinement import IsolationLevel
from rollmesh.reward.messages import worker_spec
from rollmesh.reward.reward_metrics import RewardMetrics
from rollmesh.reward.reward_service import SERVICE_NAME, RewardService, Scoring
from rollmesh.reward.scored_answer import InlineVerifier, Judge, RewardHandler, answer_marker, is_judge
from rollmesh.reward.worker_pool import WorkerDied, WorkerPool, WorkerTimedOut
from rollmesh.runtime.grpc import create_server
from rollmesh.runtime.lifecycle import Shutdown, wait_or_shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.service_host import service_host
from rollmesh.tasks.verifiers.verifier_protocol import BUILT_IN, AsyncVerifier, build_verifier
from rollmesh.text import Tokenizer

_BEAT_SECONDS = 2.0
_DEADLINE_SECONDS = 30.0


async def serve(config: RunConfig, index: int, shutdown: Shutdown, *, inline: bool = False) -> None:
    """Score answers until ``shutdown``, then finish the answers in progress.

    With ``inline`` a verifier of the user's code runs in this process, for a debugger.
    Raises ConfigError for a verifier that cannot be loaded or never scores an answer, RollmeshError if workers cannot
    be started any more.
    """
    failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    async with service_host(config, "reward", index) as host:
        metrics = RewardMetrics(host.metrics)
        inline = inline and config.reward.verifier not in BUILT_IN
        spec = worker_spec(config)
        if inline or is_judge(config.reward.verifier):  # it runs in this process, so the pool needs no second copy
            spec = replace(spec, default_verifier="exact", default_options={})
        pool = await host.stack.enter_async_context(
            WorkerPool(spec, config.reward.workers, metrics, lambda error: _fail(failure, error))
        )
        judges = await _open_judges(config, host.stack, inline=inline)
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
        server = create_server(host.security)
        RewardService(scoring).add_to(server)
        await host.serve_grpc(server, SERVICE_NAME)
        host.health.set_ready(True)
        host.health.watch("reward", _DEADLINE_SECONDS)
        while not await wait_or_shutdown(shutdown, _BEAT_SECONDS):
            if failure.done():
                failure.result()
            host.health.beat("reward")


async def _open_judges(config: RunConfig, stack: AsyncExitStack, *, inline: bool) -> dict[str, Judge | InlineVerifier]:
    """Build the run's verifier if it is asynchronous or runs in this process."""
    reward, tokenizer = config.reward, Tokenizer(resolve_model(config.model.path))
    marker = answer_marker(tokenizer, reward.answer_after, config.data.chat_template_kwargs)
    if not inline and not is_judge(reward.verifier):
        return {}
    verifier = build_verifier(reward.verifier, reward.options)
    judge: Judge | InlineVerifier
    if inline:
        judge = InlineVerifier(RewardHandler(tokenizer, {reward.verifier: verifier}, reward.verifier, marker))
    else:
        assert isinstance(verifier, AsyncVerifier)
        judge = Judge(reward, verifier, tokenizer, marker)
    stack.push_async_callback(judge.aclose)
    return {reward.verifier: judge}


async def _measure_isolation(pool: WorkerPool, metrics: RewardMetrics) -> None:
    try:
        level = IsolationLevel.from_report(json.loads(await pool.probe()))
    except (WorkerDied, WorkerTimedOut) as error:
        raise RollmeshError(f"reward: a worker process failed at startup: {error}") from error
    metrics.isolated(level.properties())
    get_logger("reward").info("isolation_measured", isolation=str(level), note="no security boundary")
    if "python_code" not in pool.timeout_means_wrong:
        return
    if not level.code.available:
        get_logger("reward").warning("code_cannot_run", message="no answer in Python can be scored on this machine")
    elif remaining := level.code.remaining():
        get_logger("reward").warning("code_is_confined_in_part", code_can="; ".join(remaining))


def _fail(failure: asyncio.Future[None], error: BaseException) -> None:
    if not failure.done():
        wrapped = error if isinstance(error, RollmeshError) else RollmeshError(f"reward: the pool failed: {error!r}")
        failure.set_exception(wrapped)
        failure.exception()  # no warning if the loop above ends before it reads the failure
