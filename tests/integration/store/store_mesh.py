"""A small mesh around a real store, every key of a run as plain values, and a Redis that forgets an upload."""

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollmesh.mesh import Cursor, Desired, RunLimits
from rollmesh.prompt_history import PromptOutcome
from rollmesh.segments import slice_segment
from rollmesh.store import (
    Append,
    EmbeddedServer,
    Finish,
    HeldTokens,
    LeasedTrajectory,
    NewGroup,
    Score,
    TokenDigest,
    TrajectoryStore,
)
from rollmesh.store.scripts import UploadExpired
from rollmesh.types import (
    Batch,
    FinishReason,
    OutcomeKind,
    PolicyRecord,
    Prompt,
    RewardOutcome,
    Segment,
    TeacherColumn,
)
from rollmesh.wire.codec import teacher_to_pb

from ...kit.records import environment_tokens, policy_record, policy_tokens


def limits(**changes: object) -> RunLimits:
    values: dict[str, object] = {
        "group_size": 2,
        "groups_per_batch": 2,
        "max_staleness": 1,
        "max_attempts": 3,
        "session_ttl_seconds": 30.0,
        "filter_zero_variance": False,
        "mask_old_segments": False,
        "train_steps": 100,
    }
    return RunLimits(**{**values, **changes})  # type: ignore[arg-type]


def policy(version: int, train_step: int | None = None, *, rollbacks: int = 0) -> PolicyRecord:
    record = policy_record(version, train_step)
    return replace(record, path=f"{record.path}r{rollbacks}") if rollbacks else record


def prompt(index: int, tokens: int = 4) -> Prompt:
    ids = np.arange(index, index + tokens, dtype=np.int32)
    return Prompt(prompt_id=str(index), token_ids=ids, verifier="exact", metadata={"answer": str(index)})


def group(index: int, needed: int = 2, epoch: int = 0, prompt_tokens: int = 4, spare: int = 0) -> NewGroup:
    return NewGroup(
        group_id=f"e{epoch}-{index}",
        prompt=prompt(index, prompt_tokens),
        needed=needed,
        epoch=epoch,
        index=index,
        spare_members=spare,
    )


def segment(tokens: int, version: int = 0, start: int = 0) -> Segment:
    return policy_tokens(range(start, start + tokens), version, behavior_logprobs=-np.ones(tokens, dtype=np.float32))


def environment_segment(tokens: int) -> Segment:
    return environment_tokens(range(tokens))


def scored(value: float) -> RewardOutcome:
    return RewardOutcome(kind=OutcomeKind.SCORED, value=value, parts={"exact": value})


def column(tokens: int, top_k: int = 0, digest: str = "ab" * 32) -> TeacherColumn:
    """Return a teacher's scores of a response; each token has other ones."""
    logprobs = -np.arange(1, tokens + 1, dtype=np.float32)
    top = np.subtract.outer(logprobs, np.arange(top_k, dtype=np.float32))
    return TeacherColumn(
        teacher="math",
        manifest_digest=digest,
        logprobs=logprobs,
        top_ids=np.arange(tokens * top_k, dtype=np.int32).reshape(tokens, top_k) if top_k else None,
        top_logprobs=top if top_k else None,
    )


def column_bytes(value: TeacherColumn | None) -> bytes:
    """Return the scores as Redis has them."""
    return b"" if value is None else teacher_to_pb(value).SerializeToString(deterministic=True)


def digest_of(segments: Iterable[Segment], token_count: int) -> TokenDigest:
    """Digest of the first tokens of some segments."""
    digest = TokenDigest()
    for part in segments:
        if token_count > digest.token_count:
            digest = digest.extended([slice_segment(part, 0, token_count - digest.token_count)])
    return digest


def held(trajectory_id: str, *segments: Segment, incarnation: int = 0) -> HeldTokens:
    """Return the statement of a worker with these tokens in its memory."""
    return HeldTokens(
        trajectory_id=trajectory_id,
        incarnation=incarnation,
        token_count=lambda: sum(map(len, segments)),
        digest_at=lambda count: digest_of(segments, count),
    )


async def known(store: TrajectoryStore, trajectory_id: str, offset: int) -> dict[str, Any]:
    """Return a worker's statement of the tokens that it read from the queue; its own tokens follow them."""
    found = await store.inspection.inspect(trajectory_id)
    digest = digest_of(found.trajectory.segments if found and found.trajectory else (), offset)
    key = store.connection.keys.of("trajectory", trajectory_id)
    return {
        "trajectory_id": trajectory_id,
        "token_offset": offset,
        "incarnation": int(await store.connection.command("HGET", key, "incarnation") or 0),
        "digest": digest.extended([segment(offset - digest.token_count)]),
    }


def earlier_state(server: EmbeddedServer) -> Callable[[], None]:
    """Return a function that kills the server, which then comes back with the state that it has now."""
    files, earlier = server.folder / "appendonlydir", server.folder / "earlier"
    shutil.rmtree(earlier, ignore_errors=True)
    shutil.copytree(files, earlier)

    def come_back() -> None:
        server.kill()
        shutil.rmtree(files)
        shutil.copytree(earlier, files)
        server.start()

    return come_back


UNSCORABLE = RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message="broke")


@dataclass
class Mesh:
    """A store with a leader, a trainer and one worker session."""

    store: TrajectoryStore
    leader: str
    trainer: str
    session: str

    @classmethod
    async def start(
        cls,
        store: TrajectoryStore,
        pool_size: int = 64,
        *,
        groups: int = 0,
        leased: int = 0,
        completed: bool = False,
        **changes: object,
    ) -> "Mesh":
        """Begin a run with so many groups; the worker has leased so many of their trajectories, or completed all."""
        await store.limits.init_run(limits(**changes))
        leader = await store.leadership.acquire("leader")
        assert leader is not None
        trainer = await store.training.open_session("trainer")
        await store.policies.announce(trainer, policy(0))
        await store.leadership.set_desired(leader, Desired(pool_size=pool_size))
        mesh = cls(store, leader, trainer, await store.sessions.open("worker"))
        if groups:
            await mesh.admit(groups)
        if leased:
            await store.trajectories.lease(mesh.session, leased)
        if completed:
            await mesh.complete_all()
        return mesh

    async def admit(self, count: int, needed: int = 2, spare: int = 0) -> int:
        before = await self.store.leadership.cursor()
        groups = [group(before.index + i, needed, spare=spare) for i in range(count)]
        return await self.store.leadership.admit(
            self.leader, groups, before, Cursor(epoch=0, index=before.index + count)
        )

    async def append(self, trajectory_id: str, offset: int, tokens: int, version: int = 0) -> int:
        segments = [segment(tokens, version, offset)]
        item = Append(segments=segments, **await known(self.store, trajectory_id, offset))
        return (await self.store.trajectories.append(self.session, [item]))[0].status

    async def finish(self, trajectory_id: str, offset: int, tokens: int, version: int = 0) -> int:
        segments = [segment(tokens, version, offset)] if tokens else []
        before = await known(self.store, trajectory_id, offset)
        item = Finish(segments=segments, finish_reason=FinishReason.STOP, **before)
        return (await self.store.trajectories.finish(self.session, [item]))[0].status

    async def score(self, trajectory_id: str, value: float | None, teacher: TeacherColumn | None = None) -> int:
        outcome = UNSCORABLE if value is None else scored(value)
        item = Score(trajectory_id=trajectory_id, outcome=outcome, shaped_reward=value or 0.0, teacher=teacher)
        return (await self.store.trajectories.score(self.session, [item]))[0].status

    async def complete(self, leased: LeasedTrajectory, value: float | None, version: int = 0) -> None:
        """Write five tokens, finish and score."""
        trajectory = leased.trajectory
        offset = trajectory.response_token_count
        assert await self.append(trajectory.trajectory_id, offset, 3, version) == 1
        assert await self.finish(trajectory.trajectory_id, offset + 3, 2, version) == 1
        assert await self.score(trajectory.trajectory_id, value) == 1

    async def save_outcomes(self, train_step: int, outcomes: Sequence[PromptOutcome]) -> None:
        run_id = await self.store.recovery.server_run_id()
        await self.store.prompt_records.save(self.trainer, train_step, outcomes, run_id)

    async def lease_ids(self, limit: int, new_limit: int | None = None) -> list[str]:
        leased = await self.store.trajectories.lease(self.session, limit, new_limit)
        return [item.trajectory.trajectory_id for item in leased]

    async def lease_all(self) -> None:
        """Lease everything that waits."""
        while await self.store.trajectories.lease(self.session, 64):
            pass

    async def claim(self, train_step: int) -> Batch:
        batch = await self.store.training.claim(self.trainer, train_step, 1.0)
        assert batch is not None
        return batch

    async def train(
        self, train_step: int, group_ids: Sequence[str] = (), *, tombstone_steps: int = 256
    ) -> list[PromptOutcome]:
        """Cut a batch, if it is not, write its file and train on it; returns the outcomes of the file."""
        if group_ids:
            await self.store.leadership.cut(self.leader, train_step, group_ids)
        await self.claim(train_step)
        outcomes = await self.store.prompt_records.unsaved(self.trainer, train_step)
        await self.store.training.confirm_batch_file(self.trainer, train_step, f"digest-{train_step}")
        await self.save_outcomes(train_step, outcomes)
        await self.store.connection.run("report_trained", self.trainer, train_step, tombstone_steps)
        return outcomes

    async def complete_all(self, version: int = 0) -> int:
        """Lease and complete everything that waits; rewards differ within a group."""
        done = 0
        while leased := await self.store.trajectories.lease(self.session, 64):
            for item in leased:
                await self.complete(item, float(item.trajectory.member_index), version)
                done += 1
        return done


_READ = {
    b"string": ("GET",),
    b"hash": ("HGETALL",),
    b"list": ("LRANGE", 0, -1),
    b"set": ("SMEMBERS",),
    b"zset": ("ZRANGE", 0, -1, "WITHSCORES"),
    b"stream": ("XRANGE", "-", "+"),
}


async def dump(store: TrajectoryStore) -> dict[str, tuple[object, bool]]:
    """Value by key, and whether the key will go away by itself."""
    command, found = store.connection.command, {}
    for key in sorted(await command("KEYS", store.connection.keys.prefix + "*")):
        verb, *arguments = _READ[await command("TYPE", key)]
        value = await command(verb, key, *arguments)
        # The server may list these in another order the next time.
        plain = sorted(value) if isinstance(value, set) or verb == "SMEMBERS" else value
        found[key.decode()] = (plain, await command("PTTL", key) != -1)
    return found


def changed(before: dict[str, tuple[object, bool]], after: dict[str, tuple[object, bool]]) -> list[str]:
    """Keys that are not what they were."""
    return sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))


async def copy_of_keys(store: TrajectoryStore) -> dict[bytes, bytes]:
    """Every key of a run as the server would write it down."""
    command = store.connection.command
    keys = await command("KEYS", store.connection.keys.prefix + "*")
    return dict(zip(keys, await store.connection.commands([("DUMP", key) for key in keys]), strict=True))


async def put_back(store: TrajectoryStore, copy: dict[bytes, bytes]) -> None:
    """Make a run what it was when it was copied."""
    keys = await store.connection.command("KEYS", store.connection.keys.prefix + "*")
    await store.connection.commands([("DEL", key) for key in keys])
    await store.connection.commands([("RESTORE", key, 0, value) for key, value in copy.items()])


class Forgetful:
    """Redis as it is after a kill between the uploads and the script, once: the upload in question is gone."""

    def __init__(self, store: TrajectoryStore, script: str, upload: str) -> None:
        self.store, self.script, self.upload = store, script, upload
        self.refused = 0
        self._run = store.connection.run
        store.connection.run = self.run  # type: ignore[method-assign,assignment]

    async def run(self, name: str, *arguments: Any) -> Any:
        if name != self.script:
            return await self._run(name, *arguments)
        command = self.store.connection.command
        lost = [key for key in await command("KEYS", self.upload) if await command("TTL", key) != -1]
        assert len(lost) == 1
        await command("DEL", *lost)
        before = await dump(self.store)
        try:
            return await self._run(name, *arguments)
        except UploadExpired:
            self.refused += 1
            self.store.connection.run = self._run  # type: ignore[method-assign]
            assert changed(before, await dump(self.store)) == []
            raise
