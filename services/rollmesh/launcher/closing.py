"""End of a run: audit and report, from the run folder and the final counts of the queue."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rich.console import Console

from rollmesh.checkpoints.location import open_checkpoints
from rollmesh.config import RunConfig
from rollmesh.errors import CheckpointError
from rollmesh.report.audit import audit_run
from rollmesh.report.html import write_report
from rollmesh.report.ledger_counts import QueueAccount
from rollmesh.store import TrajectoryStore


def close_run(folder: Path, account: QueueAccount | None, console: Console) -> bool:
    """Audit a finished run (one with an account), write its report, and return True if the audit ``is_accepted``.

    A stopped run is not audited and returns True. The call blocks and runs outside any event loop, so that Ctrl-C ends
    it.
    """
    accepted = True
    if account is not None:
        console.print("auditing: every token against the checkpoint it names", highlight=False)
        accepted = audit_run(folder, account, console).is_accepted
    console.print("writing the report", highlight=False)
    write_report(folder)
    return accepted


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


async def missing_at_the_end(store: TrajectoryStore, config: RunConfig) -> str:
    """Name the next event that the run still lacks before it can be closed; empty when the run is complete.

    The state in Redis is not sufficient: the audit reads the trainer state of the last step from disk.
    """
    view, steps = await store.mesh.view(groups=False), config.trainer.train_steps
    if not view.is_complete or view.policy_train_step < steps:
        return "the last step was announced"
    if await store.rollbacks.pending() is not None:
        return "a rollback was carried out"
    if await asyncio.to_thread(_committed_on_disk, config) < steps:
        return "the trainer state of the last step was on disk"
    return ""


def _committed_on_disk(config: RunConfig) -> int:
    """Return the train step of the newest trainer state; -1 without a state or while the storage is unreachable."""
    try:
        state = open_checkpoints(config).latest_committed()
    except CheckpointError as error:
        if not error.outside:
            raise
        return -1
    return -1 if state is None else state.train_step
