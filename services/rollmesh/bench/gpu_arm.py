"""One arm of ``bench gpu``: calls on the shared engine until a batch is complete, then a train step, in turns.

``sync`` opens one batch of groups per update and waits for all of them. ``copris_paper`` keeps ``pool_size`` calls in
progress, takes the first complete groups, interrupts the rest and continues it first after the update.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.segments import join_segments
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import (
    Batch,
    FinishReason,
    GenerationCall,
    Group,
    OutcomeKind,
    Prompt,
    RewardOutcome,
    SamplingParams,
    Segment,
    Trajectory,
)

_PHASES = ("load", "generate", "train", "export")


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

    def group(self, number: int) -> list[Member]:
        """Return the trajectories of one group, without tokens."""
        rng = np.random.default_rng((0, number))
        ids = rng.integers(0, self.vocab_size, self.prompt_tokens).astype(np.int32)
        lengths = np.clip(rng.lognormal(np.log(self.median_length), 1.0, self.group_size), 4, self.longest)
        prompt = Prompt(prompt_id=str(number), token_ids=ids, verifier="exact")
        return [Member(prompt=prompt, index=i, length=n) for i, n in enumerate(lengths.astype(int).tolist())]


@dataclass(slots=True, eq=False, kw_only=True)
class Member:
    """One trajectory in the queue of an arm."""

    prompt: Prompt
    index: int
    length: int
    """Final number of response tokens."""
    segments: tuple[Segment, ...] = ()
    is_running: bool = False

    @property
    def token_count(self) -> int:
        """Number of response tokens so far."""
        return sum(len(segment) for segment in self.segments)

    def trajectory(self) -> Trajectory:
        """Return the trajectory for the trainer; rewards of 0 and 1 by index make real gradients without a signal."""
        return Trajectory(
            trajectory_id=f"{self.prompt.prompt_id}.{self.index}",
            group_id=self.prompt.prompt_id,
            member_index=self.index,
            prompt=self.prompt,
            segments=self.segments,
            finish_reason=FinishReason.LENGTH if self.token_count == self.length else None,
            outcome=RewardOutcome(kind=OutcomeKind.SCORED, value=float(self.index % 2)),
            shaped_reward=float(self.index % 2),
        )

    async def generate(self, engine: TorchEngine) -> None:
        """Sample the tokens that are missing, or those before an interruption."""
        prompt = self.prompt.token_ids
        call = GenerationCall(
            trajectory_id=f"{self.prompt.prompt_id}.{self.index}",
            context_ids=np.concatenate([prompt, *(s.token_ids for s in self.segments)]),
            prompt_token_count=len(prompt),
            max_new_token_count=self.length - self.token_count,
            sampling=SamplingParams(),
            chunk_token_count=256,
        )
        chunks = [chunk async for chunk in engine.generate(call) if len(chunk.token_ids)]
        fresh = [
            Segment(
                token_ids=c.token_ids,
                behavior_logprobs=c.behavior_logprobs,
                policy_version=c.policy_version,
                kv_min_version=c.kv_min_version,
            )
            for c in chunks
        ]
        self.segments = join_segments([*self.segments, *fresh])


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
        self._groups: list[list[Member]] = []
        """Admitted groups without a batch, oldest first."""
        self._admitted = 0
        self._running: dict[asyncio.Task[None], Member] = {}
        self._most_running = 0
        trainer.export(self._policy_folder())

    async def update(self) -> Update:
        """Load the newest weights, generate a batch, train on it and write the policy; all of it is timed."""
        before, folder, step = self._engine.status(), self._policy_folder(), self._trainer.train_step
        self._most_running = 0
        marks = [time.perf_counter()]
        await self._engine.load(folder, step, OnNewVersion.DRAIN)
        marks.append(time.perf_counter())
        batch = await self._generate_batch(step + 1)
        marks.append(time.perf_counter())
        await asyncio.to_thread(self._train, batch, {version: version for version in range(step + 1)})
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
            untrained_tokens=sum(m.token_count for group in self._groups for m in group),
            most_running=self._most_running,
            lengths={t.trajectory_id: t.response_token_count for g in batch.groups for t in g.trajectories},
        )

    async def _generate_batch(self, train_step: int) -> Batch:
        wanted = self._workload.groups_per_batch
        while len(complete := [g for g in self._groups if all(m.token_count == m.length for m in g)]) < wanted:
            self._start_calls()
            await self._collect(asyncio.FIRST_COMPLETED)
        if self._running:
            await self._engine.interrupt()
            await self._collect(asyncio.ALL_COMPLETED)
        chosen = complete[:wanted]
        self._groups = [group for group in self._groups if group not in chosen]
        groups = [
            Group(
                group_id=members[0].prompt.prompt_id,
                admission_index=int(members[0].prompt.prompt_id),
                trajectories=tuple(m.trajectory() for m in members),
            )
            for members in chosen
        ]
        return Batch(train_step=train_step, groups=tuple(groups))

    def _start_calls(self) -> None:
        """Fill the pool: partial trajectories of the oldest groups, then new ones, then further groups."""
        limit = self._pool_size or self._workload.groups_per_batch * self._workload.group_size
        free = limit - len(self._running)
        waiting = [m for g in self._groups for m in g if not m.is_running and m.token_count < m.length]
        while len(waiting) < free and (self._pool_size or len(self._groups) < self._workload.groups_per_batch):
            self._groups.append(self._workload.group(self._admitted))
            waiting += self._groups[-1]
            self._admitted += 1
        for member in sorted(waiting, key=lambda m: not m.segments)[:free]:
            member.is_running = True
            self._running[asyncio.create_task(member.generate(self._engine))] = member
        self._most_running = max(self._most_running, len(self._running))

    async def _collect(self, until: str) -> None:
        done, _ = await asyncio.wait(self._running, return_when=until)
        for task in done:
            self._running.pop(task).is_running = False
            task.result()

    def _train(self, batch: Batch, steps: dict[int, int]) -> None:
        unfinished = [m.trajectory() for group in self._groups for m in group if m.segments]
        self._trainer.end_stage(unfinished, steps)  # nothing for sync
        self._trainer.train(batch, steps)

    def _policy_folder(self) -> Path:
        return self._root / f"policy-{self._trainer.train_step}"
