"""A run from start to report: processes, evaluation before, training, evaluation after, audit, report."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import httpx
from rich.console import Console

from rollmesh.config import RunConfig
from rollmesh.errors import RollmeshError
from rollmesh.launcher.evaluations import collect_evaluations, evaluate_version
from rollmesh.launcher.progress import RunProgress
from rollmesh.launcher.redis import running_store
from rollmesh.launcher.run_folder import RunFolder, locked_run_folder
from rollmesh.launcher.sampler import MeshSampler
from rollmesh.launcher.services import STOP_ORDER, child_environment, service_specs
from rollmesh.launcher.supervisor import ServiceFailed, Supervisor
from rollmesh.store import TrajectoryStore

_SAMPLE_SECONDS = 1.0
_START_DEADLINE_SECONDS = 300.0


class Interrupted(RollmeshError):
    """Ctrl-C or SIGTERM ended the run early; a second start continues it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended."""

    folder: RunFolder
    trained_step: int
    finished: bool
    """False when a person stopped it."""
    restarts: dict[str, int]


@dataclass(slots=True)
class _Run:
    """The parts of a run in progress."""

    config: RunConfig
    folder: RunFolder
    store: TrajectoryStore
    supervisor: Supervisor
    sampler: MeshSampler
    progress: RunProgress
    shutdown: asyncio.Event
    redis_url: str


async def run_up(config: RunConfig, shutdown: asyncio.Event, console: Console) -> RunResult:
    """Start or continue the run of ``config`` and return when it is trained, or stopped by ``shutdown``.

    Raises ServiceFailed when a service cannot be kept up, ConfigError when another launcher holds the folder.
    """
    with locked_run_folder(config) as folder:
        async with running_store(config, folder, owner=True) as store, httpx.AsyncClient() as client:
            progress = RunProgress(
                console, train_steps=config.trainer.train_steps, metrics=folder.metrics, samples=folder.samples
            )
            run = _Run(
                config=config,
                folder=folder,
                store=store,
                supervisor=Supervisor(config.launcher.restart_limit),
                sampler=MeshSampler(store, folder, client),
                progress=progress,
                shutdown=shutdown,
                redis_url=store.url,
            )
            with progress:
                return await _drive(run)


async def _drive(run: _Run) -> RunResult:
    finished = True
    try:
        async with _processes(run):
            await _until(run, _policy_announced, "the trainer to publish the initial policy", _START_DEADLINE_SECONDS)
            await _until(run, _generator_serves, "a generator that serves", _START_DEADLINE_SECONDS)
            await _evaluate_idle(run, version=0)
            await run.store.set_user_paused(False)
            run.progress.note(f"training to step {run.config.trainer.train_steps}; Ctrl-C drains and keeps everything")
            await _until(run, _trained, "training", None)
            await _evaluate_idle(run, version=(await _latest_version(run)))
    except Interrupted:
        finished = False
        run.progress.note("stopped; the same command continues this run")
    await collect_evaluations(run.store, run.folder)
    view = await run.store.view()
    return RunResult(
        folder=run.folder,
        trained_step=view.trained_step,
        finished=finished,
        restarts=run.supervisor.restart_counts(),
    )


@contextlib.asynccontextmanager
async def _processes(run: _Run) -> AsyncIterator[None]:
    """All service processes, stopped in order at the end, whatever ended it."""
    environment = child_environment(run.config, run.folder, run.redis_url)
    if run.config.evaluation.before_and_after and not await _evaluated(run, 0):
        await run.store.set_user_paused(True)
    for spec in service_specs(run.config, run.folder, environment):
        run.supervisor.start(spec)
    run.progress.note(f"services started, logs in {run.folder.logs}")
    try:
        yield
    finally:
        run.progress.note("draining services")
        try:
            await run.supervisor.stop(STOP_ORDER)
        finally:
            await run.supervisor.kill_all()


async def _until(
    run: _Run, done: Callable[[_Run], Awaitable[bool]], waiting_for: str, deadline_seconds: float | None
) -> None:
    """Show progress until ``done``; ends early on shutdown, on a failed service or at the deadline."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    while not await done(run):
        if run.supervisor.failed.done():
            raise ServiceFailed(run.supervisor.failed.result())
        if deadline_seconds is not None and loop.time() - start > deadline_seconds:
            raise ServiceFailed(f"waited {deadline_seconds:.0f} s for {waiting_for}; see {run.folder.logs}")
        if run.shutdown.is_set():
            raise Interrupted
        failure = await run.store.failure()
        if failure:
            raise ServiceFailed(failure)
        run.progress.update(await run.sampler.sample(), waiting_for)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(run.shutdown.wait(), _SAMPLE_SECONDS)


async def _evaluate_idle(run: _Run, version: int) -> None:
    """Evaluate ``version`` while nothing else runs, unless that was done in an earlier start."""
    if not run.config.evaluation.before_and_after or await _evaluated(run, version):
        return
    await run.store.set_user_paused(True)
    await _until(run, _idle, "rollouts in flight to come to rest", None)
    request = await evaluate_version(run.store, run.config, version)

    async def answered(run: _Run) -> bool:
        return await run.store.evaluation(request) is not None

    await _until(run, answered, f"the evaluation of policy version {version}", None)
    result = await run.store.evaluation(request)
    await collect_evaluations(run.store, run.folder)
    if result is not None:
        run.progress.note(
            f"policy version {version}: accuracy {result.mean:.3f} ± {result.standard_error:.3f} (n={result.n})"
        )


async def _evaluated(run: _Run, version: int) -> bool:
    return any(e.policy_version == version for e in await run.store.evaluations())


async def _latest_version(run: _Run) -> int:
    policy = await run.store.latest_policy()
    return -1 if policy is None else policy.policy_version


async def _policy_announced(run: _Run) -> bool:
    return await _latest_version(run) >= 0


async def _generator_serves(run: _Run) -> bool:
    return any(g.serving for g in await run.store.generators())


async def _trained(run: _Run) -> bool:
    view = await run.store.view()
    return view.trained_enough and view.policy_train_step >= run.config.trainer.train_steps


async def _idle(run: _Run) -> bool:
    view = await run.store.view()
    return view.leased == 0
