"""Generators and rewards that follow a script, in this process, behind the rollout service's own seams.

Tokens depend on (trajectory, position) alone, so a trajectory that went through interruptions, other generators and
other workers can be compared token for token with what it must be.
"""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollmesh.errors import EngineError, GenerationRefused, StoreUnavailable
from rollmesh.mesh import Cursor
from rollmesh.store import TrajectoryStore
from rollmesh.types import (
    ANY_VERSION,
    Batch,
    Chunk,
    FinishReason,
    GenerationCall,
    GeneratorRecord,
    OutcomeKind,
    PolicyRecord,
    Prompt,
    RewardOutcome,
    Trajectory,
    VersionNeed,
)

from ...kit.records import generator_record, policy_record

VOCAB = 50
STOP = 7
_GENERATOR_TTL_SECONDS = 60.0
"""No session expires here: a dead worker closes its own."""


def token_at(trajectory_id: str, position: int) -> int:
    """The token that every generator writes at a position; never the stop token."""
    digest = hashlib.blake2b(f"{trajectory_id}:{position}".encode(), digest_size=4).digest()
    return STOP + 1 + int.from_bytes(digest, "big") % (VOCAB - STOP - 1)


def length_of(trajectory_id: str, longest: int) -> int:
    """Tokens of the whole answer, the stop token included."""
    digest = hashlib.blake2b(trajectory_id.encode(), digest_size=4).digest()
    return 1 + int.from_bytes(digest, "big") % longest


def answer_of(trajectory_id: str, longest: int) -> list[int]:
    """The complete answer."""
    length = length_of(trajectory_id, longest)
    return [token_at(trajectory_id, i) for i in range(length - 1)] + [STOP]


Fault = Callable[[Chunk], Chunk]


@dataclass
class ScriptedGenerator:
    """One generator: serves a version, may be told to misbehave."""

    name: str
    version: int = 0
    slots: int = 8
    longest: int = 40
    seconds_per_token: float = 0.0
    fault: Fault | None = None
    hang: bool = False
    dead: bool = False
    stop_every: int | None = None
    """Turns of so many tokens instead of one answer: a stop token at every multiple of this position."""
    keep_kv: bool = False
    """Swap versions under running calls instead of interrupting them."""
    running: dict[str, asyncio.Event] = field(default_factory=dict)
    calls: int = 0
    refuses: int | None = None
    """Version that it has tried and does not serve."""

    @property
    def record(self) -> GeneratorRecord:
        return generator_record(
            self.name,
            policy_version=self.version,
            running_count=len(self.running),
            slot_count=self.slots,
            kv_token_capacity=1 << 16,
            serving=not self.dead,
            refused_version=self.refuses,
            refused_count=0 if self.refuses is None else 1,
            refused_reason="" if self.refuses is None else "canary: nan",
        )

    def load(self, version: int) -> None:
        self.version = version
        if not self.keep_kv:
            for stop in self.running.values():
                stop.set()

    def _continuation(self, trajectory_id: str, written: int) -> list[int]:
        if self.stop_every is None:
            return answer_of(trajectory_id, self.longest)[written:]
        end = written - written % self.stop_every + self.stop_every
        return [token_at(trajectory_id, i) for i in range(written, end - 1)] + [STOP]

    async def generate(self, call: GenerationCall) -> AsyncGenerator[Chunk, None]:
        self.calls += 1
        stop = self.running[call.trajectory_id] = asyncio.Event()
        try:
            written = len(call.context_ids) - call.prompt_token_count
            answer = self._continuation(call.trajectory_id, written)[: call.max_new_token_count]
            version, at = self.version, 0
            while True:
                part = []
                while at < len(answer) and len(part) < call.chunk_token_count and self.version == version:
                    if self.dead:
                        raise EngineError(f"{self.name}: connection lost")
                    if stop.is_set():
                        break
                    part.append(answer[at])
                    at += 1
                    await asyncio.sleep(self.seconds_per_token)
                if self.hang:
                    await asyncio.sleep(3600)
                finish = None
                if at == len(answer):
                    stopped = bool(answer) and answer[-1] == STOP
                    finish = FinishReason.STOP if stopped else FinishReason.LENGTH
                elif stop.is_set():
                    finish = FinishReason.INTERRUPTED
                chunk = Chunk(
                    token_ids=np.array(part, np.int32),
                    behavior_logprobs=np.array([-float(t) for t in part], np.float32),
                    policy_version=version,
                    kv_min_version=version,
                    finish_reason=finish,
                )
                yield self.fault(chunk) if self.fault is not None else chunk
                if finish is not None:
                    return
                version = self.version
        finally:
            del self.running[call.trajectory_id]


class ScriptedCluster:
    """A stand-in for ``GenerationClient`` over scripted generators, registered in the real store."""

    def __init__(self, store: TrajectoryStore, generators: Sequence[ScriptedGenerator]) -> None:
        self.store = store
        self.generators = {g.name: g for g in generators}
        self.acknowledged: dict[str, int] = {}
        self.contexts: dict[str, list[list[int]]] = {}
        """Response tokens that each call began with, by trajectory."""

    async def register(self) -> None:
        for generator in self.generators.values():
            if generator.dead:
                await self.store.generators.deregister(generator.name)
            else:
                await self.store.generators.register(generator.record, _GENERATOR_TTL_SECONDS)

    async def generate(
        self, record: GeneratorRecord, call: GenerationCall, need: VersionNeed = ANY_VERSION, *, traceparent: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        generator = self.generators[record.instance_id]
        if not need.allows(generator.version):
            raise GenerationRefused(f"{generator.name} serves {generator.version}, not {need}")
        if call.trajectory_id in generator.running:
            raise GenerationRefused("already running here")
        response = call.context_ids[call.prompt_token_count :].tolist()
        self.contexts.setdefault(call.trajectory_id, []).append(response)
        async for chunk in generator.generate(call):
            yield chunk

    async def interrupt(self, record: GeneratorRecord, trajectory_ids: Sequence[str]) -> int:
        running = self.generators[record.instance_id].running
        for trajectory_id in trajectory_ids:
            if trajectory_id in running:
                running[trajectory_id].set()
        return len(trajectory_ids)

    async def acknowledge(self, record: GeneratorRecord, context_token_counts: Mapping[str, int]) -> None:
        self.acknowledged.update(context_token_counts)


@dataclass
class ScriptedReward:
    """A stand-in for ``RewardClient``: value by trajectory, or whatever ``outcome`` says."""

    outcome: Callable[[Trajectory], RewardOutcome] | None = None
    batches: list[int] = field(default_factory=list)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[RewardOutcome]:
        self.batches.append(len(trajectories))
        await asyncio.sleep(0)
        return [self.outcome(t) if self.outcome else _value(t) for t in trajectories]


def _value(trajectory: Trajectory) -> RewardOutcome:
    return RewardOutcome(kind=OutcomeKind.SCORED, value=float(trajectory.member_index % 2))


class ScriptedPrompts:
    """Endless prompts of three tokens."""

    epoch_size = 1000
    content = ""

    def prompt(self, epoch: int, index: int) -> Prompt:
        ids = np.array([1, 2, 3 + index % 4], np.int32)
        return Prompt(prompt_id=f"{epoch}:{index}", token_ids=ids, verifier="exact", metadata={"index": index})


def record_of(step: int) -> PolicyRecord:
    return policy_record(step)


@dataclass
class ScriptedTrainer:
    """Claims, confirms, trains in no time and announces the next policy."""

    store: TrajectoryStore
    cluster: ScriptedCluster
    session: str = ""
    batches: list[Batch] = field(default_factory=list)

    async def start(self) -> None:
        self.session = await self.store.training.open_session("trainer")
        await self.store.training.reassert(self.session, 0, 0, [], [], Cursor())
        await self.announce(0)

    async def reassert(self) -> None:
        """State the batches on disk to a restarted Redis, as a trainer does."""
        trained = len(self.batches)
        batches = [(b.train_step, [g.group_id for g in b.groups]) for b in self.batches]
        policies = [record_of(step) for step in range(trained + 1)]
        await self.store.training.reassert(self.session, trained, trained, batches, policies, Cursor())

    async def announce(self, step: int) -> None:
        await self.store.policies.announce(self.session, record_of(step))
        for generator in self.cluster.generators.values():
            generator.load(step)
        await self.cluster.register()

    async def train(self, step: int, timeout: float = 120.0) -> Batch:
        """One step; renews the generators' records while it waits."""
        async with asyncio.timeout(timeout):
            while True:
                try:
                    await self.cluster.register()
                    if (await self.store.training.state()).recovering:
                        await self.reassert()
                    batch = await self.store.training.claim(self.session, step, timeout=0.2)
                except StoreUnavailable:
                    await asyncio.sleep(0.1)
                    continue
                if batch is not None:
                    break
        await self.store.training.confirm_batch_file(self.session, step, f"digest-{step}")
        await self.store.training.report_trained(self.session, step)
        await self.announce(step)
        self.batches.append(batch)
        return batch
