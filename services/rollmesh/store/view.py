"""Reads of the whole queue: the scheduler's view, sizes for operators, and the groups in the queue."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rollmesh.mesh import CachePool, Desired, GroupView, MeshView
from rollmesh.store.limits import Limits, QueuePart
from rollmesh.store.operator_settings import Settings
from rollmesh.store.queue_types import StoreCounts
from rollmesh.store.redis_connection import Connection, Reply

_SAME_IN_THE_VIEW = (
    *("cut_step", "policy_version", "policy_train_step", "open_groups", "ready_groups", "undecided_groups"),
    *("aside_groups", "recalled_groups", "pending", "partial", "resting", "leased", "finished", "finished_total"),
    *("waiting", "saved_bytes_total", "filtered_in_a_row", "unscored_in_a_row"),
)
"""Numbers of the script ``view`` that the view has under the same name."""
_LIVE = ("leased", "finished", "scored", "unscorable", "dead", "surplus")


class MeshReader(QueuePart):
    """Reads of the whole queue."""

    def __init__(self, connection: Connection, limits: Limits, settings: Settings) -> None:
        super().__init__(connection, limits)
        self._settings = settings

    async def view(self, *, groups: bool = True, shortest: bool = False) -> MeshView:
        """Read a consistent view of the mesh in O(groups_per_batch), or in O(1) without single groups.

        ``shortest`` lists the ready groups with the fewest tokens too. Also writes the settings again that this client
        has read and Redis has lost.
        """
        view, settings = await self._read(groups, shortest)
        return (await self._read(groups, shortest))[0] if await self._settings.restore(settings) else view

    async def _read(self, groups: bool, shortest: bool) -> tuple[MeshView, Sequence[bytes]]:
        limits = await self._limits.get()
        raw = await self._connection.run_named("view", 2 * limits.groups_per_batch if groups else 0, int(shortest))
        now, trained_step = int(raw["now"]) / 1000, int(raw["trained_step"])
        blocked_by, blocked_since = _blocked(raw["blocked_since"], now)
        oldest_in_loss = trained_step - limits.max_staleness if limits.mask_old_segments else None
        same: dict[str, Any] = {name: int(raw[name]) for name in _SAME_IN_THE_VIEW}
        view = MeshView(
            **same,
            now=now,
            trained_step=trained_step,
            admitted_unconsumed=int(raw["admitted_groups"]),
            memory_ratio=float(raw["memory_ratio"]),
            used_memory_bytes=int(raw["used_memory"]),
            max_memory_bytes=int(raw["max_memory"]),
            mean_prompt_bytes=int(raw["prompt_bytes_total"]) / max(1, int(raw["prompts_total"])),
            blocked_by=blocked_by,
            blocked_since=blocked_since,
            registered_generators=int(raw["generators"]),
            pinned_version=int(raw["pinned_version"]) if raw["pinned_version"] else None,
            pinned_instance=raw["pinned_instance"].decode(),
            desired=decode_desired(raw),
            ready_seconds=_seconds(raw["ready_ms"]),
            update_seconds=_seconds(raw["update_ms"]),
            ready_updates=float(raw["ready_updates"]) if raw["ready_updates"] else None,
            failure=raw["failure"].decode(),
            recovering=bool(raw["recovering"]),
            user_paused=raw["user_paused"] == b"1",
            rolling_back=raw["rolling_back"] == b"1",
            listed=groups,
            launcher_paused=raw["launcher_paused"] == b"1",
            ready=_groups(raw["ready"], oldest_in_loss),
            stalest_open=_groups(raw["open"], oldest_in_loss),
            unclaimed_by_step=tuple((int(step), int(count)) for step, count, _ in raw["unclaimed"]),
            ready_by_step=tuple((int(step), int(ready)) for step, _, ready in raw["unclaimed"] if ready),
            aside=tuple(group_id.decode() for group_id in raw["aside"]),
            is_complete=trained_step >= limits.train_steps,
        )
        return view, raw["settings"]

    async def counts(self) -> StoreCounts:
        """Return the size of every state, lifetime totals, drops by reason, and memory."""
        raw = await self._connection.run_named("counts")
        counters, drops = _pairs(raw["counters"]), _pairs(raw["drops"])
        trajectories = {name: counters.get(name, 0) for name in _LIVE}
        return StoreCounts(
            trajectories={**trajectories, **{name: raw[name] for name in ("pending", "partial", "resting")}},
            groups={name: raw[name] for name in ("open", "ready", "cut", "aside")},
            totals={name: value for name, value in counters.items() if name not in _LIVE},
            drops={name.removeprefix("groups:"): n for name, n in drops.items() if name.startswith("groups:")},
            dropped_tokens={name.removeprefix("tokens:"): n for name, n in drops.items() if name.startswith("tokens:")},
            drop_deciles={name.removeprefix("decile:"): n for name, n in drops.items() if name.startswith("decile:")},
            begun_again_deciles={n.removeprefix("again:"): v for n, v in drops.items() if n.startswith("again:")},
            surplus_deciles={n.removeprefix("surplus:"): v for n, v in drops.items() if n.startswith("surplus:")},
            scoring_queue=raw["scoring"],
            sessions=raw["sessions"],
            dead_letters=raw["letters"],
            used_memory_bytes=raw["used_memory"],
            max_memory_bytes=raw["max_memory"],
            finished_lengths={int(bucket): n for bucket, n in _pairs(raw["lengths"]).items()},
            oldest_rest_step=int(raw["oldest_rest"]) if raw["oldest_rest"] else None,
        )

    async def live_groups(self) -> list[str]:
        """Return the ids of all groups in the queue, of waiting replays, and of drops not swept yet; O(groups)."""
        queues = await self._connection.commands(
            [
                *(("ZRANGE", self._keys.single(name), 0, -1) for name in ("open", "ready", "aside")),
                *(("HKEYS", self._keys.single(name)) for name in ("cut", "replays", "dropped")),
            ]
        )
        return list(dict.fromkeys(group_id.decode() for queue in queues for group_id in queue))


def decode_desired(raw: Mapping[str, Any]) -> Desired:
    """Decode the desired state; fields that the leader has not written are 0 or empty."""
    size, since, preemptions = raw.get("cache_pool", b"").split() or (b"", b"", b"")
    return Desired(
        pool_size=int(raw.get("pool_size", 0)),
        paused=raw.get("paused") == b"1",
        interrupt_below_version=int(raw.get("interrupt_below_version", 0)),
        reason=raw.get("reason", b"").decode(),
        start_at_version=int(raw.get("start_at_version", 0)),
        waiting_for=raw.get("waiting_for", b"").decode(),
        rest_before_step=int(raw.get("rest_before_step", 0)),
        most_waiting=int(raw.get("most_waiting", 0)),
        cache_pool=CachePool(size=int(size), since=float(since), preemptions=int(preemptions)) if size else None,
    )


def _blocked(stored: bytes, now: float) -> tuple[str, float | None]:
    """Return the name of the blocking set and its start time; ("", None) when that time is ahead of the clock."""
    since, _, name = stored.partition(b" ")
    if not name or int(since) / 1000 > now:
        return "", None
    return name.decode(), int(since) / 1000


def _seconds(milliseconds: bytes) -> float | None:
    return float(milliseconds) / 1000 if milliseconds else None


def _groups(rows: Sequence[Reply], oldest_in_loss: int | None) -> tuple[GroupView, ...]:
    views = []
    for group_id, index, train_step, *tokens in rows:
        step = float(train_step)
        lowest = None if math.isinf(step) else int(step)
        if lowest is not None and oldest_in_loss is not None:
            # Tokens older than the bound are masked out of the loss, so they do not count.
            lowest = max(lowest, oldest_in_loss)
        views.append(
            GroupView(
                group_id=group_id.decode(),
                admission_index=int(index),
                min_train_step=lowest,
                token_count=int(tokens[0]) if tokens else 0,
            )
        )
    return tuple(views)


def _pairs(flat: Sequence[bytes]) -> dict[str, int]:
    return {flat[at].decode(): int(flat[at + 1]) for at in range(0, len(flat), 2)}
