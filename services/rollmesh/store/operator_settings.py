"""Operator settings, cached by every client that reads the mesh, so that a restart of Redis does not lose them.

Redis may come back with an earlier state. Each setting has a number that only rises. A client that has seen a higher
number than Redis has writes that setting again. It never writes an older one.
"""

from collections.abc import Mapping, Sequence

from rollmesh.config.replica_bounds import check_replicas
from rollmesh.store.redis_connection import Connection

_SCALER_SECONDS = 15
"""Time after which a launcher that has not read the requests counts as stopped."""


class Settings:
    """The newest settings that this client has written or read, by name; ``lib/settings.lua`` lists the names."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._newest: dict[str, tuple[int, str]] = {}

    async def set_user_paused(self, paused: bool) -> None:
        """Pause or resume the run for an operator; a paused run gives no new leases."""
        await self.write("pause", int(paused))

    async def set_launcher_paused(self, paused: bool) -> None:
        """Pause or resume the run for its launcher; an operator's pause is independent of it."""
        await self.write("hold", int(paused))

    async def write(self, name: str, value: str | int) -> None:
        self.note(name, await self._connection.run("write_setting", name, value), value)

    def note(self, name: str, number: bytes | int, value: str | int) -> None:
        """Cache a setting that another script has written with this number; 0 when it wrote none."""
        if int(number) > self._newest.get(name, (0, ""))[0]:
            self._newest[name] = (int(number), str(value))

    async def restore(self, known: Sequence[bytes]) -> bool:
        """Write the settings that Redis has lost; returns True when any was written.

        ``known`` has the settings of Redis as name, "number value" pairs.
        """
        numbers: dict[str, int] = {}
        for name, record in zip(known[::2], known[1::2], strict=True):
            number, _, value = record.decode().partition(" ")
            numbers[name.decode()] = int(number)
            self.note(name.decode(), int(number), value)
        words: list[str | int] = []
        for setting, (newest, value) in self._newest.items():
            if newest > numbers.get(setting, 0):
                words += [setting, newest, value]
        return bool(words) and bool(await self._connection.run("restore_settings", *words))


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
        await self._connection.command("SET", self._scaler, launcher, "EX", _SCALER_SECONDS)
        return await self.requests()

    async def leave(self) -> None:
        """Unregister the launcher before it stops."""
        await self._connection.command("DEL", self._scaler)
