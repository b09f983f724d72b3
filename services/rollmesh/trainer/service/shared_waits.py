"""Report of what the trainer waits for, in the queue: a page in another pod cannot ask the trainer itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollmesh.errors import StoreUnavailable
from rollmesh.runtime.health import Waits
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.store import TrajectoryStore

_POLL_SECONDS = 1.0


@asynccontextmanager
async def shared_waits(store: TrajectoryStore, waits: Waits) -> AsyncIterator[None]:
    """Write every change of ``waits`` to the queue within the block."""
    sharing = asyncio.create_task(_share(store, waits), name="share-waits")
    try:
        yield
    finally:
        await cancel_and_wait(sharing)


async def _share(store: TrajectoryStore, waits: Waits) -> None:
    shown: str | None = None  # an earlier trainer may have left a text
    while True:
        if (text := waits.text()) != shown:
            with contextlib.suppress(StoreUnavailable):
                await store.training.show_waits(text)
                shown = text
        await asyncio.sleep(_POLL_SECONDS)
