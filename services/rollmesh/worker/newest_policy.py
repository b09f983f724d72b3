"""Cache of the newest announced policy version."""

from __future__ import annotations

import asyncio

from rollmesh.errors import StoreUnavailable
from rollmesh.runtime.logging import note_policy_version
from rollmesh.store.policy_registry import PolicyRegistry

_PAUSE_SECONDS = 0.5


class NewestPolicy:
    """Newest announced version seen by this process; a generator may serve a newer one before this process reads it."""

    def __init__(self, registry: PolicyRegistry) -> None:
        self._registry = registry
        self._newest = -1

    @property
    def newest(self) -> int:
        """Newest version read so far; -1 before the first."""
        return self._newest

    async def refresh(self) -> None:
        """Read the newest version from the store."""
        latest = await self._registry.latest()
        if latest is not None:
            self._newest = max(self._newest, latest.policy_version)
            note_policy_version(self._newest)

    async def newest_at_least(self, version: int) -> int:
        """Return the newest version; if ``version`` is newer than the cached one, read the store first.

        Retries until the store answers.
        """
        while version > self._newest:
            try:
                await self.refresh()
                break
            except StoreUnavailable:
                await asyncio.sleep(_PAUSE_SECONDS)
        return self._newest
