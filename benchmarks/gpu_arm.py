"""One arm of ``bench gpu``: calls on the shared engine until a batch is complete, then a train step, in turns.

The queue is the model of the real one (``sim.queue_model``), so leases, partial trajectories and cuts are those
of a mesh. ``sync`` opens one batch of groups per update and waits for all of them. ``copris_paper`` keeps ``pool_size``
calls in progress, takes the first complete groups, interrupts the rest and continues it first after the update.
"""

import asyncio
import shutil
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from benchmarks.workloads import group_of, make_call, random_ids, scored
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.mesh import Desired, RunLimits
from rollmesh.segments import join_segments
from rollmesh.sim.queue_model import GroupState, QueueModel, Save
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Batch, FinishReason, Prompt, Segment, Trajectory

_PHASES = ("load", "generate", "train", "export")
_WORKER = "worker"
_UNBOUNDED = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Stream of groups, equal in every arm: random prompts, and lognormal response lengths (sigma 1) that are forced.

    A random model has no meaningful lengths, and different weights must not give an arm shorter work.
    """

    vocab_size: int
    prompt_tokens: int
    median_length: int
    longest: int
    groups_per_batch: int
    group_size: int

    @property
    def batch_size(self) -> int:
        """Number of trajectories of a batch."""
        return self.groups_per_batch * self.group_size

    def group(self, number: int) -> "list[Member]":
        """Return the trajectories of one group, without tokens."""
        rng = np.random.default_rng((0, number))
        ids = random_ids(rng, self.vocab_size, self.prompt_tokens)
        lengths = np.clip(rng.lognormal(np.log(self.median_length), 1.0, self.group_size), 4, self.longest)
        prompt = Prompt(prompt_id=str(number), token_ids=ids, verifier="exact")
        return [Member(prompt=prompt, index=i, length=n) for i, n in enumerate(lengths.astype(int).tolist())]


@dataclass(slots=True, eq=False, kw_only=True)
class Member:
    """One trajectory: the work that is forced, and the tokens so far."""

    prompt: Prompt
    index: int
    length: int
    """Final number of response tokens."""
    segments: tuple[Segment, ...] = ()

    @property
    def token_count(self) -> int:
        """Number of response tokens so far."""
        return sum(len(segment) for segment in self.segments)

    @property
    def reward(self) -> float:
        """Reward of 0 or 1 by index: real gradients without a signal."""
        return float(self.index % 2)

    def trajectory(self) -> Trajectory:
        """Return the trajectory for the trainer."""
        finish_reason = None if self.token_count < self.length else FinishReason.LENGTH
        return scored(self.prompt, self.prompt.prompt_id, self.index, self.segments, self.reward, finish_reason)

    async def generate(self, engine: TorchEngine) -> None:
        """Sample the tokens that are missing, or those before an interruption."""
        prompt = self.prompt.token_ids
        context = np.concatenate([prompt, *(s.token_ids for s in self.segments)])
        name, missing = f"{self.prompt.prompt_id}.{self.index}", self.length - self.token_count
        call = make_call(name, context, missing, chunk_tokens=256, prompt_tokens=len(prompt))
        sampled = [
            Segment(
                token_ids=chunk.token_ids,
                behavior_logprobs=chunk.behavior_logprobs,
                policy_version=chunk.policy_version,
                kv_min_version=chunk.kv_min_version,
            )
            async for chunk in engine.generate(call)
            if len(chunk.token_ids)
        ]
        self.segments = join_segments([*self.segments, *sampled])


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Measurements of one update."""

    arm: str
    train_step: int
    seconds: dict[str, float]
    """Wall time by phase; ``train`` contains the paper's pass over the trajectories that are not in the batch."""
    generated_tokens: int
    """Tokens sampled during the update, trained on or not."""
    reprefilled_tokens: int
    """Response tokens whose cache was computed again."""
    untrained_tokens: int
    """Tokens sampled so far and not trained on."""
    most_running: int
    """Largest number of calls in progress."""
    lengths: dict[str, int]
    """Response length of every trained trajectory."""

    @property
    def trained_tokens(self) -> int:
        """Number of response tokens in the batch."""
        return sum(self.lengths.values())


class BenchArm:
    """One schedule with its queue and trainer; ``engine`` must be idle between updates. A pool of None is ``sync``."""

    def __init__(
        self, pool_size: int | None, workload: Workload, engine: TorchEngine, trainer: PolicyTrainer, root: Path
    ) -> None:
        self.name = "sync" if pool_size is None else f"copris_paper {pool_size}"
        self._pool_size = pool_size
        self._workload = workload
        self._engine = engine
        self._trainer = trainer
        self._root = root / self.name
        self._queue = _queue(pool_size or workload.batch_size, workload)
        self._members: dict[str, Member] = {}
        """Trajectories of the groups that are not trained yet."""
        self._running: dict[asyncio.Task[None], str] = {}
        self._most_running = 0
        trainer.export(self._policy_folder())

    async def update(self) -> Update:
        """Load the newest weights, generate a batch, train on it and write the policy; all of it is timed."""
        before, folder, step = self._engine.status(), self._policy_folder(), self._trainer.train_step
        self._most_running = 0
        marks = [time.perf_counter()]
        await self._engine.load(folder, self._queue.announce(step), OnNewVersion.DRAIN)
        marks.append(time.perf_counter())
        batch = await self._generate_batch(step + 1)
        marks.append(time.perf_counter())
        self._queue.confirm_batch_file()
        await asyncio.to_thread(self._train, batch, dict(enumerate(self._queue.version_steps)))
        self._queue.report_trained()
        marks.append(time.perf_counter())
        await asyncio.to_thread(self._trainer.export, self._policy_folder())
        marks.append(time.perf_counter())
        shutil.rmtree(folder)
        after = self._engine.status()
        return Update(
            arm=self.name,
            train_step=step + 1,
            seconds={phase: end - start for phase, (start, end) in zip(_PHASES, pairwise(marks), strict=True)},
            generated_tokens=after.generated_token_total - before.generated_token_total,
            reprefilled_tokens=after.reprefill_token_total - before.reprefill_token_total,
            untrained_tokens=sum(member.tokens for member in self._queue.members.values()),
            most_running=self._most_running,
            lengths={t.trajectory_id: t.response_token_count for g in batch.groups for t in g.trajectories},
        )

    async def _generate_batch(self, train_step: int) -> Batch:
        ready, wanted = self._queue.groups[GroupState.READY], self._workload.groups_per_batch
        while len(ready) < wanted:
            self._start_calls()
            await self._collect(asyncio.FIRST_COMPLETED)
        in_order = sorted(ready.values(), key=lambda group: group.index)
        if self._running:
            await self._engine.interrupt()
            await self._collect(asyncio.ALL_COMPLETED)
        self._queue.cut(train_step, [group.group_id for group in in_order[:wanted]])
        groups = [
            group_of(int(g.group_id), [self._members.pop(m.trajectory_id).trajectory() for m in g.members])
            for g in self._queue.claim()
        ]
        return Batch(train_step=train_step, groups=tuple(groups))

    def _start_calls(self) -> None:
        """Fill the pool: partial trajectories of the oldest groups, then new ones, then further groups.

        ``sync`` opens another group only while the batch has too few.
        """
        queue, batch = self._queue, self._workload.groups_per_batch
        free = queue.desired.pool_size - queue.leased
        while len(queue.pending) + len(queue.partial) < free and (self._pool_size or queue.admitted_unconsumed < batch):
            group = queue.admit(str(queue.admitted), self._workload.group_size)
            work = self._workload.group(int(group.group_id))
            self._members |= {m.trajectory_id: w for m, w in zip(group.members, work, strict=True)}
        for leased in queue.lease(_WORKER, free):
            call = self._members[leased.trajectory_id].generate(self._engine)
            self._running[asyncio.create_task(call)] = leased.trajectory_id
        self._most_running = max(self._most_running, len(self._running))

    async def _collect(self, until: str) -> None:
        """Wait for calls to end; save their tokens, and score the complete trajectories."""
        queue = self._queue
        done, _ = await asyncio.wait(self._running, return_when=until)
        for task in done:
            trajectory_id = self._running.pop(task)
            task.result()
            member = self._members[trajectory_id]
            save = Save(member.token_count - queue.members[trajectory_id].tokens, queue.policy_version)
            if member.token_count < member.length:
                queue.append(_WORKER, trajectory_id, save)
                queue.release(_WORKER, trajectory_id, free_attempt=True)
            else:
                queue.finish(_WORKER, trajectory_id, save)
                queue.score(_WORKER, trajectory_id, member.reward)

    def _train(self, batch: Batch, steps: dict[int, int]) -> None:
        unfinished = [m.trajectory() for m in self._members.values() if m.segments]
        self._trainer.end_stage(unfinished, steps)  # nothing for sync
        self._trainer.train(batch, steps)

    def _policy_folder(self) -> Path:
        return self._root / f"policy-{self._trainer.train_step}"


def _queue(pool_size: int, workload: Workload) -> QueueModel:
    """Return an empty queue with one worker; neither staleness nor the number of leases is bounded."""
    queue = QueueModel(
        RunLimits(
            group_size=workload.group_size,
            groups_per_batch=workload.groups_per_batch,
            max_staleness=_UNBOUNDED,
            max_attempts=_UNBOUNDED,
            session_ttl_seconds=30.0,
            filter_zero_variance=False,
            mask_old_segments=False,
            train_steps=_UNBOUNDED,
        )
    )
    queue.set_desired(Desired(pool_size=pool_size))
    queue.open_session(_WORKER)
    return queue
