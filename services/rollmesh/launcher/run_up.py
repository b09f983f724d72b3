"""A run on this machine from its start to its report: initial evaluation, training, final evaluation, audit."""

import asyncio
import contextlib
import importlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

from rich.console import Console

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.config import RunConfig
from rollmesh.errors import CheckpointError, PoliciesRefused, StoreUnavailable
from rollmesh.launcher.evaluations import evaluate_version, finish_evaluations
from rollmesh.launcher.inline_services import Serve
from rollmesh.launcher.local_mesh import Interrupted, LocalMesh, local_mesh
from rollmesh.launcher.progress_panel import TRAINING
from rollmesh.launcher.run_folder import RunFolder, locked_run_folder
from rollmesh.launcher.supervisor import ServiceFailed
from rollmesh.report.ledger_check import QueueAccount
from rollmesh.report.recorded_run import FAILURE_FILE
from rollmesh.runtime.lifecycle import many_imports
from rollmesh.store import TrajectoryStore

_TRAINER = "trainer-0"


async def run_up(
    config: RunConfig, shutdown: asyncio.Event, console: Console, serve: Mapping[str, Serve] | None = None
) -> QueueAccount | None:
    """Start or continue the run of ``config``; return when training is complete or ``shutdown`` is set.

    Returns the final counts of the queue, for the audit; None when the user stopped the run. With ``serve`` the
    services are these functions, run in this process.

    Raises ServiceFailed when a service exceeds the restart limit, PoliciesRefused when every generator refuses the
    newest policy, ConfigError when another launcher holds the folder.
    """
    with locked_run_folder(config) as folder:
        (folder.path / FAILURE_FILE).unlink(missing_ok=True)
        async with _recorded_failure(folder), local_mesh(config, folder, shutdown, console, serve) as mesh:
            for change in folder.changes:
                mesh.progress.note(f"changed since the last start: {change}")
            try:
                await _train(mesh)
                return await mesh.answer(lambda: queue_account(mesh.store), "the final counts of the queue")
            except Interrupted:
                mesh.progress.note("stopped; the same command continues this run")
                with contextlib.suppress(StoreUnavailable, OSError):
                    await mesh.evaluations.update()
                return None


@contextlib.asynccontextmanager
async def _recorded_failure(folder: RunFolder) -> AsyncIterator[None]:
    """Record a failure in the run folder, for the audit, the report and ``rollmesh status``."""
    try:
        yield
    except (PoliciesRefused, ServiceFailed) as error:
        note = json.dumps({"time": time.time(), "message": str(error)})
        with contextlib.suppress(OSError):  # such as a full disk
            (folder.path / FAILURE_FILE).write_text(note, encoding="utf-8")
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
        # The seconds of these imports pass while the last evaluation and the drain leave the launcher idle.
        imports = asyncio.create_task(asyncio.to_thread(_import_closing), name="import-closing")
        # Checked first: an evaluation waits minutes before it fails for a version that no generator serves.
        await mesh.answer(mesh.newest_served, "the generators")
        if before_and_after:
            await evaluate_version(mesh, await mesh.answer(mesh.latest_version, "the last policy version"))
        await finish_evaluations(mesh)
        await mesh.until_newest_served()
    await imports


async def _trained(mesh: LocalMesh) -> bool:
    """Tell whether the trainer has exited successfully with all work complete.

    A trainer that still runs may fail later: a run that diverges at its last step announces that step first.
    """
    # Read in this order: if the trainer exits between the two reads, its work is complete.
    ended = mesh.supervisor.finished(_TRAINER)
    missing = await _missing_at_the_end(mesh.store, mesh.config)
    if missing and ended:
        # Possible causes: SIGTERM by an operator, a Redis restored without its last reports, a request after its last
        # poll, a damaged newest state.
        mesh.progress.note(f"the trainer has ended before {missing}: starting it again")
        mesh.supervisor.start_again(_TRAINER)
    return ended and not missing


async def _missing_at_the_end(store: TrajectoryStore, config: RunConfig) -> str:
    """Name the next event that the run still lacks before it can be closed; empty when the run is complete.

    The state in Redis is not sufficient: the audit reads the trainer state of the last step from disk.
    """
    view, steps = await store.mesh.view(groups=False), config.trainer.train_steps
    if not view.is_complete or view.policy_train_step < steps:
        return "the last step was announced"
    if await store.rollbacks.pending() is not None:
        return "a rollback was carried out"
    try:
        state = await asyncio.to_thread(lambda: open_checkpoints(config).latest_committed())
    except CheckpointError as error:
        if not error.outside:  # the storage is reachable
            raise
        state = None
    return "the trainer state of the last step was on disk" if state is None or state.train_step < steps else ""


async def queue_account(store: TrajectoryStore) -> QueueAccount:
    """Read the live and the dropped groups of the queue, for the audit's count of lost groups.

    Cursor and dead letters are read first and the drops last, so that no group of a run in progress seems lost: a group
    admitted before the first read is live in a later read, dropped in the last one, or in a batch file.
    """
    cursor = await store.leadership.cursor()
    letters = await store.dead_letters.newest()
    live = await store.mesh.live_groups()
    return QueueAccount(
        cursor=cursor,
        replays=tuple(letter.replayed_as for letter in reversed(letters) if letter.replayed_as),
        epoch_size=await store.leadership.epoch_size(),
        live=live,
        dropped=await store.ledger.dropped_groups(),
        forgotten_drops=await store.ledger.forgotten_drops(),
        policies=tuple(await store.policies.announced()),
    )


def _import_closing() -> None:
    """Import torch, the trainer's models and those of the page for ``close_run``; the start of a run needs none."""
    with many_imports():
        importlib.import_module("rollmesh.report.report_file")
        importlib.import_module("rollmesh.trainer.learner.policy_scorer")


def close_run(folder: Path, account: QueueAccount | None, console: Console) -> bool:
    """Audit a finished run (one with an account), write its report, and return True if the audit ``is_accepted``.

    A stopped run is not audited and returns True. The call blocks and runs outside any event loop, so that Ctrl-C ends
    it.
    """
    from rollmesh.report.audit import audit_run
    from rollmesh.report.report_file import write_report

    accepted = True
    if account is not None:
        console.print("auditing: every token against the checkpoint it names", highlight=False)
        accepted = audit_run(folder, account, console).is_accepted
    console.print("writing the report", highlight=False)
    write_report(folder)
    return accepted
