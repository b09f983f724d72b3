"""Facts about one trajectory, for operators: its round, its restarts and rests, both ends of its response."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollmesh.segments import keep_tokens
from rollmesh.store.payload import decode_segments
from rollmesh.store.redis_connection import Connection
from rollmesh.store.trajectories import load_chunks
from rollmesh.types import Int32Array, Segment

_NONE = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRound:
    """Round of one trajectory, in a run with a planner or a group shaper."""

    number: int
    """Round that launched it, from 0."""
    newest: int
    """Newest round of its group."""
    plan: Mapping[str, Any] = field(default_factory=dict)
    """Plan of its round."""
    is_undecided: bool = False
    """True while its group waits for the decision on the next round."""
    is_closed: bool = False
    """True once its group gets no further round."""

    def sentence(self) -> str:
        """Return the round as one sentence, without the name of the trajectory."""
        plan = f" with the plan {json.dumps(dict(self.plan))}" if self.plan else ""
        if self.is_closed:
            group = f"its group is closed after round {self.newest}"
        elif self.is_undecided:
            group = f"its group waits for the decision after round {self.newest}"
        else:
            group = f"its group is in round {self.newest}"
        return f"launched in round {self.number}{plan}, {group}"


async def read_member_round(connection: Connection, group_id: str, member: int) -> MemberRound | None:
    """Return the round of a member of a queued group; None in a run without rounds."""
    key = connection.keys.of("group", group_id)
    (newest, closed), undecided = await connection.commands(
        [("HMGET", key, "round", "closed"), ("ZSCORE", connection.keys.single("undecided"), group_id)]
    )
    if newest is None:
        return None
    (stored,) = await connection.commands([("HMGET", key, *(f"plan:{number}" for number in range(int(newest) + 1)))])
    # Number of the first member and the plan; the group may have left the queue in between.
    rounds = [plan.decode().split(" ", 1) for plan in stored if plan is not None]
    launched_by = max((number for number, (first, _) in enumerate(rounds) if int(first) <= member), default=None)
    if launched_by is None:
        return None
    return MemberRound(
        number=launched_by,
        newest=int(newest),
        plan=json.loads(rounds[launched_by][1]),
        is_undecided=undecided is not None,
        is_closed=closed is not None,
    )


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryHistory:
    """Events of a trajectory that left it without some or all of its tokens, or made it wait."""

    group_restarts: int = 0
    """Restarts of its group, which exceeded the staleness bound."""
    group_set_aside: int = 0
    """Number of times that its group was set aside for a long round."""
    is_aside: bool = False
    """True while its group waits for a long round."""
    worker_restarts: int = 0
    """Restarts by its worker, since its group last began.

    A lower bound in a group of over 100 members that began again: it is reset in several scripts, and its first members
    have an older incarnation than the group.
    """
    rests_since_step: int | None = None
    """Train step of the policy of its newest tokens while it rests; else None."""
    is_surplus: bool = False
    """True if it was cut off."""

    def sentences(self) -> Iterator[str]:
        """Yield one sentence per event, without the name of the trajectory."""
        if self.group_restarts:
            yield f"restarted {_times(self.group_restarts)} with its group, which exceeded the staleness bound"
        if self.group_set_aside:
            now = ": it waits for a long round" if self.is_aside else ""
            yield f"set aside {_times(self.group_set_aside)} with its group, which exceeded the staleness bound{now}"
        if self.worker_restarts:
            yield f"restarted {_times(self.worker_restarts)} by its worker"
        if self.rests_since_step is not None:
            yield (
                f"resting since train step {self.rests_since_step}: it continues under a newer policy, or when nothing "
                "else can run"
            )
        if self.is_surplus:
            yield "surplus: cut off unfinished, because enough other members of its group were scored"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
