"""The trainer's side: session, claim, batch file, trained, committed, and the re-assertion after a restart."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from rollmesh.errors import Conflict
from rollmesh.mesh import Cursor
from rollmesh.store.connection import Argument, Connection, Reply
from rollmesh.store.leader import sweep
from rollmesh.store.limits import Limits
from rollmesh.store.payload import build_trajectory, decode_prompt, decode_segments
from rollmesh.store.trajectories import load_chunks, slices
from rollmesh.store.types import TrainingState
from rollmesh.types import Batch, Group, PolicyRecord, Prompt, Segment, Trajectory

_TOMBSTONE_STEPS = 256
"""Train steps for which consumed and dropped groups are remembered one by one; older ones lie below the floor."""
_UNKNOWN_DIGEST = "unknown"
"""Digest of a re-asserted batch file whose digest was not given; the next confirmation brings it."""


class Training:
    """What rank 0 of the trainer does with the queue."""

    def __init__(self, connection: Connection, limits: Limits) -> None:
        self._connection = connection
        self._keys = connection.keys
        self._limits = limits
        self._claimed: dict[int, tuple[str, ...]] = {}

    async def open_trainer_session(self, name: str, token: str | None = None, *, lineage: str = "") -> str:
        """A new trainer session; older ones are refused (SessionLost) from now on.

        ``token`` opens a session again that a restored Redis has forgotten; SessionLost if it was fenced. ``lineage``
        names the checkpoint store; Conflict when this queue was filled for another one.
        """
        token = token or secrets.token_hex(16)
        await self._connection.run("open_trainer_session", token, name, lineage)
        return token

    async def close_trainer_session(self, trainer_session: str) -> None:
        """End the session: a recovery no longer waits for this trainer."""
        await self._connection.run("close_trainer_session", trainer_session)

    async def training_state(self) -> TrainingState:
        """Steps as Redis knows them."""
        recovering, _ = await self._connection.run("begin_recovery")
        fields = ("trained_step", "cut_step", "committed_step")
        values = await self._connection.command("HMGET", self._keys.single("meta"), *fields)
        trained, cut, committed = (int(v or 0) for v in values)
        return TrainingState(trained_step=trained, cut_step=cut, committed_step=committed, recovering=bool(recovering))

    async def claim(self, trainer_session: str, train_step: int, timeout: float) -> Batch | None:
        """Read the batch of a train step, waiting up to ``timeout`` seconds for its cut; None without one.

        Reads only: it may be repeated until ``confirm_batch_file``. Conflict when the batch file exists already.
        """
        size = await self._limits.groups_per_call()
        rows = await self._connection.run("claim", trainer_session, train_step, 0, size - 1)
        if not rows:
            before = f"{train_step - 1}-18446744073709551615"
            if not await self._connection.block_on_stream(self._keys.single("cuts"), before, timeout):
                return None
            rows = await self._connection.run("claim", trainer_session, train_step, 0, size - 1)
        groups: list[Group] = []
        while rows:
            groups += await self._load_groups([rows[at : at + 3] for at in range(0, len(rows), 3)])
            first = len(groups)
            if first % size:
                break
            rows = await self._connection.run("claim", trainer_session, train_step, first, first + size - 1)
        if not groups:
            return None
        self._claimed[train_step] = tuple(group.group_id for group in groups)
        return Batch(train_step=train_step, groups=tuple(groups))

    async def confirm_batch_file(
        self, trainer_session: str, train_step: int, digest: str, group_ids: Sequence[str] | None = None
    ) -> None:
        """The batch file is on disk and fsynced: Redis may drop the payloads.

        The file must hold the groups of the cut as it is now (``group_ids``, by default those of the last claim);
        Conflict when Redis came back with another cut meanwhile: re-assert the file instead.
        """
        ids = self._claimed.get(train_step, ()) if group_ids is None else group_ids
        confirm: tuple[Argument, ...] = ("confirm", trainer_session, train_step, digest, *ids)
        await sweep(self._connection, self._limits, train_step, after=confirm)

    async def report_trained(self, trainer_session: str, train_step: int) -> None:
        """cut(s) -> consumed(s): refunds the capacity of the batch and advances trained_step. Repeats are no-ops."""
        await self._connection.run("report_trained", trainer_session, train_step, _TOMBSTONE_STEPS)
        self._claimed.pop(train_step, None)

    async def report_committed(self, trainer_session: str, train_step: int) -> None:
        """The trainer state of this step is committed on disk."""
        await self._connection.run("report_committed", trainer_session, train_step)

    async def reassert_training(
        self,
        trainer_session: str,
        committed_step: int,
        trained_step: int,
        batches: Sequence[tuple[int, Sequence[str]]],
        policies: Sequence[PolicyRecord],
        cursor: Cursor,
        digests: Sequence[str] | None = None,
    ) -> TrainingState:
        """Tell Redis what the checkpoint store knows, at every start and when the server's run_id has changed.

        ``batches`` are the batch files as (train_step, group ids in order). Groups of steps up to ``trained_step``
        become consumed, later ones cut and confirmed, even if the restored Redis shows them open, ready or never
        admitted. Steps, versions and cursor never go back. Steps that Redis knows as trained are skipped: its own
        state covers them. Ends a recovery once its TTL has passed. A session that was opened in the part that Redis
        has lost is taken as the newest; SessionLost for one that was ever fenced.

        A Redis that has forgotten a rollback drops its unclaimed work again before it learns the rollback's version:
        all of it is older than that.
        """
        known = (await self.training_state()).trained_step
        size = await self._limits.groups_per_call()
        for at, (step, group_ids) in enumerate(batches):
            if step <= known:
                continue
            digest = digests[at] if digests is not None else _UNKNOWN_DIGEST
            trained = int(step <= trained_step)
            for number, part in enumerate(slices(group_ids, size)):
                await self._connection.run(
                    "reassert_groups", trainer_session, step, digest, trained, int(number == 0), *part
                )
        newest = max((step for step, _ in batches), default=0)
        words = [
            word
            for p in sorted(policies, key=lambda record: record.policy_version)
            for word in (p.policy_version, p.train_step, p.path, p.manifest_digest)
        ]
        if await self._forgot_rollback(policies):
            await self.rollback(trainer_session)
        await self._connection.run(
            "reassert_done", trainer_session, committed_step, trained_step, newest, cursor.epoch, cursor.index, *words
        )
        return await self.training_state()

    async def rollback(self, trainer_session: str) -> int:
        """Drop all unclaimed work (``rolled_back``) before training goes on from an older policy.

        A cut without a confirmed batch file is taken back first. Returns how many groups were dropped.
        """
        newest = await self._connection.command("HGET", self._keys.single("meta"), "admission_seq")
        await self._connection.run("withdraw_cut", trainer_session)
        size = await self._limits.groups_per_call()
        total = 0
        while True:
            dropped = int(await self._connection.run("roll_back", trainer_session, size, newest or 0))
            if not dropped:
                return total
            total += dropped

    async def _forgot_rollback(self, policies: Sequence[PolicyRecord]) -> bool:
        """Whether one of the policies is of a rollback (the second of its train step) and not announced there."""
        meta = self._keys.single("meta")
        version, train_step = (
            int(v) for v in await self._connection.command("HMGET", meta, "policy_version", "policy_train_step")
        )
        for record in sorted(policies, key=lambda p: p.policy_version):
            if record.policy_version > version:
                if version >= 0 and record.train_step <= train_step:
                    return True
                version, train_step = record.policy_version, record.train_step
        return False

    async def _load_groups(self, rows: Sequence[Sequence[Reply]]) -> list[Group]:
        """Prompt and tokens of some groups in one round trip (and one more for linked chunks)."""
        commands: list[tuple[str | int, ...]] = []
        members: list[list[tuple[str, Sequence[Reply]]]] = []
        for gid, _, records in rows:
            group_id = gid.decode()
            members.append([(f"{group_id}.{record[0]}", record) for record in records])
            commands.append(("GET", self._keys.of("prompt", group_id)))
            commands += [("LRANGE", self._keys.of("segments", i), 0, -1) for i, _ in members[-1]]
        replies = iter(await self._connection.commands(commands))
        prompts: list[Prompt] = []
        elements: dict[str, list[bytes]] = {}
        for (gid, _, _), scored in zip(rows, members, strict=True):
            prompt = next(replies)
            if prompt is None:
                raise Conflict(f"group {gid.decode()} was cut, but its payload is gone: its batch file has it")
            prompts.append(decode_prompt(prompt))
            elements |= {i: next(replies) for i, _ in scored}
        chunks = await load_chunks(self._connection, elements)
        return [
            Group(
                group_id=gid.decode(),
                admission_index=int(index),
                trajectories=tuple(
                    _scored_trajectory(self._keys.run, i, prompt, decode_segments(elements[i], chunks[i]), record)
                    for i, record in scored
                ),
            )
            for (gid, index, _), scored, prompt in zip(rows, members, prompts, strict=True)
        ]


def _scored_trajectory(
    run: str, trajectory_id: str, prompt: Prompt, segments: tuple[Segment, ...], record: Sequence[Reply]
) -> Trajectory:
    _, birth, finish, outcome, reward = record
    return build_trajectory(
        trajectory_id,
        prompt,
        segments,
        birth_version=int(birth),
        finish=finish,
        outcome=outcome,
        reward=reward,
        run=run,
    )
