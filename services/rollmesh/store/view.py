"""Reads of the whole queue: the scheduler's view, sizes for operators, and the groups in the queue."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rollmesh.mesh import Desired, GroupView, MeshView
from rollmesh.store.limits import Limits
from rollmesh.store.operator_settings import Settings
from rollmesh.store.queue_types import StoreCounts
from rollmesh.store.redis_connection import Connection, Reply

_LIVE = ("leased", "finished", "scored", "unscorable", "dead")


class MeshReader:
    """Reads of the whole queue."""

    def __init__(self, connection: Connection, limits: Limits, settings: Settings) -> None:
        self._connection = connection
        self._keys = connection.keys
        self._limits = limits
        self._settings = settings

    async def view(self, *, groups: bool = True) -> MeshView:
        """Read a consistent view of the mesh in O(groups_per_batch), or in O(1) without single groups.

        Also writes the settings again that this client has read and Redis has lost.
        """
        view, settings = await self._read(groups)
        return (await self._read(groups))[0] if await self._settings.restore(settings) else view

    async def _read(self, groups: bool) -> tuple[MeshView, Sequence[bytes]]:
        limits = await self._limits.get()
        raw = await self._connection.run("view", 2 * limits.groups_per_batch if groups else 0)
        now, trained_step = float(raw[0]) / 1000, int(raw[1])
        blocked_by, blocked_since = _blocked(raw[14], now)
        oldest_in_loss = trained_step - limits.max_staleness if limits.mask_old_segments else None
        view = MeshView(
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
            is_complete=trained_step >= limits.train_steps,
        )
        return view, raw[33]

    async def counts(self) -> StoreCounts:
        """Return the size of every state, lifetime totals, drops by reason, and memory."""
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

    async def live_groups(self) -> list[str]:
        """Return the ids of open, ready and cut groups, of waiting replays, and of drops not swept yet; O(groups)."""
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


def _blocked(stored: bytes, now: float) -> tuple[str, float | None]:
    """Return the name of the blocking set and its start time; ("", None) when that time is ahead of the clock."""
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
            # Tokens older than the bound are masked out of the loss, so they do not count.
            lowest = max(lowest, oldest_in_loss)
        views.append(GroupView(group_id=rows[at].decode(), admission_index=int(rows[at + 1]), min_train_step=lowest))
    return tuple(views)


def _pairs(flat: Sequence[bytes]) -> dict[str, int]:
    return {flat[at].decode(): int(flat[at + 1]) for at in range(0, len(flat), 2)}
