"""Lists of trained trajectories by train step, from the archive."""

from __future__ import annotations

import asyncio

from rollmesh.errors import CheckpointError
from rollmesh.gateway.archive import Archive
from rollmesh.gateway.batch_rows import batch_page
from rollmesh.gateway.models.batch_pages import BatchList, BatchOrder, BatchPage
from rollmesh.gateway.token_runs import Pieces
from rollmesh.runtime.request_guard import NotFound


class BatchLists:
    """Lists of the batch files of one run."""

    def __init__(self, archive: Archive, pieces: Pieces | None) -> None:
        self._archive = archive
        self._pieces = pieces

    async def steps(self) -> BatchList:
        """Return the train steps that have a batch file, newest first."""
        return BatchList(train_steps=list(reversed(await self._archive.steps())))

    async def page(self, train_step: int, order: BatchOrder, descending: bool, first: int, limit: int) -> BatchPage:
        """Return some trajectories of one batch file; NotFound without a readable file."""
        try:
            rows = await self._archive.rows(train_step)
        except CheckpointError as error:
            raise NotFound(f"the batch file of step {train_step} cannot be read: {error}") from error
        if rows is None:
            raise NotFound(
                f"step {train_step} has no batch file here", field="train_step", hint="GET /api/v1/batches lists them"
            )
        # Decode in a thread: the previews of hundreds of rows take a while.
        return await asyncio.to_thread(batch_page, train_step, rows, order, descending, first, limit, self._pieces)
