"""Beginning and end of the responses in the queue, read without the tokens between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollmesh.segments import keep_tokens
from rollmesh.store.payload import decode_segments
from rollmesh.store.redis_connection import Connection
from rollmesh.store.trajectories import load_chunks
from rollmesh.types import Int32Array, Segment

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseEnds:
    """Saved tokens at both ends of a response."""

    first: Int32Array
    last: Int32Array
    is_whole: bool
    """True if ``first`` is the whole response, and ``last`` is empty."""


async def read_response_ends(connection: Connection, trajectory_ids: Sequence[str]) -> list[ResponseEnds]:
    """Read the first and the last saved part of each response; both are empty before the first save."""
    commands: list[tuple[str | int, ...]] = []
    for trajectory_id in trajectory_ids:
        segments = connection.keys.of("segments", trajectory_id)
        kept = connection.keys.of("trajectory", trajectory_id)
        commands += [
            ("LLEN", segments), ("LINDEX", segments, 0), ("LINDEX", segments, -1), ("HGET", kept, "kept"),
        ]  # fmt: skip
    replies = await connection.commands(commands)
    rows = [replies[at : at + 4] for at in range(0, len(replies), 4)]
    elements = {
        trajectory_id: [element for element in (first, last if count > 1 else None) if element is not None]
        for trajectory_id, (count, first, last, _) in zip(trajectory_ids, rows, strict=True)
    }
    chunks = await load_chunks(connection, elements)
    return [
        _ends(elements[trajectory_id], chunks[trajectory_id], count, int(kept) if kept else None)
        for trajectory_id, (count, _, _, kept) in zip(trajectory_ids, rows, strict=True)
    ]


def _ends(elements: Sequence[bytes], chunks: dict[bytes, bytes], count: int, kept: int | None) -> ResponseEnds:
    """Return the ends of a response of ``count`` parts; a group shaper may have kept its first tokens only."""
    if None in chunks.values():  # deleted between the reads
        return ResponseEnds(first=_NONE, last=_NONE, is_whole=True)
    segments = decode_segments(elements, chunks)
    if count > 2:
        return ResponseEnds(
            first=_ids(segments[:1], kept), last=_NONE if kept else _ids(segments[1:], None), is_whole=False
        )
    return ResponseEnds(first=_ids(segments, kept), last=_NONE, is_whole=True)


def _ids(segments: tuple[Segment, ...], kept: int | None) -> Int32Array:
    parts = segments if kept is None else keep_tokens(segments, kept)[0]
    return np.concatenate([_NONE, *(segment.token_ids for segment in parts)])
