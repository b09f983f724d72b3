"""Operator requests to continue from an older policy; the trainer rolls back between two train steps."""

from __future__ import annotations

import secrets

from rollmesh.store.operator_settings import Settings
from rollmesh.store.queue_types import RollbackRequest
from rollmesh.store.redis_connection import Connection


class Rollbacks:
    """The pending rollback request of a run."""

    def __init__(self, connection: Connection, settings: Settings) -> None:
        self._connection = connection
        self._settings = settings

    async def request(self, version: int) -> RollbackRequest:
        """Ask the trainer to continue from this policy; raises Conflict when it was never announced."""
        request = RollbackRequest(request_id=secrets.token_hex(8), policy_version=version)
        number = await self._connection.run("request_rollback", request.request_id, version)
        self._settings.note("rollback", number, f"{request.request_id} {version}")
        return request

    async def pending(self) -> RollbackRequest | None:
        """Return the pending request; None without one."""
        meta = self._connection.keys.single("meta")
        request_id, version = await self._connection.command("HMGET", meta, "rollback_id", "rollback_version")
        if request_id is None:
            return None
        return RollbackRequest(request_id=request_id.decode(), policy_version=int(version))

    async def finish(self, trainer_session: str, request: RollbackRequest) -> None:
        """Remove a request that has been completed or rejected; idempotent."""
        number = await self._connection.run("finish_rollback", trainer_session, request.request_id)
        self._settings.note("rollback", number, "")
