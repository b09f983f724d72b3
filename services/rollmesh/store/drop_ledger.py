"""Work that left the queue untrained: the ledger of dropped groups, and dead letters, which can be replayed."""

from collections.abc import Mapping
from dataclasses import replace

from rollmesh.errors import Conflict
from rollmesh.store.limits import QueuePart
from rollmesh.store.payload import build_trajectory, decode_prompt, decode_segments
from rollmesh.store.queue_types import DeadLetter, Drop
from rollmesh.store.trajectories import load_chunks


class DropLedger(QueuePart):
    """Drops of the newest groups, with their reasons."""

    async def drops(self, after: str = "", limit: int = 1000) -> list[Drop]:
        """Return the groups that left untrained, oldest first, after an entry id; about 100,000 entries are kept."""
        start = f"({after}" if after else "-"
        entries = await self._connection.command("XRANGE", self._keys.single("ledger"), start, "+", "COUNT", limit)
        return [_drop(entry, fields) for entry, fields in entries]

    async def newest_drop(self, group_id: str, page: int = 1000) -> Drop | None:
        """Return the drop of a group; None if the ledger does not have it. Reads the ledger backwards, O(ledger)."""
        end = "+"
        while entries := await self._connection.command(
            "XREVRANGE", self._keys.single("ledger"), end, "-", "COUNT", page
        ):
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
        if not await self._connection.command("EXISTS", self._keys.single("ledger")):
            return 0
        facts = await self._connection.command("XINFO", "STREAM", self._keys.single("ledger"))
        pairs = facts if isinstance(facts, dict) else dict(zip(facts[::2], facts[1::2], strict=True))
        return int(pairs[b"entries-added"]) - int(pairs[b"length"])


def _drop(entry: bytes, fields: Mapping[bytes, bytes]) -> Drop:
    return Drop(
        entry_id=entry.decode(),
        group_id=fields[b"group"].decode(),
        reason=fields[b"reason"].decode(),
        token_count=int(fields[b"tokens"]),
        length_decile=int(fields[b"decile"]),
    )


class DeadLetters(QueuePart):
    """Operations on dead letters: list, inspect, replay, delete."""

    async def newest(self, limit: int = 1000) -> list[DeadLetter]:
        """Return dead letters without their payload, newest first."""
        raw = await self._connection.command("ZRANGE", self._keys.single("letters"), 0, limit - 1, "REV")
        ids = [i.decode() for i in raw]
        records = await self._connection.commands([("HGETALL", self._keys.of("letter", i)) for i in ids])
        return [_letter(i, record) for i, record in zip(ids, records, strict=True) if record]

    async def get(self, trajectory_id: str) -> DeadLetter:
        """Return one dead letter with prompt and saved segments; raises Conflict when it does not exist."""
        record, prompt, elements = await self._connection.commands(
            [
                ("HGETALL", self._keys.of("letter", trajectory_id)),
                ("GET", self._keys.of("letter_prompt", trajectory_id)),
                ("LRANGE", self._keys.of("letter_segments", trajectory_id), 0, -1),
            ]
        )
        if not record:
            raise Conflict(f"no dead letter {trajectory_id}")
        letter = _letter(trajectory_id, record)
        if prompt is None:
            return letter
        chunks = await load_chunks(self._connection, {trajectory_id: elements})
        trajectory = build_trajectory(
            trajectory_id,
            decode_prompt(prompt),
            decode_segments(elements, chunks[trajectory_id]),
            birth_version=int(record[b"birth"]),
        )
        return replace(letter, trajectory=trajectory)

    async def replay(self, trajectory_id: str) -> str:
        """Request a new group for the letter's prompt (``replay_of``); repeated calls return the same group id.

        The leader opens the group before new prompts, once its schedule admits one more.
        """
        limits = await self._limits.get()
        group_id: bytes = await self._connection.run("replay_letter", trajectory_id, limits.group_size)
        return group_id.decode()

    async def delete(self, trajectory_id: str) -> bool:
        """Delete a dead letter and its payload; returns False when it does not exist."""
        return bool(await self._connection.run("delete_letter", trajectory_id))


def _letter(trajectory_id: str, record: dict[bytes, bytes]) -> DeadLetter:
    return DeadLetter(
        trajectory_id=trajectory_id,
        group_id=record[b"group"].decode(),
        reason=record[b"reason"].decode(),
        time_seconds=int(record[b"time"]) / 1000,
        attempts=int(record[b"attempts"]),
        token_count=int(record[b"tokens"]),
        replayed_as=record.get(b"replayed_as", b"").decode(),
    )
