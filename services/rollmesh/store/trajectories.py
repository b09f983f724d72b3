"""Queue operations of rollout workers: lease, save, finish, score, release."""

import asyncio
import json
import math
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TypeVar

from rollmesh.errors import DataError, SessionLost
from rollmesh.store.limits import Limits, QueuePart
from rollmesh.store.payload import (
    LINK_MARK,
    UPLOAD_SECONDS,
    PromptCache,
    SavedChunk,
    build_trajectory,
    decode_prompt,
    decode_segments,
    encode_segments,
    group_of,
)
from rollmesh.store.queue_types import (
    Append,
    AppendResult,
    Finish,
    FirstToken,
    Fork,
    LeasedTrajectory,
    ReleaseReason,
    Score,
)
from rollmesh.store.redis_connection import Argument, Connection, Reply
from rollmesh.store.scripts import UploadExpired
from rollmesh.types import ForkStatus, OutcomeKind, Prompt, Segment, WriteStatus
from rollmesh.wire.codec import outcome_to_pb, teacher_to_pb

T = TypeVar("T")

_ITEMS_PER_CALL = 64
"""Items of one script call, which bounds its keys (two to six per item) and its time in the server."""
_RELEASES_PER_CALL = 128
_TEACHER_BYTES_PER_CALL = 1 << 20
"""Bytes of teachers' scores in one script call, unless those of one trajectory are more."""
_UPLOAD_ATTEMPTS = 3
"""Attempts of an upload and its script; an upload is lost only when the server crashes in between."""


class TrajectoryQueue(QueuePart):
    """Leases and writes of rollout workers. All methods may be called concurrently."""

    def __init__(self, connection: Connection, limits: Limits, prompts: PromptCache) -> None:
        super().__init__(connection, limits)
        self._lease_locks: dict[str, asyncio.Lock] = {}
        self._unanswered: dict[tuple[str, str], str] = {}
        """Nonce of the last lease by script and session, until the reply has arrived."""
        self._prompts = prompts

    async def lease(self, session: str, limit: int, new_limit: int | None = None) -> list[LeasedTrajectory]:
        """Lease up to ``limit`` unfinished trajectories; partial trajectories of the oldest group come first.

        At most ``new_limit`` of them are trajectories without tokens; None means ``limit``.

        Returns an empty list when nothing waits, the pool is full, the mesh is paused, or Redis is recovering. Raises
        SessionLost.
        """
        most = min(limit, _ITEMS_PER_CALL)
        return await self._lease("lease", session, most, most if new_limit is None else new_limit)

    async def lease_scoring(self, session: str, limit: int) -> list[LeasedTrajectory]:
        """Lease up to ``limit`` finished trajectories without a worker, to score them before new work.

        A trajectory without a score after ``max_attempts`` of these leases becomes a dead letter.
        """
        return await self._lease("lease_scoring", session, min(limit, _ITEMS_PER_CALL))

    async def append(self, session: str, items: Sequence[Append]) -> list[AppendResult]:
        """Save tokens of leased trajectories; returns one result per item, in order.

        Raises Conflict when a policy version was never announced, and StoreUnavailable when Redis is full or
        unreachable. In both cases the same items may be sent again.
        """
        return await self._write("append", session, items)

    async def report_first_tokens(self, session: str, items: Sequence[FirstToken]) -> list[AppendResult]:
        """Report the policy versions of first tokens that are saved later, and age the groups accordingly.

        Until the tokens are saved, only this report applies the staleness bound to them. The report is dropped when
        the trajectory is released without saved tokens. Errors as in ``append``.
        """
        ids = [item.trajectory_id for item in items]
        arguments = [(item.trajectory_id, item.policy_version) for item in items]
        return await self._sliced("report_first_tokens", session, slices(ids, _ITEMS_PER_CALL), arguments)

    async def finish(self, session: str, items: Sequence[Finish]) -> list[AppendResult]:
        """Save the last tokens and the finish reason: leased -> finished. Errors as in ``append``."""
        return await self._write("finish", session, items)

    async def score(self, session: str, items: Sequence[Score]) -> list[AppendResult]:
        """Record outcomes: finished -> scored | unscorable. The last outcome of a group changes the group's state."""
        arguments = [_score_arguments(item) for item in items]
        # The last score of a group may delete the whole group.
        ids = [item.trajectory_id for item in items]
        size = _ITEMS_PER_CALL
        if longest := max((len(words[-1]) for words in arguments), default=0):
            size = min(size, max(1, _TEACHER_BYTES_PER_CALL // longest))
        parts = by_groups(ids, await self._limits.groups_per_call(), size)
        return await self._sliced("score", session, parts, arguments)

    async def release(self, session: str, trajectory_ids: Sequence[str], reason: str = ReleaseReason.FAILED) -> int:
        """Release leased trajectories: unfinished ones become partial or pending, finished ones wait for scoring.

        ``paused``, ``rested`` and ``drained`` do not count as attempts. Those that ``rested`` wait for a policy after
        that of their newest tokens, or until nothing else can run (Desired.rest_before_step). Returns the number of
        trajectories that were held.
        """
        how = {ReleaseReason.FAILED: 0, ReleaseReason.RESTED: 2}.get(ReleaseReason(reason), 1)
        released = 0
        for part in slices(trajectory_ids, _RELEASES_PER_CALL):
            released += int(await self._connection.run("release", session, how, *part))
        return released

    async def keep_snapshot(
        self, session: str, trajectory_id: str, snapshot: bytes, *agent: str, incarnation: int = 0
    ) -> bool:
        """Save the environment state of a leased trajectory, replacing the older one.

        Returns False when the session does not hold it, or holds another incarnation of it.

        ``agent``: id and name of the agent's session that the trajectory is in; Conflict if another one in progress has
        the name.

        The snapshot is not atomic with ``append``: it contains the turns that it covers.
        """
        return bool(await self._connection.run("keep_snapshot", session, trajectory_id, incarnation, snapshot, *agent))

    async def restart(self, session: str, trajectory_ids: Sequence[str]) -> list[int | None]:
        """Drop the saved tokens of leased trajectories that have to restart, because their environment was lost.

        Returns the new incarnation of each, None for a trajectory that the session does not hold. Tokens saved after a
        restart do not count as progress at the next lease, so a trajectory that always restarts becomes a dead letter.
        """
        incarnations: list[int | None] = []
        for ids in slices(trajectory_ids, _ITEMS_PER_CALL):
            reply: Reply = await self._connection.run("restart", session, *ids)
            incarnations += [None if incarnation < 0 else incarnation for incarnation in reply]
        return incarnations

    async def fail(self, session: str, items: Sequence[tuple[str, str]]) -> int:
        """Turn leased trajectories into dead letters, as (trajectory_id, reason); returns how many were held."""
        # A dead letter may delete the whole group of its trajectory.
        parts = by_groups([trajectory_id for trajectory_id, _ in items], await self._limits.groups_per_call(), 16)
        failed, reasons = 0, iter(items)
        for ids in parts:
            words = (word for item in islice(reasons, len(ids)) for word in item)
            failed += int(await self._connection.run("bury", session, *words))
        return failed

    async def fork(self, session: str, trajectory_id: str, nonce: str) -> Fork:
        """Add a member to the group of a leased trajectory and lease it; the same ``nonce`` returns the same member.

        For an agent that continues with a context that the trajectory does not contain. Raises SessionLost.
        """
        reply = await self._connection.run_named("fork", session, trajectory_id, nonce)
        if "id" not in reply:
            return Fork(status=ForkStatus(reply["status"].decode()))
        name = reply["id"].decode()
        group_id, record_name = group_of(name), reply.get("prompt", b"").decode()
        prompt = (await self._load_prompts({group_id: record_name})).get(group_id)
        if prompt is None:
            return Fork(status=ForkStatus.LOST)  # its group was evicted in between, with the lease
        trajectory = build_trajectory(name, prompt, birth_version=reply["birth"], run=self._keys.run)
        leased = LeasedTrajectory(
            trajectory=trajectory,
            attempt=1,
            first_lease_time=reply["since"] / 1000,
            incarnation=reply["incarnation"],
        )
        return Fork(status=ForkStatus.FORKED, leased=leased)

    async def _lease(self, script: str, session: str, limit: int, *more: int) -> list[LeasedTrajectory]:
        if limit < 1:
            return []
        # The script stores the last lease of a session to answer a retry, so leases of a session are serialized. A call
        # that failed may still have leased trajectories. The next call reuses its nonce and gets the same answer;
        # otherwise the session would hold trajectories that the worker does not have.
        async with self._lease_locks.setdefault(session, asyncio.Lock()):
            nonce = self._unanswered.setdefault((script, session), secrets.token_hex(8))
            try:
                leased = await self._leased(script, session, nonce, limit, *more)
            except SessionLost:
                del self._unanswered[script, session]
                raise
            del self._unanswered[script, session]
        return leased

    async def _leased(self, script: str, session: str, nonce: str, limit: int, *more: int) -> list[LeasedTrajectory]:
        rows = json.loads(await self._connection.run(script, session, nonce, limit, *more))
        ids = [row["id"] for row in rows]
        prompts = await self._load_prompts({group_of(row["id"]): row.get("prompt", "") for row in rows})
        begun = [row["id"] for row in rows if int(row["tokens"])]
        saved = await self._load_saved(begun)
        snapshots = await self._load_field(begun, "snapshot")
        finishes = await self._load_field(ids, "finish") if script == "lease_scoring" else {}
        leased = []
        for row in rows:
            trajectory_id = row["id"]
            prompt = prompts.get(group_of(trajectory_id))
            if prompt is None or (int(row["tokens"]) and trajectory_id not in saved):
                continue  # its group was evicted in between, with the lease
            trajectory = build_trajectory(
                trajectory_id,
                prompt,
                saved.get(trajectory_id, ()),
                birth_version=int(row["birth"]),
                finish=finishes.get(trajectory_id),
                run=self._keys.run,
            )
            leased.append(
                LeasedTrajectory(
                    trajectory=trajectory,
                    attempt=int(row["attempt"]),
                    first_lease_time=int(row["since"]) / 1000,
                    snapshot=snapshots.get(trajectory_id),
                    incarnation=int(row["incarnation"]),
                    plan=json.loads(row.get("plan", "{}")),
                )
            )
        return leased

    async def _load_prompts(self, names: Mapping[str, str]) -> dict[str, Prompt]:
        """Load the prompts of groups; ``names`` has the record of the prompt history that each group adds to."""
        cached = {i: self._prompts.get(i, name) for i, name in names.items()}
        missing = [i for i, prompt in cached.items() if prompt is None]
        replies = await self._connection.commands([("GET", self._keys.of("prompt", i)) for i in missing])
        for group_id, data in zip(missing, replies, strict=True):
            if data is not None:
                cached[group_id] = prompt = decode_prompt(data)
                self._prompts.put(group_id, names[group_id], prompt)
        return {i: prompt for i, prompt in cached.items() if prompt is not None}

    async def _load_saved(self, ids: Sequence[str]) -> dict[str, tuple[Segment, ...]]:
        lists = await self._connection.commands([("LRANGE", self._keys.of("segments", i), 0, -1) for i in ids])
        chunks = await load_chunks(self._connection, dict(zip(ids, lists, strict=True)))
        return {
            i: decode_segments(elements, chunks[i])
            for i, elements in zip(ids, lists, strict=True)
            if elements and None not in chunks[i].values()
        }

    async def _load_field(self, ids: Sequence[str], field: str) -> dict[str, bytes]:
        replies = await self._connection.commands([("HGET", self._keys.of("trajectory", i), field) for i in ids])
        return {i: value for i, value in zip(ids, replies, strict=True) if value is not None}

    async def _write(self, script: str, session: str, items: Sequence[Append]) -> list[AppendResult]:
        chunks = [encode_segments(item.segments) for item in items]
        arguments: list[Sequence[Argument]] = [
            (_head(item, chunk), *chunk.elements, *(item.mark or ())[:1])
            for item, chunk in zip(items, chunks, strict=True)
        ]
        ids = [item.trajectory_id for item in items]
        # NX: a retry must not set an expiry on a chunk that the first attempt has linked.
        uploads = [
            ("SET", self._keys.of("chunk", f"{trajectory_id}:{name}"), data, "EX", UPLOAD_SECONDS, "NX")
            for trajectory_id, chunk in zip(ids, chunks, strict=True)
            for name, data in chunk.uploads
        ]
        return await with_uploads(
            self._connection, uploads, lambda: self._sliced(script, session, slices(ids, _ITEMS_PER_CALL), arguments)
        )

    async def _sliced(
        self, script: str, session: str, parts: Sequence[Sequence[str]], arguments: Sequence[Sequence[Argument]]
    ) -> list[AppendResult]:
        """Run a script for every part of the trajectory ids; ``arguments`` has one entry per item, in order."""
        results: list[AppendResult] = []
        for ids in parts:
            items = arguments[len(results) : len(results) + len(ids)]
            flat = [word for words in items for word in words]
            reply: Reply = await self._connection.run(script, session, len(ids), *flat)
            results += [
                AppendResult(trajectory_id=i, status=WriteStatus(status), saved_token_count=tokens)
                for i, status, tokens in zip(ids, reply[0::2], reply[1::2], strict=True)
            ]
        return results


async def with_uploads(
    connection: Connection, uploads: Sequence[Sequence[Argument]], run: Callable[[], Awaitable[T]]
) -> T:
    """Upload payloads, then ``run`` the script that links them; repeat both if an upload expires in between."""
    for _ in range(_UPLOAD_ATTEMPTS - 1):
        await connection.commands(uploads)
        with suppress(UploadExpired):
            return await run()
    await connection.commands(uploads)
    return await run()


async def load_chunks(connection: Connection, elements: dict[str, list[bytes]]) -> dict[str, dict[bytes, bytes]]:
    """Read the linked chunks of trajectories, by trajectory id and list element."""
    links = [(i, e) for i, parts in elements.items() for e in parts if e.startswith(LINK_MARK)]
    commands = [("GET", connection.keys.of("chunk", f"{i}:{e[1:].decode()}")) for i, e in links]
    found: dict[str, dict[bytes, bytes]] = {i: {} for i in elements}
    for (trajectory_id, element), data in zip(links, await connection.commands(commands), strict=True):
        found[trajectory_id][element] = data
    return found


def _head(item: Append, chunk: SavedChunk) -> str:
    """Format the head of an item for lib/save.lua."""
    if item.digest.token_count != item.token_offset:
        raise DataError(
            f"{item.trajectory_id}: token_offset is {item.token_offset}, but digest covers {item.digest.token_count} "
            "tokens: pass the digest of the tokens before the offset"
        )
    head = {
        "id": item.trajectory_id,
        "incarnation": str(item.incarnation),
        "offset": item.token_offset,
        "before": str(item.digest),
        "tokens": chunk.token_count,
        "after": str(item.digest.extended(item.segments)),
        "versions": chunk.versions,
        "finish": item.finish_reason.value if isinstance(item, Finish) else "",
        "bytes": chunk.byte_count,
        "generator": item.generator,
        "elements": len(chunk.elements),
    }
    return json.dumps(head if item.mark is None else {**head, "agent": item.mark[1:]})


def _score_arguments(item: Score) -> tuple[str, int, str, bytes, int, bytes]:
    has_verdict = item.outcome.kind is OutcomeKind.SCORED
    scored, solved = item.assigned or has_verdict, (item.outcome.value if has_verdict else item.shaped_reward) > 0
    if not math.isfinite(item.shaped_reward) or not math.isfinite(item.outcome.value):
        raise DataError(f"{item.trajectory_id}: shaped_reward {item.shaped_reward} is not a finite number")
    outcome = outcome_to_pb(item.outcome).SerializeToString(deterministic=True)
    reward = repr(float(item.shaped_reward))
    teacher = b"" if item.teacher is None else teacher_to_pb(item.teacher).SerializeToString(deterministic=True)
    return (item.trajectory_id, int(scored), reward, outcome, int(solved), teacher)


def by_groups(trajectory_ids: Sequence[str], groups: int, size: int = _ITEMS_PER_CALL) -> list[list[str]]:
    """Split trajectory ids into parts of at most ``size`` ids from at most ``groups`` different groups."""
    parts: list[list[str]] = []
    seen: set[str] = set()
    for trajectory_id in trajectory_ids:
        seen.add(group_of(trajectory_id))
        if not parts or len(seen) > groups or len(parts[-1]) == size:
            parts.append([])
            seen = {group_of(trajectory_id)}
        parts[-1].append(trajectory_id)
    return parts


def slices(items: Sequence[T], size: int) -> list[Sequence[T]]:
    """Split a sequence into parts of at most ``size`` items."""
    return [items[at : at + size] for at in range(0, len(items), size)]
