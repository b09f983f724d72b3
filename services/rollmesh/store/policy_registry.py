"""Published policies, pins, and operator requests to continue from an older policy."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.store.operator_settings import Settings
from rollmesh.store.queue_types import RollbackRequest
from rollmesh.store.redis_connection import Connection
from rollmesh.types import PolicyRecord

_PIN = ("pinned", "pin_instance")
_FLOORS = ("start_at_version", "interrupt_below_version", "required_version")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyOutlook:
    """Policies that one generator may have to serve."""

    newest: PolicyRecord | None
    """Newest policy; None before the first, and while Redis has lost the pinned one."""
    pinned: PolicyRecord | None
    """Policy pinned for this generator."""
    required_version: int
    """Oldest version that a generator without a pin may serve: an older one can take no new trajectory, or a trajectory
    waits that has tokens of a newer version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldPin:
    """The pin of a run and its owner."""

    policy_version: int
    owner: str
    """Evaluation that holds the pin; empty for the operator."""


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
        return _pinned(await self._connection.command("HMGET", self._keys.single("meta"), *_PIN), instance_id)

    async def held_pin(self) -> HeldPin | None:
        """Return the pin with its owner; None without a pin."""
        version, owner = await self._connection.command("HMGET", self._keys.single("meta"), "pinned", "pin_owner")
        return None if version is None else HeldPin(policy_version=int(version), owner=(owner or b"").decode())

    async def outlook(self, instance_id: str | None = None) -> PolicyOutlook:
        """Return the newest policy, this generator's pinned one (see ``pinned``) and the oldest version allowed."""
        meta, floors = await self._connection.commands(
            [
                ("HMGET", self._keys.single("meta"), "branch_version", *_PIN),
                ("HMGET", self._keys.single("desired"), *_FLOORS),
            ],
            "outlook",
        )
        version = _pinned(meta[1:], instance_id)
        pinned = None if version is None else await self.get(version)
        return PolicyOutlook(
            newest=await self.latest() if version is None or pinned is not None else None,
            pinned=pinned,
            required_version=max(int(floor or 0) for floor in (meta[0], *floors)),
        )

    async def require(self, version: int) -> bool:
        """Have every generator serve at least this version, because a trajectory has tokens of it that none serves.

        Returns False when the version was never announced or the requirement stands already.
        """
        return bool(await self._connection.run("require_version", version))


class Rollbacks:
    """The pending rollback request of a run; the trainer rolls back between two train steps."""

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


def _pinned(fields: Sequence[Any], instance_id: str | None) -> int | None:
    version, instance = fields
    if version is None:
        return None
    foreign = instance_id is not None and instance and instance.decode() != instance_id
    return None if foreign else int(version)


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
