"""Reads of single trajectories for display: pages of the queue, one trajectory, and records of trajectories in flight.

Every call reads a bounded part of the queue, independent of its size. No read is a consistent snapshot.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rollmesh.errors import DataError
from rollmesh.mesh import WasteReason
from rollmesh.store.limits import QueuePart
from rollmesh.store.member_details import (
    MemberRound,
    ResponseEnds,
    TrajectoryHistory,
    read_member_round,
    read_response_ends,
)
from rollmesh.store.payload import build_trajectory, decode_prompt, decode_segments, group_of
from rollmesh.store.trajectories import load_chunks, slices
from rollmesh.types import Trajectory, TrajectoryState

_FIELDS = ("state", "tokens", "attempts", "birth", "version", "finish", "reward", "session", "since", "generator")
_GROUP_FIELDS = ("incarnation", WasteReason.RESTARTED, WasteReason.SET_ASIDE)
_SECTIONS = ("open", "ready", "aside", "cut")
_QUEUES = ("pending", "partial", "resting")
SORTED = "sorted"
"""Section of the cursors of sorted lists, which the caller makes; their place is a position in the list."""
CURSOR_PATTERN = f"^({'|'.join((*_SECTIONS, *_QUEUES, SORTED))}):[0-9]{{1,16}}:[0-9]{{1,9}}$"
"""Form of a cursor: section of the queue, place in it, and member."""
_GROUPS_PER_READ = 64
_RECORDS_PER_READ = 512
_RECORDS_PER_PAGE = 4096
"""Maximum number of records read for one page; a page of a rare state may contain fewer than ``limit`` rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryMark:
    """The record of one trajectory without its tokens."""

    trajectory_id: str
    state: str
    token_count: int = 0
    attempts: int = 0
    birth_version: int | None = None
    """None before the first lease."""
    newest_version: int | None = None
    """Policy version of its newest tokens."""
    finish_reason: str | None = None
    reward: float | None = None
    session: str = ""
    """Session that holds it; empty without one."""
    generator: str = ""
    """Instance that wrote its newest saved tokens; empty before the first save."""
    lease_time: float | None = None
    """Time of the first lease, Unix seconds; None when unknown."""
    train_step: int | None = None
    """Train step of its batch; None before the cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InspectedTrajectory:
    """One trajectory of a group that is in the queue."""

    mark: TrajectoryMark
    trajectory: Trajectory | None
    """None when its payload has been deleted, after its batch file was written; without tokens when it was cut off."""
    member_count: int
    """Trajectories launched in its group."""
    history: TrajectoryHistory
    round: MemberRound | None
    """None in a run without rounds."""


class _Cursor(NamedTuple):
    section: str
    at: int
    member: int


class Inspection(QueuePart):
    """Reads of single trajectories."""

    async def workers(self) -> dict[str, str]:
        """Return the worker name of every open session, by session."""
        raw = await self._connection.command("ZRANGE", self._keys.single("sessions"), 0, -1)
        sessions = [session.decode() for session in raw]
        names = await self._connection.commands([("HGET", self._keys.of("session", s), "worker") for s in sessions])
        return {s: (name or b"").decode() for s, name in zip(sessions, names, strict=True)}

    async def scan_held(self, cursors: Mapping[str, int], count: int) -> tuple[list[str], dict[str, int]]:
        """Return about ``count`` trajectory ids held by each session, and the next cursors (0 starts and ends)."""
        sessions = list(cursors)
        replies = await self._connection.commands(
            [("SSCAN", self._keys.of("held", s), cursors[s], "COUNT", count) for s in sessions]
        )
        ids = [i.decode() for _, found in replies for i in found]
        return ids, {s: int(cursor) for s, (cursor, _) in zip(sessions, replies, strict=True)}

    async def marks(self, trajectory_ids: Sequence[str]) -> list[TrajectoryMark | None]:
        """Return the records of trajectories; None for those without a record, such as pending ones."""
        found: list[TrajectoryMark | None] = []
        for ids in slices(trajectory_ids, _RECORDS_PER_READ):
            replies = await self._connection.commands(
                [("HMGET", self._keys.of("trajectory", i), *_FIELDS) for i in ids]
            )
            found += [_mark(i, reply) for i, reply in zip(ids, replies, strict=True)]
        return found

    async def trajectory_page(
        self, state: str | None, cursor: str | None, limit: int
    ) -> tuple[list[TrajectoryMark], str | None]:
        """Return up to ``limit`` trajectories in admission order, and the cursor of the next page.

        Raises DataError for an invalid cursor.
        """
        if state in _QUEUES:
            return await self._queue_page(state, cursor, limit)
        here: _Cursor | None = _parse(cursor, _SECTIONS)
        found: list[TrajectoryMark] = []
        read = 0
        while here is not None:
            marks, here = await self._read_groups(here, limit, state, found)
            read += marks
            if len(found) >= limit or read >= _RECORDS_PER_PAGE:
                break
        return found, None if here is None else f"{here.section}:{here.at}:{here.member}"

    async def inspect(self, trajectory_id: str) -> InspectedTrajectory | None:
        """Return a trajectory with its tokens; None when its group is not in the queue."""
        group_id = group_of(trajectory_id)
        member = trajectory_id.rpartition(".")[2]
        if not member.isdigit():
            return None
        replies = await self._connection.commands(
            [
                ("HMGET", self._keys.of("group", group_id), "launched", *_GROUP_FIELDS),
                ("GET", self._keys.of("prompt", group_id)),
                (
                    "HMGET",
                    self._keys.of("trajectory", trajectory_id),
                    *_FIELDS,
                    "outcome",
                    "incarnation",
                    "kept",
                    "teacher",
                ),
                ("LRANGE", self._keys.of("segments", trajectory_id), 0, -1),
                ("HGET", self._keys.single("cut"), group_id),
                ("ZSCORE", self._keys.single("resting"), trajectory_id),
                ("ZSCORE", self._keys.single("aside"), group_id),
            ]
        )
        (launched, *of_group), prompt, record, elements, step, rests, aside = replies
        *record, outcome, incarnation, kept, teacher = record
        if launched is None or int(member) >= int(launched):
            return None
        mark = _mark(trajectory_id, record, None if step is None else int(step)) or _pending(trajectory_id)
        is_surplus = mark.state == TrajectoryState.SURPLUS
        chunks = (await load_chunks(self._connection, {trajectory_id: elements}))[trajectory_id]
        trajectory = None
        if prompt is not None and None not in chunks.values() and (elements or not mark.token_count or is_surplus):
            trajectory = build_trajectory(
                trajectory_id,
                decode_prompt(prompt),
                decode_segments(elements, chunks),
                birth_version=mark.birth_version or 0,
                finish=record[5],
                outcome=outcome,
                reward=record[6],
                run=self._keys.run,
                kept=kept,
                teacher=teacher,
            )
        began_with, restarts, set_aside = (int(value or 0) for value in of_group)
        history = TrajectoryHistory(
            group_restarts=restarts,
            group_set_aside=set_aside,
            is_aside=aside is not None,
            # Every restart by a worker makes the next incarnation. A member that ended earlier has an older one.
            worker_restarts=max(0, int(incarnation or 0) - began_with),
            rests_since_step=None if rests is None else int(float(rests)),
            is_surplus=is_surplus,
        )
        member_round = await read_member_round(self._connection, group_id, int(member))
        return InspectedTrajectory(
            mark=mark, trajectory=trajectory, member_count=int(launched), history=history, round=member_round
        )

    async def response_ends(self, trajectory_ids: Sequence[str]) -> list[ResponseEnds]:
        """Return the beginning and the end of the saved response of each trajectory."""
        return [
            ends
            for ids in slices(trajectory_ids, _RECORDS_PER_READ)
            for ends in await read_response_ends(self._connection, ids)
        ]

    async def gone_at(self, group_id: str) -> int | None:
        """Return the approximate train step at which a group left the queue; None when it is queued or forgotten."""
        score = await self._connection.command("ZSCORE", self._keys.single("tombstones"), group_id)
        return None if score is None else int(float(score))

    async def _queue_page(self, state: str, cursor: str | None, limit: int) -> tuple[list[TrajectoryMark], str | None]:
        """Return a page of a sorted set; the member of its cursor counts the rows of that score on earlier pages."""
        here = _parse(cursor, (state,))
        reply = await self._connection.command(
            "ZRANGE", self._keys.single(state), here.at, "+inf", "BYSCORE",
            "LIMIT", here.member, limit + 1, "WITHSCORES",
        )  # fmt: skip
        scores = _scored(reply)
        marks = await self.marks([trajectory_id for trajectory_id, _ in scores[:limit]])
        rows = [mark or _pending(i) for mark, (i, _) in zip(marks, scores[:limit], strict=True)]
        if len(scores) <= limit:
            return rows, None
        # Many trajectories rest since the same train step. A place in another queue has one trajectory.
        at = int(scores[limit][1])
        shown = sum(score == at for _, score in scores[:limit]) + (here.member if at == here.at else 0)
        return rows, f"{state}:{at}:{shown}"

    async def _read_groups(
        self, here: _Cursor, limit: int, state: str | None, found: list[TrajectoryMark]
    ) -> tuple[int, _Cursor | None]:
        """Append the matching rows of the next groups to ``found``; returns the number of records and the cursor."""
        groups, step = await self._groups(here)
        if not groups:
            after = _SECTIONS[_SECTIONS.index(here.section) + 1 :]
            return 0, _Cursor(after[0], 0, 0) if after else None
        launched = await self._connection.commands(
            [("HGET", self._keys.of("group", group_id), "launched") for group_id, _ in groups]
        )
        members = [
            (position, member, f"{group_id}.{member}")
            for (group_id, position), count in zip(groups, launched, strict=True)
            for member in range(here.member if position == here.at else 0, int(count or 0))
        ]
        members, left_out = members[:_RECORDS_PER_PAGE], members[_RECORDS_PER_PAGE:]
        marks = await self.marks([i for _, _, i in members])
        for (position, member, trajectory_id), mark in zip(members, marks, strict=True):
            if len(found) == limit:
                return len(members), _Cursor(here.section, position, member)
            row = mark or _pending(trajectory_id)
            if state is None or row.state == state:
                found.append(row if step is None else replace(row, train_step=step))
        position, member = left_out[0][:2] if left_out else (groups[-1][1] + 1, 0)
        return len(members), _Cursor(here.section, position, member)

    async def _groups(self, here: _Cursor) -> tuple[list[tuple[str, int]], int | None]:
        """Return the next groups of a section with their positions, and the train step of the cut."""
        if here.section != "cut":
            reply = await self._connection.command(
                "ZRANGE", self._keys.single(here.section), here.at, "+inf", "BYSCORE",
                "LIMIT", 0, _GROUPS_PER_READ, "WITHSCORES",
            )  # fmt: skip
            return [(group_id, int(score)) for group_id, score in _scored(reply)], None
        cut, trained = await self._connection.command("HMGET", self._keys.single("meta"), "cut_step", "trained_step")
        if cut is None or int(cut) <= int(trained or 0):
            return [], None
        key = self._keys.of("batch_groups", cut.decode())
        reply = await self._connection.command("LRANGE", key, here.at, here.at + _GROUPS_PER_READ - 1)
        return [(group_id.decode(), here.at + at) for at, group_id in enumerate(reply)], int(cut)


def _parse(cursor: str | None, sections: Sequence[str]) -> _Cursor:
    if cursor is None:
        return _Cursor(sections[0], 0, 0)
    section, at, member = cursor.split(":") if re.fullmatch(CURSOR_PATTERN, cursor) else ("", "", "")
    if section not in sections:
        raise DataError(f"cursor {cursor!r} is not valid here: pass the next cursor of the same list")
    return _Cursor(section, int(at), int(member))


def _scored(reply: Sequence[Sequence[bytes]]) -> list[tuple[str, float]]:
    return [(member.decode(), float(score)) for member, score in reply]


def _mark(trajectory_id: str, values: Sequence[bytes | None], train_step: int | None = None) -> TrajectoryMark | None:
    state, tokens, attempts, birth, version, finish, reward, session, since, generator = values
    if state is None:
        return None
    return TrajectoryMark(
        trajectory_id=trajectory_id,
        state=state.decode(),
        token_count=int(tokens or 0),
        attempts=int(attempts or 0),
        birth_version=None if birth is None else int(birth),
        newest_version=None if version is None else int(version),
        finish_reason=finish.decode() if finish else None,
        reward=float(reward) if reward else None,
        session=session.decode() if session else "",
        generator=generator.decode() if generator else "",
        lease_time=int(since) / 1000 if since else None,
        train_step=train_step,
    )


def _pending(trajectory_id: str) -> TrajectoryMark:
    return TrajectoryMark(trajectory_id=trajectory_id, state=TrajectoryState.PENDING.value)
