"""Execution of a run on this machine: initial evaluation, training, final evaluation."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

from rich.console import Console

from rollmesh.config import RunConfig
from rollmesh.errors import PoliciesRefused, StoreUnavailable
from rollmesh.launcher.closing import missing_at_the_end, queue_account
from rollmesh.launcher.evaluations import evaluate_version, finish_evaluations
from rollmesh.launcher.inline_services import Serve
from rollmesh.launcher.local_mesh import Interrupted, LocalMesh, local_mesh
from rollmesh.launcher.progress_panel import TRAINING
from rollmesh.launcher.run_folder import RunFolder, locked_run_folder
from rollmesh.launcher.supervisor import ServiceFailed
from rollmesh.report.ledger_counts import QueueAccount

_TRAINER = "trainer-0"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Result of a run."""

    folder: RunFolder
    account: QueueAccount | None
    """Final counts of the queue, for the audit; None when the user stopped the run."""


async def run_up(
    config: RunConfig, shutdown: asyncio.Event, console: Console, serve: Mapping[str, Serve] | None = None
) -> RunResult:
    """Start or continue the run of ``config``; return when training is complete or ``shutdown`` is set.

    With ``serve`` the services are these functions, run in this process.

    Raises ServiceFailed when a service exceeds the restart limit, PoliciesRefused when every generator refuses the
    newest policy, ConfigError when another launcher holds the folder.
    """
    with locked_run_folder(config) as folder:
        folder.forget_failure()
        async with _recorded_failure(folder), local_mesh(config, folder, shutdown, console, serve) as mesh:
            for change in folder.changes:
                mesh.progress.note(f"changed since the last start: {change}")
            try:
                await _train(mesh)
                account = await mesh.answer(lambda: queue_account(mesh.store), "the final counts of the queue")
                return RunResult(folder=folder, account=account)
            except Interrupted:
                mesh.progress.note("stopped; the same command continues this run")
                with contextlib.suppress(StoreUnavailable, OSError):
                    await mesh.evaluations.update()
                return RunResult(folder=folder, account=None)


@contextlib.asynccontextmanager
async def _recorded_failure(folder: RunFolder) -> AsyncIterator[None]:
    """Record a failure in the run folder, for the audit, the report and ``rollmesh status``."""
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
        mesh.progress.note(f"training to step {mesh.config.trainer.train_steps}; Ctrl-C drains without loss")
        await mesh.until(lambda: _trained(mesh), TRAINING)
        # Checked first: an evaluation waits minutes before it fails for a version that no generator serves.
        await mesh.answer(mesh.newest_served, "the generators")
        if before_and_after:
            await evaluate_version(mesh, await mesh.answer(mesh.latest_version, "the last policy version"))
        await finish_evaluations(mesh)
        await mesh.until_newest_served()


async def _trained(mesh: LocalMesh) -> bool:
    """Tell whether the trainer has exited successfully with all work complete.

    A trainer that still runs may fail later: a run that diverges at its last step announces that step first.
    """
    # Read in this order: if the trainer exits between the two reads, its work is complete.
    ended = mesh.supervisor.finished(_TRAINER)
    missing = await missing_at_the_end(mesh.store, mesh.config)
    if missing and ended:
        # Possible causes: SIGTERM by an operator, a Redis restored without its last reports, a request after its last
        # poll, a damaged newest state.
        mesh.progress.note(f"the trainer has ended before {missing}: starting it again")
        mesh.supervisor.start_again(_TRAINER)
    return ended and not missing
