"""The mesh as the scheduler sees it, sizes for people, and the ledger of drops."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollmesh.mesh import Desired, GroupView, MeshView
from rollmesh.store.limits import Limits
from rollmesh.store.operator_settings import Settings
from rollmesh.store.queue_types import Drop, StoreCounts
from rollmesh.store.redis_connection import Connection, Reply

_LIVE = ("leased", "finished", "scored", "unscorable", "dead")


class View:
    """Reads of the whole queue, and the switches that pause it."""

    def __init__(self, connection: Connection, limits: Limits, settings: Settings) -> None:
        self._connection = connection
        self._keys = connection.keys
        self._limits = limits
        self._settings = settings

    async def view(self, *, groups: bool = True) -> MeshView:
        """Read the mesh consistently, in O(groups_per_batch); without single groups in O(1).

        Settings that this client has seen and Redis has forgotten are written again here.
        """
        seen, settings = await self._look(groups)
        return (await self._look(groups))[0] if await self._settings.restore(settings) else seen

    async def _look(self, groups: bool) -> tuple[MeshView, Sequence[bytes]]:
        limits = await self._limits.get()
        raw = await self._connection.run("view", 2 * limits.groups_per_batch if groups else 0)
        now, trained_step = float(raw[0]) / 1000, int(raw[1])
        blocked_by, blocked_since = _blocked(raw[14], now)
        oldest_in_loss = trained_step - limits.max_staleness if limits.mask_old_segments else None
        seen = MeshView(
            now=now,
            trained_step=trained_step,
            cut_step=int(raw[2]),
            policy_version=int(raw[3]),
            policy_train_step=int(raw[4]),
            admitted_unconsumed=int(raw[5]),
            open_groups=int(raw[6]),
            ready_groups=int(raw[7]),
            pending=int(raw[8]),
            partial=int(raw[9]),
            leased=int(raw[10]),
            finished=int(raw[11]),
            memory_ratio=float(raw[12]),
            used_memory_bytes=int(raw[21]),
            max_memory_bytes=int(raw[22]),
            saved_bytes_total=int(raw[23]),
            finished_total=int(raw[24]),
            mean_prompt_bytes=int(raw[34]) / max(1, int(raw[35])),
            filtered_in_a_row=int(raw[13]),
            unscored_in_a_row=int(raw[20]),
            blocked_by=blocked_by,
            blocked_since=blocked_since,
            registered_generators=int(raw[25]),
            desired=_desired(raw[27:32]),
            failure=raw[26].decode(),
            recovering=bool(raw[15]),
            user_paused=raw[16] == b"1",
            listed=groups,
            launcher_paused=raw[32] == b"1",
            ready=_groups(raw[17], oldest_in_loss),
            stalest_open=_groups(raw[18], oldest_in_loss),
            unclaimed_by_step=tuple((int(raw[19][at]), int(raw[19][at + 1])) for at in range(0, len(raw[19]), 2)),
            trained_enough=trained_step >= limits.train_steps,
        )
        return seen, raw[33]

    async def counts(self) -> StoreCounts:
        """Sizes of every state, lifetime totals, drops by reason, memory."""
        raw = await self._connection.run("counts")
        counters, drops = _pairs(raw[0]), _pairs(raw[1])
        trajectories = {name: counters.get(name, 0) for name in _LIVE}
        trajectories |= {"pending": int(raw[2]), "partial": int(raw[3])}
        return StoreCounts(
            trajectories=trajectories,
            groups={"open": int(raw[5]), "ready": int(raw[6]), "cut": int(raw[7])},
            totals={name: value for name, value in counters.items() if name not in _LIVE},
            drops={name.removeprefix("groups:"): n for name, n in drops.items() if name.startswith("groups:")},
            dropped_tokens={name.removeprefix("tokens:"): n for name, n in drops.items() if name.startswith("tokens:")},
            drop_deciles={name.removeprefix("decile:"): n for name, n in drops.items() if name.startswith("decile:")},
            scoring_queue=int(raw[4]),
            sessions=int(raw[8]),
            dead_letters=int(raw[9]),
            used_memory_bytes=int(raw[10]),
            max_memory_bytes=int(raw[11]),
            finished_lengths={int(bucket): n for bucket, n in _pairs(raw[12]).items()},
        )

    async def ledger(self, after: str = "", limit: int = 1000) -> list[Drop]:
        """Groups that left without being trained, oldest first, after an entry id (about the last 100,000 are kept)."""
        start = f"({after}" if after else "-"
        entries = await self._connection.command("XRANGE", self._keys.single("ledger"), start, "+", "COUNT", limit)
        return [
            Drop(
                entry_id=entry.decode(),
                time_seconds=int(entry.partition(b"-")[0]) / 1000,
                group_id=fields[b"group"].decode(),
                reason=fields[b"reason"].decode(),
                token_count=int(fields[b"tokens"]),
                length_decile=int(fields[b"decile"]),
            )
            for entry, fields in entries
        ]

    async def live_groups(self) -> list[str]:
        """Ids of every open, ready or cut group, of replays that wait for room and of drops not swept; O(groups)."""
        queues = await self._connection.commands(
            [
                ("ZRANGE", self._keys.single("open"), 0, -1),
                ("ZRANGE", self._keys.single("ready"), 0, -1),
                ("HKEYS", self._keys.single("cut")),
                ("HKEYS", self._keys.single("replays")),
                ("HKEYS", self._keys.single("dropped")),
            ]
        )
        return list(dict.fromkeys(group_id.decode() for queue in queues for group_id in queue))

    async def dropped_groups(self) -> dict[str, str]:
        """Reason of every group in the ledger, by group id; O(ledger), for audits."""
        found: dict[str, str] = {}
        after = ""
        while page := await self.ledger(after):
            found |= {drop.group_id: drop.reason for drop in page if drop.group_id}
            after = page[-1].entry_id
        return found

    async def forgotten_drops(self) -> int:
        """How many entries the ledger has let go: such groups are counted by reason, but no longer named."""
        ledger = self._keys.single("ledger")
        if not await self._connection.command("EXISTS", ledger):
            return 0
        facts = await self._connection.command("XINFO", "STREAM", ledger)
        pairs = facts if isinstance(facts, dict) else dict(zip(facts[::2], facts[1::2], strict=True))
        return int(pairs[b"entries-added"]) - int(pairs[b"length"])

    async def set_user_paused(self, paused: bool) -> None:
        """Pause or resume the run for an operator: no new leases while it is paused."""
        await self._settings.write("pause", int(paused))

    async def set_launcher_paused(self, paused: bool) -> None:
        """Pause or resume the run for its launcher; an operator's pause holds beside it."""
        await self._settings.write("hold", int(paused))


def _blocked(stored: bytes, now: float) -> tuple[str, float | None]:
    """Name of the blocking set and since when it blocks; nothing for a time that the server's clock has not reached."""
    since, _, name = stored.partition(b" ")
    if not name or int(since) / 1000 > now:
        return "", None
    return name.decode(), int(since) / 1000


def _desired(fields: Sequence[bytes]) -> Desired:
    pool_size, paused, interrupt_below, reason, start_at = fields
    return Desired(
        pool_size=int(pool_size),
        paused=paused == b"1",
        interrupt_below_version=int(interrupt_below),
        reason=reason.decode(),
        start_at_version=int(start_at),
    )


def _groups(rows: Sequence[Reply], oldest_in_loss: int | None) -> tuple[GroupView, ...]:
    views = []
    for at in range(0, len(rows), 3):
        step = float(rows[at + 2])
        lowest = None if math.isinf(step) else int(step)
        if lowest is not None and oldest_in_loss is not None:
            # Tokens older than the bound leave the loss, so they do not count.
            lowest = max(lowest, oldest_in_loss)
        views.append(GroupView(group_id=rows[at].decode(), admission_index=int(rows[at + 1]), min_train_step=lowest))
    return tuple(views)


def _pairs(flat: Sequence[bytes]) -> dict[str, int]:
    return {flat[at].decode(): int(flat[at + 1]) for at in range(0, len(flat), 2)}
