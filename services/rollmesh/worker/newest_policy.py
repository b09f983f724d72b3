"""The newest announced policy version, as this process knows it."""

from __future__ import annotations

import asyncio

from rollmesh.errors import StoreUnavailable
from rollmesh.runtime.logging import note_policy_version
from rollmesh.store import TrajectoryStore

_PAUSE_SECONDS = 0.5


class NewestPolicy:
    """Caches the newest version; a generator may know a newer one first, so doubts are settled by the store."""

    def __init__(self, store: TrajectoryStore) -> None:
        self._store = store
        self._newest = -1

    @property
    def newest(self) -> int:
        """Newest version seen so far; -1 before the first."""
        return self._newest

    async def refresh(self) -> None:
        """Ask the store."""
        latest = await self._store.latest_policy()
        if latest is not None:
            self._newest = max(self._newest, latest.policy_version)
            note_policy_version(self._newest)

    async def newest_at_least(self, version: int) -> int:
        """The newest version; asks the store when ``version`` is newer than what is known here, and waits for it."""
        while version > self._newest:
            try:
                await self.refresh()
                break
            except StoreUnavailable:
                await asyncio.sleep(_PAUSE_SECONDS)
        return self._newest
