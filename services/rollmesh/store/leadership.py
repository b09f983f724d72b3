"""The leader's side: the lease on leadership, admission, cuts, evictions, desired state, reaping."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from rollmesh.mesh import Cursor, Desired
from rollmesh.store.limits import Limits
from rollmesh.store.payload import INLINE_LIMIT_BYTES, UPLOAD_SECONDS, decode_prompt, encode_prompt
from rollmesh.store.prompts import PromptCache
from rollmesh.store.queue_types import NewGroup
from rollmesh.store.redis_connection import Argument, Connection
from rollmesh.store.scripts import UploadExpired
from rollmesh.store.trajectories import UPLOAD_ATTEMPTS, slices
from rollmesh.store.worker_sessions import Sessions

_GROUPS_PER_ADMISSION = 128
"""Groups of one admit script: three keys each at most."""
_SWEEP_SLICES = 64
_MEMBERS_PER_SWEEP = 128


class Leadership:
    """What only the leading rollout replica does; every call carries its token and raises SessionLost without it."""

    def __init__(self, connection: Connection, limits: Limits, sessions: Sessions, prompts: PromptCache) -> None:
        self._connection = connection
        self._keys = connection.keys
        self._limits = limits
        self._sessions = sessions
        self._prompts = prompts

    async def acquire_leadership(self, candidate: str) -> str | None:
        """Become the leader: a fresh token, or None while another replica's lease runs (one session TTL)."""
        token = secrets.token_hex(16)
        return token if await self._connection.run("acquire_leadership", token, candidate) else None

    async def renew_leadership(self, token: str) -> bool:
        """Renew the lease; False when another replica leads now."""
        return bool(await self._connection.run("renew_leadership", token))

    async def resign(self, token: str) -> None:
        """Give the lease up, so that another replica need not wait for its end."""
        await self._connection.run("resign_leadership", token)

    async def admit(self, leader: str, groups: Sequence[NewGroup], cursor_before: Cursor, cursor_after: Cursor) -> int:
        """Open groups and advance the prompt cursor in one step; returns how many groups were opened.

        Groups that are in the queue or were ever trained or dropped are skipped. More than 128 groups are admitted in
        several steps, each of which leaves the cursor at the first group of the next. Conflict when the cursor is not
        at ``cursor_before``.
        """
        opened = 0
        parts = slices(groups, _GROUPS_PER_ADMISSION) or [()]
        for at, part in enumerate(parts):
            following = parts[at + 1][0] if at + 1 < len(parts) else None
            after = Cursor(epoch=following.epoch, index=following.index) if following else cursor_after
            opened += await self._admit_part(leader, part, cursor_before, after)
            cursor_before = after
        return opened

    async def admit_replays(self, leader: str, most: int) -> int:
        """Open up to ``most`` groups of replayed dead letters that wait for room; returns how many were opened."""
        return int(await self._connection.run("admit_replays", leader, min(most, _GROUPS_PER_ADMISSION)))

    async def cursor(self) -> Cursor:
        """Position of the next prompt to admit."""
        epoch, index = await self._connection.command(
            "HMGET", self._keys.single("meta"), "cursor_epoch", "cursor_index"
        )
        return Cursor(epoch=int(epoch or 0), index=int(index or 0))

    async def set_desired(self, leader: str, desired: Desired, blocked_by: str = "") -> None:
        """Write the desired state, and which set of groups blocks the cut (Decisions.blocked_by).

        MeshView.blocked_since starts anew with another set and is cleared without one.
        """
        await self._connection.run(
            "set_desired",
            leader,
            desired.pool_size,
            int(desired.paused),
            desired.interrupt_below_version,
            desired.reason,
            desired.start_at_version,
            blocked_by,
        )

    async def desired(self) -> Desired:
        """The desired state; an empty pool before the leader has written one.

        The version floor of a rollback is added here, not by the leader: one that looked at the mesh just before the
        rollback may still admit after it, and whoever leases such a group reads the floor after its lease.
        """
        raw, branch_version = await self._connection.commands(
            [
                ("HGETALL", self._keys.single("desired")),
                ("HGET", self._keys.single("meta"), "branch_version"),
            ],
            "desired",
        )
        return Desired(
            pool_size=int(raw.get(b"pool_size", 0)),
            paused=raw.get(b"paused") == b"1",
            interrupt_below_version=int(raw.get(b"interrupt_below_version", 0)),
            reason=raw.get(b"reason", b"").decode(),
            start_at_version=max(int(raw.get(b"start_at_version", 0)), int(branch_version or 0)),
            registry_version=int(raw.get(b"registry_version", 0)),
        )

    async def report_failure(self, leader: str, text: str) -> None:
        """Say that the run cannot go on, and why (Decisions.fail); empty text takes it back."""
        await self._connection.run("report_failure", leader, text)

    async def failure(self) -> str:
        """Why the current leader says that the run cannot go on; empty while it can."""
        text, reporter, leader = await self._connection.command(
            "HMGET", self._keys.single("meta"), "failure", "failure_leader", "leader"
        )
        return text.decode() if text and reporter == leader else ""

    async def cut(self, leader: str, train_step: int, group_ids: Sequence[str]) -> None:
        """Fix members and order of a batch; Conflict unless the step is next, all are ready and fresh enough."""
        await self._connection.run("cut", leader, train_step, *group_ids)

    async def evict(self, leader: str, group_ids: Sequence[str], reason: str) -> int:
        """Drop open or ready groups for a reason that the ledger keeps; returns how many were there."""
        dropped = 0
        for part in slices(group_ids, await self._limits.groups_per_call()):
            dropped += int(await self._connection.run("evict", leader, reason, *part))
        return dropped

    async def reap(self, leader: str) -> int:
        """Give back the work of sessions that have expired; returns how many trajectories went back.

        Does nothing within one TTL of a new leader or of a recovery. Also finishes clean-ups that died half-way.
        """
        sessions, steps, dropped = await self._connection.run("reap", leader)
        total = 0
        for session in sessions:
            total += await self._sessions.give_back(session.decode(), counts_as_attempt=True)
        for step in steps[:_SWEEP_SLICES]:
            await sweep(self._connection, self._limits, int(step))
        for group_id in dropped[:_SWEEP_SLICES]:
            while await self._connection.run("sweep_dropped", group_id, _MEMBERS_PER_SWEEP):
                pass
        return total

    async def _admit_part(self, leader: str, groups: Sequence[NewGroup], before: Cursor, after: Cursor) -> int:
        nonce = secrets.token_hex(8)
        prompts = [encode_prompt(group.prompt) for group in groups]
        cursors = (before.epoch, before.index, after.epoch, after.index)
        words: list[Argument] = []
        for group, data in zip(groups, prompts, strict=True):
            inline = data if len(data) <= INLINE_LIMIT_BYTES else b""
            words += [group.group_id, group.needed, group.epoch, group.index, inline]
        for attempt in range(1, UPLOAD_ATTEMPTS + 1):
            await self._connection.commands(
                [
                    ("SET", self._keys.of("upload", group.group_id), data, "EX", UPLOAD_SECONDS)
                    for group, data in zip(groups, prompts, strict=True)
                    if len(data) > INLINE_LIMIT_BYTES
                ]
            )
            try:
                opened = int(await self._connection.run("admit", leader, nonce, *cursors, len(groups), *words))
            except UploadExpired:
                if attempt == UPLOAD_ATTEMPTS:
                    raise
                continue
            # A group that was skipped may be in the queue with the prompt that an older data file had.
            if opened == len(groups):
                for group, data in zip(groups, prompts, strict=True):
                    self._prompts.put(group.group_id, decode_prompt(data))
            return opened
        raise AssertionError("unreachable")


async def sweep(connection: Connection, limits: Limits, train_step: int, first: int = 0) -> None:
    """Delete what a confirmed (and, once trained, the whole) batch left in Redis, slice by slice from a group on."""
    size, groups = await limits.groups_per_call(), first + 1
    while first < groups:
        groups = int(await connection.run("sweep", train_step, first, first + size - 1))
        first += size
