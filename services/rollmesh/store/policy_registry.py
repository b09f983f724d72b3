"""Published policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmesh.store.operator_settings import Settings
from rollmesh.store.redis_connection import Connection
from rollmesh.types import PolicyRecord


class PolicyRegistry:
    """Policies by version, stored as a stream so that readers can wait for the next one."""

    def __init__(self, connection: Connection, settings: Settings) -> None:
        self._connection = connection
        self._keys = connection.keys
        self._settings = settings

    async def announce(self, trainer_session: str, record: PolicyRecord) -> None:
        """Register a published policy.

        Raises Conflict unless its version is the highest plus one, and SessionLost unless the trainer session is
        current. The same announcement again is a no-op.
        """
        await self._connection.run(
            "announce_policy",
            trainer_session,
            record.policy_version,
            record.train_step,
            record.path,
            record.manifest_digest,
        )

    async def announced(self, after: int = -1) -> list[PolicyRecord]:
        """Return every announced policy above version ``after``, ascending."""
        first = f"{after + 2}-0"
        return _records(await self._connection.command("XRANGE", self._keys.single("policies"), first, "+"))

    async def latest(self) -> PolicyRecord | None:
        """Return the newest policy; None before the first."""
        found = _records(
            await self._connection.command("XREVRANGE", self._keys.single("policies"), "+", "-", "COUNT", 1)
        )
        return found[0] if found else None

    async def get(self, version: int) -> PolicyRecord | None:
        """Return a policy by version; None when it was never announced."""
        entry = f"{version + 1}-0"
        found = _records(await self._connection.command("XRANGE", self._keys.single("policies"), entry, entry))
        return found[0] if found else None

    async def wait(self, after: int, timeout: float) -> PolicyRecord | None:
        """Wait for a version above ``after`` and return the newest; None after ``timeout`` seconds."""
        stream = self._keys.single("policies")
        if not await self._connection.block_on_stream(stream, f"{after + 1}-0", timeout):
            return None
        return await self.latest()

    async def pin(self, version: int | None, owner: str = "", instance_id: str = "") -> None:
        """Make the generators serve this version instead of the newest; None unpins.

        Raises Conflict when the version was never announced. A pin without ``owner`` is the operator's and overrides
        every other pin. An evaluation pins with an ``owner``: raises Conflict while the operator or another owner has
        pinned another version, and unpinning removes only its own pin. With ``instance_id`` the pin applies to that
        generator only; the other generators follow the newest version.
        """
        pinned = "" if version is None else str(version)
        self._settings.note("pin", await self._connection.run("pin_policy", pinned, owner, instance_id), pinned)

    async def pinned(self, instance_id: str | None = None) -> int | None:
        """Return the pinned version, None without a pin; with ``instance_id`` only a pin for that generator."""
        fields = ("pinned", "pin_instance")
        version, instance = await self._connection.command("HMGET", self._keys.single("meta"), *fields)
        if version is None:
            return None
        foreign = instance_id is not None and instance and instance.decode() != instance_id
        return None if foreign else int(version)

    async def effective(self, instance_id: str | None = None) -> PolicyRecord | None:
        """Return the pinned policy (see ``pinned``), else the newest."""
        pinned = await self.pinned(instance_id)
        return await self.latest() if pinned is None else await self.get(pinned)


def _records(entries: Sequence[tuple[bytes, dict[bytes, bytes]]] | Any) -> list[PolicyRecord]:
    return [
        PolicyRecord(
            policy_version=int(fields[b"version"]),
            train_step=int(fields[b"train_step"]),
            path=fields[b"path"].decode(),
            manifest_digest=fields[b"digest"].decode(),
        )
        for _, fields in entries
    ]
