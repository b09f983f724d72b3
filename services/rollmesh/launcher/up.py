"""A run on this machine: evaluation before, training with its evaluations, evaluation after."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from rich.console import Console

from rollmesh.config import RunConfig
from rollmesh.errors import PoliciesRefused, StoreUnavailable
from rollmesh.launcher.closing import missing_at_the_end, queue_account
from rollmesh.launcher.evaluating import evaluate_version, finish_evaluations
from rollmesh.launcher.local_mesh import Interrupted, LocalMesh, local_mesh
from rollmesh.launcher.run_folder import RunFolder, locked_run_folder
from rollmesh.launcher.supervisor import ServiceFailed
from rollmesh.report.ledger_counts import QueueAccount

_TRAINER = "trainer-0"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended."""

    folder: RunFolder
    account: QueueAccount | None
    """What the queue knows at the end, for the audit; None when a person stopped the run."""


async def run_up(config: RunConfig, shutdown: asyncio.Event, console: Console) -> RunResult:
    """Start or continue the run of ``config``; returns when it is trained, or stopped by ``shutdown``.

    Raises ServiceFailed when a service cannot be kept up, PoliciesRefused when no generator serves what was trained,
    ConfigError when another launcher holds the folder.
    """
    with locked_run_folder(config) as folder:
        folder.forget_failure()
        async with _failure_noted(folder), local_mesh(config, folder, shutdown, console) as mesh:
            try:
                await _train(mesh)
                account = await mesh.answer(lambda: queue_account(mesh.store, config), "the queue's account of the run")
                return RunResult(folder=folder, account=account)
            except Interrupted:
                mesh.progress.note("stopped; the same command continues this run")
                with contextlib.suppress(StoreUnavailable, OSError):
                    await mesh.evaluations.update()
                return RunResult(folder=folder, account=None)


@contextlib.asynccontextmanager
async def _failure_noted(folder: RunFolder) -> AsyncIterator[None]:
    """Write a failure of the run into its folder, for the audit, the report and ``rollmesh status``."""
    try:
        yield
    except (PoliciesRefused, ServiceFailed) as error:
        folder.note_failure(str(error))
        raise


async def _train(mesh: LocalMesh) -> None:
    before_and_after = mesh.config.evaluation.before_and_after
    if before_and_after and await mesh.answer(lambda: mesh.evaluations.finished(0), "the store") is None:
        await mesh.pause(True)
    async with mesh.services():
        await mesh.until_serving()
        if before_and_after:
            await evaluate_version(mesh, 0)
        await mesh.pause(False)
        mesh.progress.note(f"training to step {mesh.config.trainer.train_steps}; Ctrl-C drains and keeps everything")
        await mesh.until(lambda: _trained(mesh), "the last train step")
        # Before the evaluation, which waits for minutes until it gives up a version that no generator serves.
        await mesh.answer(mesh.newest_served, "the generators")
        if before_and_after:
            await evaluate_version(mesh, await mesh.answer(mesh.latest_version, "the last policy version"))
        await finish_evaluations(mesh)
        await mesh.until_newest_served()


async def _trained(mesh: LocalMesh) -> bool:
    """Tell whether the trainer has ended well and left nothing to do.

    One that still runs may yet end with an error: a run that diverges at its last step announces that step first.
    """
    # In this order: a trainer that ends between the two looks has done its work.
    ended = mesh.supervisor.finished(_TRAINER)
    missing = await missing_at_the_end(mesh.store, mesh.config)
    if missing and ended:
        # An operator sent it SIGTERM, Redis came back without its last reports, the request came after its last look,
        # or its newest state was damaged.
        mesh.progress.note(f"the trainer has ended before {missing}: starting it again")
        mesh.supervisor.start_again(_TRAINER)
    return ended and not missing
