"""The end of a run: audit and report, from the run folder and the queue at rest."""

from __future__ import annotations

import asyncio

from rich.console import Console

from rollmesh.config import RunConfig
from rollmesh.launcher.redis import running_store
from rollmesh.launcher.up import RunResult
from rollmesh.report.audit import audit_run
from rollmesh.report.html import write_report
from rollmesh.report.ledger import QueueAccount
from rollmesh.store import TrajectoryStore


async def close_run(config: RunConfig, result: RunResult, console: Console) -> bool:
    """Audit a finished run and write its report; returns whether the audit is green (True for a stopped run)."""
    if not result.finished:
        await asyncio.to_thread(write_report, result.folder.path)
        return True
    async with running_store(config, result.folder) as running:
        account = await queue_account(running.store)
    console.print("auditing: every token against the checkpoint it names", highlight=False)
    audit = await asyncio.to_thread(audit_run, result.folder.path, account, console)
    await asyncio.to_thread(write_report, result.folder.path)
    return audit.green


async def queue_account(store: TrajectoryStore) -> QueueAccount:
    """What the queue still holds and what it dropped, for the audit's count of lost groups."""
    return QueueAccount(
        live=await store.live_groups(),
        dropped=await store.dropped_groups(),
        cursor=await store.cursor(),
        policies=tuple(await store.policies()),
    )
