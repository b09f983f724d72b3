"""Ledger of the groups that left the queue untrained."""

from __future__ import annotations

from collections.abc import Mapping

from rollmesh.store.queue_types import Drop
from rollmesh.store.redis_connection import Connection


class DropLedger:
    """Drops of the newest groups, with their reasons."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._key = connection.keys.single("ledger")

    async def drops(self, after: str = "", limit: int = 1000) -> list[Drop]:
        """Return the groups that left untrained, oldest first, after an entry id; about 100,000 entries are kept."""
        start = f"({after}" if after else "-"
        entries = await self._connection.command("XRANGE", self._key, start, "+", "COUNT", limit)
        return [_drop(entry, fields) for entry, fields in entries]

    async def newest_drop(self, group_id: str, page: int = 1000) -> Drop | None:
        """Return the drop of a group; None if the ledger does not have it. Reads the ledger backwards, O(ledger)."""
        end = "+"
        while entries := await self._connection.command("XREVRANGE", self._key, end, "-", "COUNT", page):
            for entry, fields in entries:
                if fields[b"group"].decode() == group_id:
                    return _drop(entry, fields)
            end = f"({entries[-1][0].decode()}"
        return None

    async def dropped_groups(self) -> dict[str, str]:
        """Return the drop reason of every group in the ledger, by group id; O(ledger), for audits."""
        found: dict[str, str] = {}
        after = ""
        while page := await self.drops(after):
            found |= {drop.group_id: drop.reason for drop in page if drop.group_id}
            after = page[-1].entry_id
        return found

    async def forgotten_drops(self) -> int:
        """Return the number of entries trimmed from the ledger; their groups are only counted by reason."""
        if not await self._connection.command("EXISTS", self._key):
            return 0
        facts = await self._connection.command("XINFO", "STREAM", self._key)
        pairs = facts if isinstance(facts, dict) else dict(zip(facts[::2], facts[1::2], strict=True))
        return int(pairs[b"entries-added"]) - int(pairs[b"length"])


def _drop(entry: bytes, fields: Mapping[bytes, bytes]) -> Drop:
    return Drop(
        entry_id=entry.decode(),
        time_seconds=int(entry.partition(b"-")[0]) / 1000,
        group_id=fields[b"group"].decode(),
        reason=fields[b"reason"].decode(),
        token_count=int(fields[b"tokens"]),
        length_decile=int(fields[b"decile"]),
    )
