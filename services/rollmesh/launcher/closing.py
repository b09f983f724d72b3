"""The end of a run: audit and report, from the run folder and what the queue knew at rest."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from rollmesh.report.audit import audit_run
from rollmesh.report.html import write_report
from rollmesh.report.ledger import QueueAccount
from rollmesh.store import TrajectoryStore


def close_run(folder: Path, account: QueueAccount | None, console: Console) -> bool:
    """Write the report, after the audit of a finished run (one with an account); returns whether the audit is green.

    A stopped run is not audited, and nothing is wrong with it: True. Blocking, outside any event loop, so that Ctrl-C
    ends it.
    """
    green = True
    if account is not None:
        console.print("auditing: every token against the checkpoint it names", highlight=False)
        green = audit_run(folder, account, console).green
    write_report(folder)
    return green


async def queue_account(store: TrajectoryStore) -> QueueAccount:
    """What the queue still holds and what it dropped, for the audit's count of lost groups.

    The cursor is read first and the drops last, so that of a run that goes on nothing seems lost: what was admitted by
    the first look is live in a later one, dropped by the last one, or in a batch file.
    """
    cursor = await store.cursor()
    live = await store.live_groups()
    return QueueAccount(
        cursor=cursor,
        live=live,
        dropped=await store.dropped_groups(),
        policies=tuple(await store.policies()),
    )
