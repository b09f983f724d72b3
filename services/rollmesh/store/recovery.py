"""Recovery of the queue after a crash of the server."""

from __future__ import annotations

from rollmesh.store.redis_connection import Connection


class Recovery:
    """Restarts of the server and the recovery that follows each unclean one."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def server_run_id(self) -> str:
        """Return the current run_id of the server."""
        info = await self._connection.command("INFO", "server")
        return str(info["run_id"])

    async def begin(self) -> bool:
        """Open a recovery when the server is a new one; returns True while a recovery is in progress.

        Every fenced script does the same; this call does it immediately.
        """
        recovering, _ = await self._connection.run("begin_recovery")
        return bool(recovering)

    async def waits_for_trainer(self) -> bool:
        """Do as ``begin``; returns True if the recovery in progress ends only after a trainer has re-asserted its step.

        The session of a killed trainer stays open until the next one opens, so nothing is reaped before.
        """
        if not await self.begin():
            return False
        meta = self._connection.keys.single("meta")
        trainer, reasserted = await self._connection.command("HMGET", meta, "trainer", "reasserted")
        return trainer is not None and reasserted != b"1"

    async def mark_clean_shutdown(self) -> None:
        """Announce a clean stop of the server, after all clients have stopped; its next start needs no recovery."""
        await self._connection.run("mark_clean")
