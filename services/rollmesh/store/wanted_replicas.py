"""Requested replicas of each service: written by operators, applied by a launcher."""

from __future__ import annotations

from collections.abc import Mapping

from rollmesh.config.replica_bounds import check_replicas
from rollmesh.store.operator_settings import Settings
from rollmesh.store.redis_connection import Connection

_SCALER_SECONDS = 15
"""Time after which a launcher that has not read the requests counts as stopped."""


class Scaling:
    """Requested replicas by service; a service without a request has the number of the run file."""

    def __init__(self, connection: Connection, settings: Settings) -> None:
        self._connection = connection
        self._settings = settings
        self._requests = connection.keys.single("scale")
        self._scaler = connection.keys.single("scaler")

    async def request(self, service: str, replicas: int | None) -> bool:
        """Request a number of replicas of a service; None removes the request and restores the run file's number.

        Returns True when a running launcher applies the request. On Kubernetes the cluster sets the replicas, and a
        stopped run applies the request at its next start. Raises ConfigError for the trainer, an unknown service, or a
        number out of bounds. The newest request counts; repeats are no-ops.
        """
        check_replicas(service, 1 if replicas is None else replicas)
        await self._settings.write(f"scale:{service}", "" if replicas is None else replicas)
        return bool(await self._connection.command("EXISTS", self._scaler))

    async def requests(self) -> Mapping[str, int]:
        """Return the requested replicas by service; services without a request are absent."""
        raw = await self._connection.command("HGETALL", self._requests)
        return {service.decode(): int(replicas) for service, replicas in raw.items()}

    async def take(self, launcher: str) -> Mapping[str, int]:
        """Return ``requests`` and register the launcher for 15 s as the one that applies them."""
        raw, _ = await self._connection.commands(
            [("HGETALL", self._requests), ("SET", self._scaler, launcher, "EX", _SCALER_SECONDS)], "scale_requests"
        )
        return {service.decode(): int(replicas) for service, replicas in raw.items()}

    async def leave(self) -> None:
        """Unregister the launcher before it stops."""
        await self._connection.command("DEL", self._scaler)
