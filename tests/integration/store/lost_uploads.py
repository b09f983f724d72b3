"""A Redis that has forgotten an upload when the script comes that needs it."""

from __future__ import annotations

from typing import Any

from rollmesh.store import TrajectoryStore
from rollmesh.store.scripts import UploadExpired

from .dump import changed, dump


class Forgetful:
    """Redis as it is after a kill between the uploads and the script, once: the upload in question is gone."""

    def __init__(self, store: TrajectoryStore, script: str, upload: str) -> None:
        self.store, self.script, self.upload = store, script, upload
        self.refused = 0
        self._run = store.connection.run
        store.connection.run = self.run  # type: ignore[method-assign,assignment]

    async def run(self, name: str, *arguments: Any) -> Any:
        if name != self.script:
            return await self._run(name, *arguments)
        command = self.store.connection.command
        lost = [key for key in await command("KEYS", self.upload) if await command("TTL", key) != -1]
        assert len(lost) == 1
        await command("DEL", *lost)
        before = await dump(self.store)
        try:
            return await self._run(name, *arguments)
        except UploadExpired:
            self.refused += 1
            self.store.connection.run = self._run  # type: ignore[method-assign]
            assert changed(before, await dump(self.store)) == []
            raise
