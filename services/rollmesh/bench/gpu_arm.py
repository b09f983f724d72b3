"""One arm of ``bench gpu``: a schedule, its queue, its policy and optimizer; the arms share one engine.

In an update, the engine loads the newest weights, generates trajectories until the scheduler cuts a batch, and then
interrupts the running calls. The trainer makes one real step and writes the policy. Generation and training alternate
on the device, as both kinds of schedule require.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np

from rollmesh.bench.gpu_queue import Member, MemoryQueue
from rollmesh.bench.gpu_workload import Workload
from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig
from rollmesh.errors import ConfigError, EngineError
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.scheduling import Schedule, decide
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Batch, Chunk, GenerationCall, SamplingParams

T = TypeVar("T")

_CHUNK = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Result of one update of one arm."""

    arm: str
    train_step: int
    seconds: dict[str, float]
    """Wall time by phase: load, generate, stage_end, train, export."""
    trained_tokens: int
    """Number of response tokens in the batch."""
    generated_tokens: int
    """Tokens sampled during the update, trained on or not."""
    reprefilled_tokens: int
    """Response tokens whose cache was computed again."""
    unfinished_trajectories: int
    """Trajectories that had begun and not finished at the end of the update."""
    untrained_tokens: int
    """Tokens sampled so far and not trained on, of unfinished trajectories and of finished ones without a batch."""
    most_running: int
    """Largest number of trajectories leased at once."""
    lengths: dict[str, int]
    """Response length of every trained trajectory."""

    @property
    def total_seconds(self) -> float:
        """Wall time of the update, in seconds."""
        return sum(self.seconds.values())


class BenchArm:
    """Arm of the bench; it runs one update at a time, and ``engine`` must be idle in between."""

    def __init__(
        self, name: str, schedule: Schedule, workload: Workload, engine: TorchEngine, trainer: PolicyTrainer, root: Path
    ) -> None:
        if not schedule.barrier and schedule.max_staleness > 0:
            raise ConfigError(f"bench gpu: {schedule.preset} generates during updates, which needs a second process")
        self.name = name
        self.schedule = schedule
        self.queue = MemoryQueue(schedule, workload)
        self._engine = engine
        self._trainer = trainer
        self._root = root
        self._running: dict[asyncio.Task[list[Chunk]], Member] = {}
        self._most_running = 0
        trainer.export(self._folder(0))

    async def update(self) -> Update:
        """Run one update."""
        before = self._engine.status()
        step = self.queue.trained_step
        seconds: dict[str, float] = {}
        self._most_running = 0
        load = self._engine.load(self._folder(step), step, OnNewVersion.DRAIN)
        await _timed(seconds, "load", load)
        batch = await _timed(seconds, "generate", self._generate_batch())
        after = self._engine.status()
        await _timed(seconds, "stage_end", asyncio.to_thread(self._end_stage))
        steps = {version: version for version in range(step + 1)}
        await _timed(seconds, "train", asyncio.to_thread(self._trainer.train, batch, steps))
        await _timed(seconds, "export", asyncio.to_thread(self._trainer.export, self._folder(step + 1)))
        self.queue.announce()
        shutil.rmtree(self._folder(step))
        lengths = {t.trajectory_id: t.response_token_count for g in batch.groups for t in g.trajectories}
        return Update(
            arm=self.name,
            train_step=batch.train_step,
            seconds=seconds,
            trained_tokens=sum(lengths.values()),
            generated_tokens=after.generated_token_total - before.generated_token_total,
            reprefilled_tokens=after.reprefill_token_total - before.reprefill_token_total,
            unfinished_trajectories=len(self.queue.unfinished()),
            untrained_tokens=sum(m.token_count for m in self.queue.members()),
            most_running=self._most_running,
            lengths=lengths,
        )

    async def _generate_batch(self) -> Batch:
        """Generate under the scheduler's decisions until it cuts a batch; then interrupt the running calls."""
        while True:
            decisions = decide(self.schedule, self.queue.view())
            if decisions.fail:
                raise EngineError(f"bench gpu, {self.name}: {decisions.fail}")
            if decisions.cut is not None:
                break
            self.queue.admit(decisions.admit_groups)
            for member in self.queue.lease(0 if decisions.desired.paused else decisions.desired.pool_size):
                self._running[asyncio.create_task(self._call(member))] = member
            self._most_running = max(self._most_running, len(self._running))
            if not self._running:
                raise EngineError(f"bench gpu, {self.name}: nothing runs and the cut waits for {decisions.waiting_for}")
            done, _ = await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
            self._collect(done)
        batch = self.queue.cut(decisions.cut)
        if self._running:
            await self._engine.interrupt()
            done, _ = await asyncio.wait(self._running)
            self._collect(done)
        return batch

    def _collect(self, done: set[asyncio.Task[list[Chunk]]]) -> None:
        for task in done:
            member = self._running.pop(task)
            member.add(task.result())
            self.queue.release(member)

    async def _call(self, member: Member) -> list[Chunk]:
        prompt = member.prompt.token_ids
        call = GenerationCall(
            trajectory_id=member.trajectory_id,
            context_ids=np.concatenate([prompt, *(s.token_ids for s in member.segments)]),
            prompt_token_count=len(prompt),
            max_new_token_count=member.length - member.token_count,
            sampling=SamplingParams(),
            chunk_token_count=_CHUNK,
        )
        return [chunk async for chunk in self._engine.generate(call)]

    def _end_stage(self) -> None:
        """Run the paper's extra pass: trainer log-probabilities of this stage's tokens that are not in the batch.

        ``sync`` has no such tokens, so the pass costs it nothing.
        """
        steps = {version: version for version in range(self.queue.trained_step + 1)}
        self._trainer.end_stage([m.trajectory() for m in self.queue.members() if m.segments], steps)

    def _folder(self, step: int) -> Path:
        return self._root / f"policy-{step}"


def make_trainer(folder: Path, *, dtype: str, device: str, token_budget: int) -> PolicyTrainer:
    """Create the trainer of one arm from the shared initial weights, with old log-probabilities as in the paper."""
    config = TrainerConfig(
        tokens_per_microbatch=token_budget,
        algorithm=AlgorithmConfig(old_logprobs="stage_end"),
    )
    return PolicyTrainer.from_folder(folder, config, dtype=dtype, device=device)


async def _timed(seconds: dict[str, float], phase: str, work: Awaitable[T]) -> T:
    started = time.perf_counter()
    result = await work
    seconds[phase] = time.perf_counter() - started
    return result
