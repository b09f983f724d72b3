"""Reads of generated trajectories without a batch, for a trainer that scores them between two stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from rollmesh.segments import join_segments
from rollmesh.store.limits import QueuePart
from rollmesh.store.payload import build_trajectory, decode_prompt, decode_segments, group_of
from rollmesh.store.redis_connection import Reply
from rollmesh.store.trajectories import load_chunks, slices
from rollmesh.types import Trajectory

_GROUPS_PER_READ = 64
_IN_FLIGHT = frozenset({b"leased", b"partial", b"resting", b"finished", b"scored"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTokens:
    """Saved tokens of a trajectory at the time of one read."""

    trajectory: Trajectory
    elements: int
    """Number of list elements that contain its tokens."""
    digests: Mapping[str, bytes]
    """Record fields with the digests of its saves; equal digests mean equal tokens."""


class Unclaimed(QueuePart):
    """Trajectories of open and ready groups."""

    async def read(self, seen: Mapping[str, SavedTokens]) -> dict[str, SavedTokens]:
        """Return every trajectory with saved tokens in open and ready groups; open first, in admission order.

        ``seen`` is the result of an earlier read. A trajectory without new tokens is the same object as in ``seen``.
        Only missing tokens are read, or all tokens when the digests of earlier saves differ (after a restart of the
        trajectory). The result is not a consistent snapshot: a group may change state in between.
        """
        # Open groups first: a group that becomes ready between the two reads is found twice instead of never.
        queues = [("ZRANGE", self._keys.single(name), 0, -1) for name in ("open", "ready")]
        replies = await self._connection.commands(queues)
        group_ids = list(dict.fromkeys(group_id.decode() for reply in replies for group_id in reply))
        found: dict[str, SavedTokens] = {}
        for part in slices(group_ids, _GROUPS_PER_READ):
            found |= await self._read(part, seen)
        return found

    async def _read(self, group_ids: Sequence[str], seen: Mapping[str, SavedTokens]) -> dict[str, SavedTokens]:
        launched = await self._connection.commands([("HGET", self._keys.of("group", g), "launched") for g in group_ids])
        ids = [f"{g}.{member}" for g, n in zip(group_ids, launched, strict=True) for member in range(int(n or 0))]
        records = await self._connection.commands(
            [
                (
                    "HMGET",
                    self._keys.of("trajectory", i),
                    "state",
                    "birth",
                    "tokens",
                    *(seen[i].digests if i in seen else ()),
                )
                for i in ids
            ]
        )
        live = {i: r for i, r in zip(ids, records, strict=True) if r[0] in _IN_FLIGHT and int(r[2] or 0)}
        known = {i: seen[i] for i in live if i in seen and seen[i].digests}
        same = {i: s for i, s in known.items() if list(s.digests.values()) == live[i][3:]}
        kept = {i: s for i, s in same.items() if s.trajectory.response_token_count == int(live[i][2])}
        changed = {i: r for i, r in live.items() if i not in kept}
        fresh = await self._load({i: (r, same.get(i)) for i, r in changed.items()})
        return {i: kept.get(i) or fresh[i] for i in live if i in kept or i in fresh}

    async def _load(self, wanted: Mapping[str, tuple[Reply, SavedTokens | None]]) -> dict[str, SavedTokens]:
        """Load trajectories by id from their records; with an earlier read, only the elements after it."""
        starts = {i: before.elements if before else 0 for i, (_, before) in wanted.items()}
        lists = await self._connection.commands(
            [("LRANGE", self._keys.of("segments", i), start, -1) for i, start in starts.items()]
        )
        elements = {i: found for i, found in zip(starts, lists, strict=True) if found}
        chunks = await load_chunks(self._connection, elements)
        group_ids = sorted({group_of(i) for i in elements if wanted[i][1] is None})
        replies = await self._connection.commands([("GET", self._keys.of("prompt", g)) for g in group_ids])
        prompts = {g: decode_prompt(data) for g, data in zip(group_ids, replies, strict=True) if data is not None}
        found: dict[str, SavedTokens] = {}
        offsets: dict[str, list[int]] = {}
        for i, parts in elements.items():
            record, before = wanted[i]
            prompt = before.trajectory.prompt if before else prompts.get(group_of(i))
            if prompt is None or None in chunks[i].values():
                continue  # its group was dropped between the reads
            earlier = before.trajectory.segments if before else ()
            later = decode_segments(parts, chunks[i])
            ends = accumulate((len(s) for s in later), initial=sum(len(s) for s in earlier))
            offsets[i] = list(ends)[1:]
            trajectory = build_trajectory(
                i, prompt, join_segments((*earlier, *later)), birth_version=int(record[1] or 0)
            )
            digests = before.digests if before else {}
            found[i] = SavedTokens(trajectory=trajectory, elements=starts[i] + len(parts), digests=digests)
        # The digests of the saves that end at these token offsets: record fields d<end>.
        names = {i: [f"d{n}" for n in offsets[i]] for i in found}
        replies = await self._connection.commands([("HMGET", self._keys.of("trajectory", i), *names[i]) for i in found])
        return {
            i: replace(
                saved,
                digests={**saved.digests, **{n: d for n, d in zip(names[i], values, strict=True) if d is not None}},
            )
            for (i, saved), values in zip(found.items(), replies, strict=True)
        }
