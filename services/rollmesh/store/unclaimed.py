"""Reading what has been generated and is in no batch yet, for a trainer that looks at it between two stages."""

from __future__ import annotations

from collections.abc import Sequence

from rollmesh.store.connection import Connection
from rollmesh.store.payload import build_trajectory, decode_prompt, decode_segments
from rollmesh.store.trajectories import load_chunks, slices
from rollmesh.types import Trajectory

_GROUPS_PER_READ = 64
_IN_FLIGHT = frozenset({b"leased", b"partial", b"finished", b"scored"})


class Unclaimed:
    """Trajectories of open and ready groups."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._keys = connection.keys

    async def unclaimed_trajectories(self) -> list[Trajectory]:
        """Every trajectory with saved tokens whose group is open or ready: open ones first, in admission order.

        Costs a read of all their payload; not a consistent snapshot, a group may move on meanwhile.
        """
        # Open ones first: a group that becomes ready between the two reads is seen twice then, instead of never.
        queues = [("ZRANGE", self._keys.single(name), 0, -1) for name in ("open", "ready")]
        replies = await self._connection.commands(queues)
        group_ids = list(dict.fromkeys(group_id.decode() for reply in replies for group_id in reply))
        found: list[Trajectory] = []
        for part in slices(group_ids, _GROUPS_PER_READ):
            found += await self._read(part)
        return found

    async def _read(self, group_ids: Sequence[str]) -> list[Trajectory]:
        heads = await self._connection.commands(
            [("HGET", self._keys.of("group", g), "launched") for g in group_ids]
            + [("GET", self._keys.of("prompt", g)) for g in group_ids]
        )
        prompts = dict(zip(group_ids, heads[len(group_ids) :], strict=True))
        launched = zip(group_ids, heads[: len(group_ids)], strict=True)
        ids = [f"{g}.{member}" for g, n in launched if prompts[g] is not None for member in range(int(n or 0))]
        replies = await self._connection.commands(
            [("HMGET", self._keys.of("trajectory", i), "state", "birth") for i in ids]
            + [("LRANGE", self._keys.of("segments", i), 0, -1) for i in ids]
        )
        records, lists = replies[: len(ids)], dict(zip(ids, replies[len(ids) :], strict=True))
        live = {i: r for i, r in zip(ids, records, strict=True) if r[0] in _IN_FLIGHT and lists[i]}
        chunks = await load_chunks(self._connection, {i: lists[i] for i in live})
        decoded = {g: decode_prompt(data) for g, data in prompts.items() if data is not None}
        return [
            build_trajectory(
                i,
                decoded[i.rpartition(".")[0]],
                decode_segments(lists[i], chunks[i]),
                birth_version=int(record[1] or 0),
            )
            for i, record in live.items()
            if None not in chunks[i].values()  # its group was dropped between the two reads
        ]
