"""How many replicas of each service are wanted: written by people and the autoscaler, carried out by a launcher."""

from __future__ import annotations

from collections.abc import Mapping

from rollmesh.config.replica_bounds import check_replicas
from rollmesh.store.operator_settings import Settings
from rollmesh.store.redis_connection import Connection

_SCALER_SECONDS = 15
"""A launcher that has not looked for so long carries nothing out."""


class Scaling:
    """Wanted replicas by service; a service without a wish has the run file's number."""

    def __init__(self, connection: Connection, settings: Settings) -> None:
        self._connection = connection
        self._settings = settings
        self._requests = connection.keys.single("scale")
        self._scaler = connection.keys.single("scaler")

    async def request_scale(self, service: str, replicas: int | None) -> bool:
        """Ask for so many replicas of a service; None takes the wish back, and the run file's number holds again.

        Returns whether a launcher runs that carries it out: on Kubernetes replicas are the cluster's to set, and a run
        at rest follows the wish when it is next started. ConfigError for the trainer, an unknown service, or a number
        out of bounds. The newest wish wins; asking twice is asking once.
        """
        check_replicas(service, 1 if replicas is None else replicas)
        await self._settings.write(f"scale:{service}", "" if replicas is None else replicas)
        return bool(await self._connection.command("EXISTS", self._scaler))

    async def scale_requests(self) -> Mapping[str, int]:
        """Wanted replicas by service; services that nobody has scaled are absent."""
        raw = await self._connection.command("HGETALL", self._requests)
        return {service.decode(): int(replicas) for service, replicas in raw.items()}

    async def take_scale_requests(self, launcher: str) -> Mapping[str, int]:
        """``scale_requests``, for a launcher that carries them out: says for a while that one does."""
        raw, _ = await self._connection.commands(
            [("HGETALL", self._requests), ("SET", self._scaler, launcher, "EX", _SCALER_SECONDS)], "scale_requests"
        )
        return {service.decode(): int(replicas) for service, replicas in raw.items()}

    async def leave_scaling(self) -> None:
        """Nobody carries wishes out from now on: the launcher stops."""
        await self._connection.command("DEL", self._scaler)
