"""Queue operations of the trainer: session, claim, batch file, trained, committed, reports, re-assertion."""

import itertools
import json
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from rollmesh.errors import Conflict, StoreUnavailable
from rollmesh.mesh import Cursor
from rollmesh.prompt_history import PromptOutcome
from rollmesh.store.leadership import sweep
from rollmesh.store.limits import Limits, QueuePart
from rollmesh.store.payload import build_trajectory, decode_prompt, decode_segments
from rollmesh.store.policy_registry import PolicyRegistry
from rollmesh.store.prompt_records import PromptRecords
from rollmesh.store.queue_types import TrainingState
from rollmesh.store.redis_connection import Connection, Reply
from rollmesh.store.trajectories import load_chunks, slices
from rollmesh.types import Batch, Group, PolicyRecord, Prompt, Trajectory

_TOMBSTONE_STEPS = 256
"""Train steps for which consumed and dropped groups are stored individually; older groups are below the floor."""
_TOKENS_PER_CLAIM = 32_768
"""Tokens whose payload is part of the reply to claim (a quarter of a megabyte); plain commands read the rest."""
_UNKNOWN_DIGEST = "unknown"
"""Digest of a re-asserted batch file without a given digest; the next confirmation sets it."""
KEPT_REPORTS = 2_000
"""Number of step reports that are kept, the newest ones."""
_REPORTS_PER_CALL = 500


class Training(QueuePart):
    """Queue operations of rank 0 of the trainer."""

    def __init__(
        self, connection: Connection, limits: Limits, records: PromptRecords, policies: PolicyRegistry
    ) -> None:
        super().__init__(connection, limits)
        self._records = records
        self._policies = policies
        self._claimed: dict[int, tuple[str, ...]] = {}

    async def open_session(self, name: str, token: str | None = None, *, lineage: str = "") -> str:
        """Open a new trainer session; calls of older sessions raise SessionLost from now on.

        ``token`` opens a session again that a restored Redis has lost; raises SessionLost if that session was fenced.
        ``lineage`` names the checkpoint store; raises Conflict when this queue belongs to another one.
        """
        token = token or secrets.token_hex(16)
        await self._connection.run("open_trainer_session", token, name, lineage)
        return token

    async def close_session(self, trainer_session: str) -> None:
        """End the session: a recovery no longer waits for this trainer."""
        await self._connection.run("close_trainer_session", trainer_session)

    async def show_waits(self, text: str) -> None:
        """Show what the trainer waits for, with the last error; empty for nothing."""
        await self._connection.command("HSET", self._keys.single("meta"), "trainer_waits", text)

    async def waits(self) -> str:
        """Return what the trainer waits for, as it last said; empty for nothing."""
        return ((await self._connection.command("HGET", self._keys.single("meta"), "trainer_waits")) or b"").decode()

    async def state(self) -> TrainingState:
        """Return the training progress recorded in Redis."""
        recovering, _ = await self._connection.run("begin_recovery")
        fields = ("trained_step", "cut_step", "committed_step")
        values = await self._connection.command("HMGET", self._keys.single("meta"), *fields)
        trained, cut, committed = (int(v or 0) for v in values)
        return TrainingState(trained_step=trained, cut_step=cut, committed_step=committed, recovering=bool(recovering))

    async def claim(self, trainer_session: str, train_step: int, timeout: float) -> Batch | None:
        """Read the batch of a train step; waits up to ``timeout`` seconds for its cut and returns None without one.

        A claim only reads and may be repeated until ``confirm_batch_file``. Raises Conflict when the batch file exists
        already, and StoreUnavailable when Redis came back in between: it may have lost the cut, or tokens.
        """
        groups = await self._claim_groups(trainer_session, train_step)
        if not groups:
            before = f"{train_step - 1}-18446744073709551615"
            if not await self._connection.block_on_stream(self._keys.single("cuts"), before, timeout):
                return None
            groups = await self._claim_groups(trainer_session, train_step)
        if not groups:
            return None
        self._claimed[train_step] = tuple(group.group_id for group in groups)
        return Batch(train_step=train_step, groups=tuple(groups))

    async def _claim_groups(self, trainer_session: str, train_step: int) -> list[Group]:
        """Return the groups of the cut, all from the same server; empty without a cut."""
        size = await self._limits.groups_per_call()
        _, run_id = await self._connection.run("begin_recovery")
        groups: list[Group] = []
        while rows := await self._connection.run(
            "claim", trainer_session, train_step, len(groups), len(groups) + size - 1, _TOKENS_PER_CLAIM
        ):
            groups += await self._load_groups(rows)
            if len(groups) % size:
                break
        _, now = await self._connection.run("begin_recovery")
        if now != run_id:
            raise StoreUnavailable("Redis came back during a claim, perhaps with an earlier state; retry")
        return groups

    async def ready_groups(
        self, trainer_session: str, train_step: int, count: int, known: Collection[str]
    ) -> list[Group]:
        """Read ``count`` ready groups beyond the ``known`` ones before the cut of this batch, in admission order.

        The groups stay in the queue. Returns nothing while fewer groups are ready, and after the cut.
        """
        size = min(count, await self._limits.groups_per_call())
        rows = await self._connection.run(
            "ready_groups", trainer_session, train_step, size, _TOKENS_PER_CLAIM, *sorted(known)
        )
        try:
            return await self._load_groups(rows)
        except Conflict:  # A group left the queue between the two reads.
            return []

    async def confirm_batch_file(
        self, trainer_session: str, train_step: int, digest: str, group_ids: Sequence[str] | None = None
    ) -> None:
        """Confirm that the batch file is on disk and fsynced, so that Redis deletes the payloads.

        The file must contain the groups of the current cut (``group_ids``, by default those of the last claim). Raises
        Conflict when Redis came back with another cut in between: re-assert the file instead.
        """
        ids = self._claimed.get(train_step, ()) if group_ids is None else group_ids
        swept = await self._limits.groups_per_call()
        groups = int(await self._connection.run("confirm", trainer_session, train_step, digest, swept, *ids))
        if swept < groups:
            await sweep(self._connection, self._limits, train_step, first=swept)

    async def report_trained(self, trainer_session: str, train_step: int) -> None:
        """Consume a batch, cut(s) -> consumed(s): free its capacity and advance trained_step. Repeats are no-ops."""
        await self._connection.run("report_trained", trainer_session, train_step, _TOMBSTONE_STEPS)
        self._claimed.pop(train_step, None)

    async def report_committed(self, trainer_session: str, train_step: int) -> None:
        """Record that the trainer state of this step is committed on disk."""
        await self._connection.run("report_committed", trainer_session, train_step)

    async def reassert(
        self,
        trainer_session: str,
        committed_step: int,
        trained_step: int,
        batches: Sequence[tuple[int, Sequence[str]]],
        policies: Sequence[PolicyRecord],
        cursor: Cursor,
        digests: Sequence[str] | None = None,
        *,
        known_step: int = 0,
        outcomes: Sequence[Sequence[PromptOutcome]] = (),
    ) -> TrainingState:
        """Write the state of the checkpoint store to Redis, at every start and when the server's run_id has changed.

        ``batches`` are the batch files as (train_step, group ids in order). Groups of steps up to ``trained_step``
        become consumed, groups of later steps cut and confirmed, even if the restored Redis has them as open, ready or
        never admitted. Steps, versions and cursor never decrease. Steps that Redis has as trained are skipped. A
        recovery ends once its TTL has passed. A session that Redis has lost becomes the newest; raises SessionLost for
        a session that was ever fenced.

        ``batches`` may begin after ``known_step``, a trained step returned by ``state``. Raises
        StoreUnavailable when Redis has lost that step, or comes back during the call: it came back with an earlier
        state and needs more batches.

        ``outcomes`` are those of each batch file, for the prompt history.

        If Redis has lost a rollback, its unclaimed work is dropped again before the rollback's version is announced,
        because all of that work is older. A rollback whose trainer died before its end is finished.
        """
        _, run_id = await self._connection.run("begin_recovery")
        known = (await self.state()).trained_step
        if known < known_step:
            raise StoreUnavailable(
                f"Redis came back with an earlier state: its trained step was {known_step} and is now {known}; retry"
            )
        size = await self._limits.groups_per_call()
        unknown = [(at, step, group_ids) for at, (step, group_ids) in enumerate(batches) if step > known]
        for at, step, group_ids in unknown:
            digest = digests[at] if digests is not None else _UNKNOWN_DIGEST
            trained = int(step <= trained_step)
            await self._connection.run("reassert_groups", trainer_session, step, digest, trained, *group_ids)
            for part in slices(group_ids, size):
                await self._connection.run("forget_groups", trainer_session, *part)
        # A group may be in a later batch than its outcome: only one that no batch has ends again.
        for at, step, _ in unknown:
            await self._records.save(trainer_session, step, outcomes[at] if outcomes else (), run_id)
        # A damaged file has no outcomes; those of the next file may follow.
        await self._records.save(trainer_session, trained_step, (), run_id)
        newest = max((step for step, _ in batches), default=0)
        words = [
            word
            for p in sorted(policies, key=lambda record: record.policy_version)
            for word in (p.policy_version, p.train_step, p.path, p.manifest_digest)
        ]
        if await self._needs_rollback(policies):
            await self.roll_back(trainer_session)
        steps = (committed_step, trained_step, newest)
        await self._connection.run("reassert_done", trainer_session, *steps, cursor.epoch, cursor.index, run_id, *words)
        return await self.state()

    async def roll_back(self, trainer_session: str) -> int:
        """Drop all unclaimed groups (``rolled_back``) before training continues from an older policy.

        A cut without a confirmed batch file is reverted first, and nothing is cut until the last group is dropped. If
        the trainer dies in between, the next trainer finishes the rollback (``reassert``). Returns the number
        of dropped groups.
        """
        size, nonce, total, left = await self._limits.groups_per_call(), secrets.token_hex(8), 0, True
        while left:
            dropped, left = await self._connection.run("roll_back", trainer_session, size, nonce)
            total += dropped
        return total

    async def _needs_rollback(self, policies: Sequence[PolicyRecord]) -> bool:
        """Tell whether a rollback is unfinished, or a policy belongs to a rollback that Redis has lost.

        Such a policy is not announced in Redis. It has more rollbacks than the policy before it, or its train step.
        """
        if await self._connection.command("HGET", self._keys.single("meta"), "abandoned_to") is not None:
            return True
        newest = await self._policies.latest()
        unknown = sorted(policies, key=lambda p: p.policy_version)
        if newest is not None:
            unknown = [newest, *(p for p in unknown if p.policy_version > newest.policy_version)]
        for before, after in itertools.pairwise(unknown):
            # An empty Redis tells nothing of the versions between, which are pruned: their rollback may be long ago.
            known = newest is not None or after.policy_version == before.policy_version + 1
            rolled_back = known and after.rollback_count > before.rollback_count
            if rolled_back or after.train_step <= before.train_step:
                return True
        return False

    async def _load_groups(self, rows: Sequence[Reply]) -> list[Group]:
        """Return the groups of rows (group id, admission index, scored members, payload) with prompt and tokens.

        A missing payload takes one round trip, linked chunks another.
        """
        missing = [command for row in rows if not row[3] for command in self._payload_reads(row)]
        read = iter(await self._connection.commands(missing))
        prompts: list[Prompt] = []
        elements: dict[str, list[bytes]] = {}
        teachers: dict[str, bytes] = {}
        for group_id, _, members, payload in rows:
            parts = iter(payload) if payload else read
            if (prompt := next(parts)) is None:
                raise Conflict(f"group {group_id.decode()} was cut and its payload is deleted: read its batch file")
            prompts.append(decode_prompt(prompt))
            for member in members:
                elements[_member_id(group_id, member)] = next(parts)
                if member[6]:
                    teachers[_member_id(group_id, member)] = next(parts)
        chunks = await load_chunks(self._connection, elements)
        if None in teachers.values() or any(None in found.values() for found in chunks.values()):
            raise Conflict("a group left the queue while its payload was read: read its batch file")

        def trajectory(prompt: Prompt, trajectory_id: str, member: Sequence[Reply]) -> Trajectory:
            segments = decode_segments(elements[trajectory_id], chunks[trajectory_id])
            _, birth, finish, outcome, reward, kept, _ = member
            return build_trajectory(
                trajectory_id,
                prompt,
                segments,
                birth_version=int(birth),
                finish=finish,
                outcome=outcome,
                reward=reward,
                run=self._keys.run,
                kept=kept,
                teacher=teachers.get(trajectory_id),
            )

        return [
            Group(
                group_id=group_id.decode(),
                admission_index=int(index),
                trajectories=tuple(trajectory(prompt, _member_id(group_id, m), m) for m in members),
            )
            for (group_id, index, members, _), prompt in zip(rows, prompts, strict=True)
        ]

    def _payload_reads(self, row: Sequence[Reply]) -> Iterator[tuple[str | int, ...]]:
        """Yield the commands that read the payload of a row, in the order of lib/batch_rows.lua."""
        group_id, _, members, _ = row
        yield "GET", self._keys.of("prompt", group_id.decode())
        for member in members:
            trajectory_id = _member_id(group_id, member)
            yield "LRANGE", self._keys.of("segments", trajectory_id), 0, -1
            if member[6]:
                yield "HGET", self._keys.of("trajectory", trajectory_id), "teacher"


def _member_id(group_id: bytes, member: Sequence[Reply]) -> str:
    return f"{group_id.decode()}.{member[0]}"


class StepReports(QueuePart):
    """Step reports by train step: JSON objects with at least a ``train_step``."""

    async def write(self, trainer_session: str, after: int, records: Sequence[Mapping[str, Any]] = ()) -> None:
        """Replace every report above train step ``after`` by ``records``, which are ascending and all above it.

        Repeats are no-ops. A step that is trained again replaces its report and all later ones. Raises SessionLost when
        a newer trainer session is open.
        """
        for part in slices(records, _REPORTS_PER_CALL) or [()]:
            words: list[str | int] = []
            for record in part:
                words += [int(record["train_step"]), json.dumps(record, separators=(",", ":"), allow_nan=False)]
            await self._connection.run("report_steps", trainer_session, after, KEPT_REPORTS, *words)
            after = int(part[-1]["train_step"]) if part else after

    async def read(self, first_step: int, limit: int) -> list[dict[str, Any]]:
        """Return at most ``limit`` reports from ``first_step`` on, ascending."""
        members = await self._connection.command(
            "ZRANGE", self._keys.single("reports"), first_step, "+inf", "BYSCORE", "LIMIT", 0, limit
        )
        return [json.loads(member) for member in members]
