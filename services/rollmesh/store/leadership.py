"""Queue operations of the leader: its lease, admission, cuts, evictions, restarts, rounds, desired state, reaping."""

import secrets
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace

from rollmesh.errors import DataError
from rollmesh.group_outcome import GroupOutcome, MemberOutcome
from rollmesh.mesh import Cursor, Desired
from rollmesh.store.limits import Limits, QueuePart
from rollmesh.store.payload import INLINE_LIMIT_BYTES, UPLOAD_SECONDS, PromptCache, decode_prompt, encode_prompt
from rollmesh.store.queue_types import NewGroup
from rollmesh.store.redis_connection import Argument, Connection, Reply
from rollmesh.store.trajectories import slices, with_uploads
from rollmesh.store.view import decode_desired
from rollmesh.store.worker_sessions import Sessions
from rollmesh.types import FinishReason
from rollmesh.v1 import trajectory_pb2 as pb

_GROUPS_PER_ADMISSION = 128
"""Groups of one admit script; at most three keys each."""
_SWEEP_SLICES = 64
MEMBERS_PER_SWEEP = 128
"""Members of a large group that one script deletes or resets; at most three keys each."""
_GROUPS_PER_RECALL = 128
_MEMBERS_PER_READ = 384
"""Members whose records one script reads, unless a single group has more."""


class Leadership(QueuePart):
    """Operations of the leading rollout replica; each takes its token and raises SessionLost when it is not current."""

    def __init__(self, connection: Connection, limits: Limits, sessions: Sessions, prompts: PromptCache) -> None:
        super().__init__(connection, limits)
        self._sessions = sessions
        self._prompts = prompts

    async def acquire(self, candidate: str) -> str | None:
        """Become the leader: returns a new token, or None while another replica holds the lease (one session TTL)."""
        token = secrets.token_hex(16)
        return token if await self._connection.run("acquire_leadership", token, candidate) else None

    async def renew(self, token: str) -> bool:
        """Renew the lease; returns False when another replica leads."""
        return bool(await self._connection.run("renew_leadership", token))

    async def resign(self, token: str) -> None:
        """Release the lease, so that another replica need not wait until it expires."""
        await self._connection.run("resign_leadership", token)

    async def admit(self, leader: str, groups: Sequence[NewGroup], cursor_before: Cursor, cursor_after: Cursor) -> int:
        """Open groups and advance the prompt cursor in one step; returns the number of opened groups.

        Groups that are in the queue, trained or dropped are skipped. More than 128 groups are admitted in several
        steps; each step leaves the cursor at the first group of the next. Raises Conflict when the cursor is not at
        ``cursor_before``.
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
        """Open up to ``most`` waiting groups of replayed dead letters; returns the number of opened groups."""
        nonce = secrets.token_hex(8)
        return int(await self._connection.run("admit_replays", leader, nonce, min(most, _GROUPS_PER_ADMISSION)))

    async def cursor(self) -> Cursor:
        """Return the position of the next prompt to admit."""
        epoch, index = await self._connection.command(
            "HMGET", self._keys.single("meta"), "cursor_epoch", "cursor_index"
        )
        return Cursor(epoch=int(epoch or 0), index=int(index or 0))

    async def record_content(self, setting: str, content: str, epoch_size: int | None = None) -> str:
        """Record the content behind a setting, unless there is one; returns that of the run.

        Another one replaces it as long as no prompt was admitted and no evaluation was requested. ``epoch_size`` is the
        number of prompts in one epoch of training.
        """
        size = "" if epoch_size is None else epoch_size
        recorded: bytes = await self._connection.run("record_content", setting, content, size)
        return recorded.decode()

    async def check_content(self, setting: str, content: str, epoch_size: int | None = None) -> None:
        """Record the files behind a setting, as digests, with the run; raises DataError if the run has used others.

        Its progress is a position in the order of rows, its audit counts them, and its evaluations are compared.
        """
        began = await self.record_content(setting, content, epoch_size)
        if began != content:
            raise DataError(
                f"{setting}: the files have changed since the run began: {began} then, {content} now (digests); "
                "restore them, or start another run in another folder"
            )

    async def epoch_size(self) -> int:
        """Return the recorded number of prompts in one epoch; 0 before there is one."""
        return int(await self._connection.command("HGET", self._keys.single("meta"), "epoch_size") or 0)

    async def set_desired(self, leader: str, desired: Desired, blocked_by: str = "") -> None:
        """Write the desired state and the set of groups that blocks the cut (Decisions.blocked_by).

        MeshView.blocked_since is reset when the set changes, and cleared when ``blocked_by`` is empty or a new leader
        acquires the lease.
        """
        pool = desired.cache_pool
        await self._connection.run(
            "set_desired",
            leader,
            desired.pool_size,
            int(desired.paused),
            desired.interrupt_below_version,
            desired.reason,
            desired.start_at_version,
            blocked_by,
            desired.waiting_for,
            desired.rest_before_step,
            "" if pool is None else f"{pool.size} {pool.since} {pool.preemptions}",
            desired.most_waiting,
        )

    async def desired(self) -> Desired:
        """Return the desired state; the pool is empty before the leader has written one.

        The version floor of a rollback is added here, not by the leader. A leader that read the mesh just before the
        rollback may still admit groups after it. The worker that leases one of these groups reads the floor after its
        lease.
        """
        raw, branch_version = await self._connection.commands(
            [("HGETALL", self._keys.single("desired")), ("HGET", self._keys.single("meta"), "branch_version")],
            "desired",
        )
        desired = decode_desired({name.decode(): value for name, value in raw.items()})
        return replace(
            desired,
            start_at_version=max(desired.start_at_version, int(branch_version or 0)),
            registry_version=int(raw.get(b"registry_version", 0)),
        )

    async def report_failure(self, leader: str, text: str) -> None:
        """Record the reason why the run cannot continue (Decisions.fail); an empty text clears it."""
        await self._connection.run("report_failure", leader, text)

    async def failure(self) -> str:
        """Return the reason for which the current leader failed the run; empty while the run can continue."""
        text, reporter, leader = await self._connection.command(
            "HMGET", self._keys.single("meta"), "failure", "failure_leader", "leader"
        )
        return text.decode() if text and reporter == leader else ""

    async def cut(self, leader: str, train_step: int, group_ids: Sequence[str]) -> None:
        """Fix the members and order of a batch.

        Raises Conflict unless the step is the next one and all groups are ready and within the staleness bound.
        """
        await self._connection.run("cut", leader, train_step, *group_ids)

    async def evict(self, leader: str, group_ids: Sequence[str], reason: str) -> int:
        """Drop open or ready groups, with a reason for the ledger; returns the number of dropped groups."""
        dropped = 0
        for part in slices(group_ids, await self._limits.groups_per_call()):
            dropped += int(await self._connection.run("evict", leader, reason, *part))
        return dropped

    async def reap(self, leader: str) -> int:
        """Return the work of expired sessions to the queue; returns the number of trajectories.

        Reaps no session within one TTL of a new leader or of a recovery. Also finishes interrupted clean-ups.
        """
        sessions, steps, dropped, returning = await self._connection.run("reap", leader)
        total = 0
        for session in sessions:
            total += await self._sessions.give_back(session.decode(), counts_as_attempt=True)
        for step in steps[:_SWEEP_SLICES]:
            await sweep(self._connection, self._limits, int(step))
        for group_id in dropped[:_SWEEP_SLICES]:
            while await self._connection.run("sweep_dropped", group_id, MEMBERS_PER_SWEEP):
                pass
        await sweep_returning(self._connection, returning[:_SWEEP_SLICES])
        return total

    async def _admit_part(self, leader: str, groups: Sequence[NewGroup], before: Cursor, after: Cursor) -> int:
        nonce, keeps_history = secrets.token_hex(8), (await self._limits.get()).keeps_history
        prompts = [encode_prompt(group.prompt) for group in groups]
        cursors = (before.epoch, before.index, after.epoch, after.index)
        words: list[Argument] = [leader, nonce, *cursors, len(groups)]
        records = [(g.record_name or g.prompt.prompt_id) if keeps_history else "" for g in groups]
        for group, data, record in zip(groups, prompts, records, strict=True):
            launched = group.needed + group.spare_members
            inline = data if len(data) <= INLINE_LIMIT_BYTES else b""
            words += [group.group_id, group.needed, launched, group.epoch, group.index, inline, record]
            words += ["" if value is None else value for value in (group.expected_tokens, group.start_rank)]
            words.append(group.prompt.domain if keeps_history else "")
            words.append("" if group.plan is None else group.plan)
        # The nonce is part of the key: the late upload of a leader that was overtaken may be another prompt.
        uploads = [
            ("SET", self._keys.of("upload", f"{group.group_id}:{nonce}"), data, "EX", UPLOAD_SECONDS)
            for group, data in zip(groups, prompts, strict=True)
            if len(data) > INLINE_LIMIT_BYTES
        ]
        opened = int(await with_uploads(self._connection, uploads, lambda: self._connection.run("admit", *words)))
        # A skipped group may be in the queue with the prompt of an older data file.
        if opened == len(groups):
            for group, data, record in zip(groups, prompts, records, strict=True):
                self._prompts.put(group.group_id, record, decode_prompt(data))
        return opened


async def sweep(connection: Connection, limits: Limits, train_step: int, first: int = 0) -> None:
    """Delete the records of a confirmed batch, in slices from group ``first`` on; once trained, also the batch."""
    size, groups = await limits.groups_per_call(), first + 1
    while first < groups:
        groups = int(await connection.run("sweep", train_step, first, first + size - 1))
        first += size


class RestartedGroups(QueuePart):
    """Operations of the leader; each takes its token and raises SessionLost when it is not current.

    Only open and ready groups over the staleness bound begin again; other ids are ignored, so a call may be repeated.
    Members without a score stay dead or unscorable.
    """

    async def restart(self, leader: str, group_ids: Sequence[str]) -> int:
        """Drop the tokens of groups (waste reason ``restarted``) and open them again; returns their number."""
        return await self._begin_again("restart_groups", leader, group_ids)

    async def set_aside(self, leader: str, group_ids: Sequence[str]) -> int:
        """Drop the tokens of groups (waste reason ``set_aside``), which then wait for a recall; returns their number.

        Spare members of a group that is set aside are deleted, except those before a dead or unscorable one.
        """
        return await self._begin_again("set_aside", leader, group_ids)

    async def recall(self, leader: str, train_step: int, count: int) -> int:
        """Open the oldest groups that were set aside, until ``count`` of them were recalled for the batch.

        Returns the number of groups that this call opened. Raises Conflict unless the train step is the next one to
        cut.
        """
        total, opened = 0, 0
        while total < count:
            total, new = await self._connection.run("recall", leader, train_step, count, _GROUPS_PER_RECALL)
            opened += new
            if not new:
                break
        return opened

    async def _begin_again(self, script: str, leader: str, group_ids: Sequence[str]) -> int:
        begun = 0
        for part in slices(group_ids, await self._limits.groups_per_call()):
            count, unfinished = await self._connection.run(script, leader, *part)
            begun += int(count)
            await sweep_returning(self._connection, unfinished)
        return begun


async def sweep_returning(connection: Connection, group_ids: Sequence[Reply]) -> None:
    """Complete the reset of large groups, in slices."""
    for group_id in group_ids:
        while await connection.run("sweep_returning", group_id, MEMBERS_PER_SWEEP):
            pass


class GroupRounds(QueuePart):
    """Undecided groups: open groups whose round has ended.

    Both writes name the round that they follow. A repeated call, and the call of a leader that was overtaken, find
    another round and change nothing.
    """

    async def undecided(self) -> list[GroupOutcome]:
        """Return the oldest undecided groups, with at most 384 members or one group."""
        trained_step, rows = await self._connection.run("undecided", _MEMBERS_PER_READ)
        return [_outcome(int(trained_step), row) for row in rows]

    async def extend(self, leader: str, group: GroupOutcome, needed: int, launched: int, plan: str) -> bool:
        """Begin the next round of an undecided group; returns False if it was decided before.

        ``needed`` scored members of the whole group end the round, ``launched`` new members are pending, and ``plan``
        (JSON) travels with their leases. Raises Conflict if the group would exceed the most members of the run.
        """
        return bool(
            await self._connection.run("extend_group", leader, group.group_id, group.round, needed, launched, plan)
        )

    async def close(
        self,
        leader: str,
        group: GroupOutcome,
        rewards: Sequence[float] | None = None,
        kept_tokens: Sequence[int] | None = None,
    ) -> bool:
        """Close an undecided group, which is then ready or dropped; returns False if it was decided before.

        ``rewards`` and ``kept_tokens`` are one value per scored member, in order; None leaves all as they are.
        """
        words: list[Argument] = []
        if rewards is not None:
            kept: Sequence[Argument] = [""] * len(group.members) if kept_tokens is None else kept_tokens
            for member, reward, count in zip(group.members, rewards, kept, strict=True):
                words += [member.member_index, repr(float(reward)), count]
        return bool(await self._connection.run("close_group", leader, group.group_id, group.round, *words))


def _outcome(train_step: int, row: Sequence[Reply]) -> GroupOutcome:
    group_id, current, launched, prompt_id, domain, firsts, members = row
    return GroupOutcome(
        group_id=group_id.decode(),
        prompt_id=prompt_id.decode(),
        domain=domain.decode(),
        train_step=train_step,
        round=current,
        launched=launched,
        members=tuple(
            MemberOutcome(
                member_index=number,
                round=bisect_right(firsts, number) - 1,
                outcome=pb.RewardOutcome.FromString(outcome).value,
                shaped_reward=float(reward),
                token_count=int(tokens),
                truncated=finish == FinishReason.LENGTH.value.encode(),
            )
            for number, tokens, finish, outcome, reward in members
        ),
    )
