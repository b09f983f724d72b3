"""A run whose rollouts are made by hand: a real server, a real trainer process, and batches that never change."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.config import RunConfig
from rollmesh.errors import Conflict, RollmeshError
from rollmesh.mesh import Cursor, Desired
from rollmesh.scheduling import run_limits
from rollmesh.segments import slice_segment
from rollmesh.store import EmbeddedServer, Finish, NewGroup, Score, TrajectoryStore
from rollmesh.types import FinishReason, OutcomeKind, PolicyRecord, Prompt, RewardOutcome

from ...kit.records import policy_tokens
from ...kit.run_files import write_run
from ...kit.waiting import reached
from ...kit.warm import TRAINER, WarmProcess, template
from .two_ranks import WORLD, TwoRanks

Process = subprocess.Popen[bytes] | WarmProcess | TwoRanks

GROUPS, MEMBERS, VOCABULARY = 2, 3, 32
SECRET = "0123456789abcdef0123456789abcdef"
START_SECONDS = 240.0
"""Two ranks and torchrun are three processes with all their imports: a minute on cores at six times their load."""


def write_tiny_model(folder: Path) -> None:
    """A random Qwen2 with 5,000 parameters."""
    import torch
    from transformers import Qwen2ForCausalLM

    from ...kit.models import tiny_qwen2

    torch.manual_seed(0)
    config = tiny_qwen2(VOCABULARY, hidden_size=16, intermediate_size=32, max_position_embeddings=256)
    Qwen2ForCausalLM(config).save_pretrained(folder)


def write_run_file(folder: Path, model: Path, server: EmbeddedServer, /, **sections: dict[str, Any]) -> RunConfig:
    """The run file of ``folder``; keyword arguments replace values of its sections."""
    data: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"max_prompt_tokens": 16},
        "rollout": {"max_new_tokens": 64},
        "schedule": {"groups_per_batch": GROUPS, "group_size": MEMBERS, "pool_size": MEMBERS, "max_staleness": 20},
        "trainer": {"train_steps": 4, "learning_rate": 1e-3, "device": "cpu", "tokens_per_microbatch": 64},
        "checkpoints": {"keep_last": 50, "secret": SECRET},
        "store": {"url": server.url, "heartbeat_seconds": 0.2, "session_ttl_seconds": 1.0},
    }
    return write_run(folder, data, sections)


@dataclass(slots=True)
class TrainerRun:
    """Feeds one run and starts, kills and questions its trainer."""

    config: RunConfig
    store: TrajectoryStore
    checkpoints: CheckpointStore
    process: Process | None = None
    starts: int = 0
    leader: str = ""
    cuts: list[list[str]] = field(default_factory=list)
    score_of: Callable[[str], Score] = field(default_factory=lambda: _score)
    """Of a trajectory id."""
    sampled_by: int = 0
    """Policy version of the tokens that are fed."""

    @property
    def folder(self) -> Path:
        return Path(self.config.folder)

    def start(self, ranks: int = 1, *, fresh: bool = False, fault: str = "") -> Process:
        """Start one trainer or two ranks with their imports done, or ``fresh``: in new interpreters, under torchrun.

        ``fault`` is one of ``trainer_process``.
        """
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "FAULT": fault}
        log_file, run_file = self.folder / "trainer.log", str(self.folder / "run.yaml")
        assert ranks in (1, WORLD)
        if fresh:
            program = [str(Path(__file__).with_name("trainer_process.py")), run_file]
            torchrun = ["-m", "rollmesh.trainer.torchrun", "--standalone", "--nproc-per-node", str(ranks)]
            command = [sys.executable, *(torchrun if ranks > 1 else ()), *program]
            with log_file.open("ab") as log:
                self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        elif ranks == WORLD:
            self.process = TwoRanks("trainer_process", run_file, output=lambda rank: log_file, environment=environment)
        else:
            # Two starts in turn differ in the order of sets, as any two processes do.
            warm, module = template(*TRAINER, seed=self.starts % 2), "tests.integration.trainer.trainer_process"
            self.starts += 1
            self.process = warm.start(module, [run_file], output=log_file, environment=environment)
        return self.process

    def kill(self) -> None:
        """SIGKILL the trainer and all its ranks, if they run."""
        if self.process is not None:
            for rank in self.ranks():
                with suppress(psutil.NoSuchProcess):
                    rank.kill()
            self.process.kill()
            self.process.wait()

    def ranks(self) -> list[psutil.Process]:
        """Processes that torchrun has started, by rank; not what those start, which inherits their environment."""
        if not isinstance(self.process, subprocess.Popen) or self.process.poll() is not None:
            return []
        found: dict[int, psutil.Process] = {}
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children():
                with suppress(psutil.NoSuchProcess, KeyError):
                    found[int(child.environ()["RANK"])] = child
        return [found[rank] for rank in sorted(found)]

    def log(self) -> str:
        return (self.folder / "trainer.log").read_text()

    def events(self, name: str) -> list[dict[str, Any]]:
        """Lines of the trainer's log with this event."""
        lines = [json.loads(line) for line in self.log().splitlines() if f'"{name}"' in line]
        return [line for line in lines if line["event"] == name]

    def lines(self, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / file).read_text().splitlines()]

    def waits_to_publish(self, version: int) -> bool:
        """The training loop waits for the publication of this version."""
        return any(event["policy_version"] == version for event in self.events("training_waits_for_publication"))

    async def seen(self) -> dict[int, PolicyRecord]:
        """Every announced policy, by version."""
        return {record.policy_version: record for record in await self.store.policies.announced()}

    async def versions(self) -> list[int]:
        return [record.policy_version for record in await self.store.policies.announced()]

    async def published(self) -> list[tuple[int, int]]:
        """Version and train step of every announced policy."""
        return [(r.policy_version, r.train_step) for r in await self.store.policies.announced()]

    def weights(self, record: PolicyRecord) -> bytes:
        return (self.checkpoints.open(record).folder / "model.safetensors").read_bytes()

    async def last_weights(self) -> bytes:
        """Weights of the last step of the run, which is published."""
        latest = await self.store.policies.latest()
        assert latest is not None and latest.train_step == self.config.trainer.train_steps
        return self.weights(latest)

    async def announced(self, version: int) -> bool:
        latest = await self.store.policies.latest()
        return latest is not None and latest.policy_version >= version

    async def rolled_back(self) -> bool:
        return await self.store.rollbacks.pending() is None

    async def until_version(self, version: int, pause: float = 0.01) -> None:
        await self.until(f"version {version}", lambda: self.announced(version), START_SECONDS, pause)

    async def until_rolled_back(self) -> None:
        await self.until("the end of the rollback", self.rolled_back, pause=0.01)

    async def train(self, steps: int) -> None:
        """Start the trainer, and feed it until it has trained the last step."""
        self.start()
        async with self.fed(steps):
            await self.until_finished()

    async def until(
        self, what: str, condition: Callable[[], bool | Awaitable[bool]], seconds: float = 120.0, pause: float = 0.0
    ) -> None:
        """Wait for a condition while batches are cut; a trainer that fails ends the wait."""

        def fail() -> None:
            if self.process is not None and self.process.poll() not in (None, 0):
                pytest.fail(f"{what}: the trainer ended with {self.process.returncode}\n{self.log()[-4000:]}")

        await reached(condition, lambda: f"{what}\n{self.log()[-4000:]}", seconds, check=fail, pause=pause)

    async def until_finished(self, seconds: float = 120.0) -> None:
        """The trainer has trained the last step and ended by itself."""
        process = self.process
        assert process is not None
        await self.until("the end of the run", lambda: process.poll() == 0, seconds, pause=0.01)

    async def until_failed(self, seconds: float = 120.0) -> int:
        """The trainer has ended by itself, with this exit status; ``until`` takes that for a failure of the test."""
        assert self.process is not None
        return await asyncio.to_thread(self.process.wait, seconds)

    async def admit(self, count: int) -> list[str]:
        """Admit the next groups; needs an announced version 0."""
        if not self.leader:
            self.leader = await self.store.leadership.acquire("feeder") or ""
            assert self.leader
        await self.store.leadership.set_desired(self.leader, Desired(pool_size=MEMBERS * count))
        before = await self.store.leadership.cursor()
        groups = [self._group(before.index + at) for at in range(count)]
        await self.store.leadership.admit(self.leader, groups, before, Cursor(epoch=0, index=before.index + count))
        return [group.group_id for group in groups]

    async def feed(self, steps: int, groups_per_step: int = GROUPS) -> None:
        """Admit, roll out and score the groups of the next steps."""
        groups = await self.admit(groups_per_step * steps)
        session = await self.store.sessions.open("feeder")
        ids: list[str] = []
        while leased := await self.store.trajectories.lease(session, len(groups) * MEMBERS):
            ids += [item.trajectory.trajectory_id for item in leased]
        assert len(ids) == len(groups) * MEMBERS
        await self.store.trajectories.finish(session, [finish_of(i, self.sampled_by) for i in ids])
        await self.store.trajectories.score(session, [self.score_of(i) for i in ids])
        await self.store.sessions.close(session)
        trained = (await self.store.training.state()).trained_step
        fresh = [groups[GROUPS * s : GROUPS * (s + 1)] for s in range(steps)]
        self.cuts = self.cuts[:trained] + fresh

    async def cut_forever(self) -> None:
        """The leader's part: cut the next batch as soon as the last one is trained."""
        while True:
            with suppress(RollmeshError):
                state = await self.store.training.state()
                if state.cut_step == state.trained_step < len(self.cuts):
                    with suppress(Conflict):
                        await self.store.leadership.cut(self.leader, state.cut_step + 1, self.cuts[state.cut_step])
                if not await self.store.leadership.renew(self.leader):
                    self.leader = await self.store.leadership.acquire("feeder") or self.leader
            await asyncio.sleep(0.005)

    @asynccontextmanager
    async def fed(self, steps: int) -> AsyncIterator[None]:
        """Feed all batches once version 0 is announced, and cut them while the block runs."""
        await self.until_version(0, pause=0.05)
        await self.feed(steps)
        task = asyncio.create_task(self.cut_forever())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            self.kill()

    def _group(self, index: int) -> NewGroup:
        group_id = f"e0-{index}"
        noise = np.random.default_rng(index)
        prompt = Prompt(
            prompt_id=group_id, token_ids=noise.integers(0, VOCABULARY, 5).astype(np.int32), verifier="exact"
        )
        return NewGroup(group_id=group_id, prompt=prompt, needed=MEMBERS, epoch=0, index=index)


_HELD: dict[str, dict[str, Any]] = {"trainer": {"train_steps": 5}, "checkpoints": {"state_every_steps": 2}}


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs in the folder of a test, with its model and its server."""

    folder: Path
    model: Path
    server: EmbeddedServer
    monkeypatch: pytest.MonkeyPatch

    def file(self, name: str = "run", /, **sections: dict[str, Any]) -> RunConfig:
        """Write a run file, or write it anew; its folder has the name."""
        return write_run_file(self.folder / name, self.model, self.server, **sections)

    @asynccontextmanager
    async def __call__(self, name: str = "run", /, **sections: dict[str, Any]) -> AsyncIterator[TrainerRun]:
        """A run with this file, whose limits Redis knows."""
        config = self.file(name, **sections)
        async with await TrajectoryStore.connect(config.store, run=config.name, retry_seconds=5.0) as store:
            await store.limits.init_run(run_limits(config))
            run = TrainerRun(config=config, store=store, checkpoints=open_checkpoints(config))
            try:
                yield run
            finally:
                run.kill()

    def hold(self, at: str, step: int, *, fails: bool = False) -> None:
        """Let trainers with the fault ``held`` stop, or fail, at a point of a step (``trainer_process.POINTS``)."""
        for name, value in (("HELD_AT", at), ("HELD_STEP", str(step)), ("HELD_FAILS", "1" if fails else "")):
            self.monkeypatch.setenv(name, value)

    @asynccontextmanager
    async def held(
        self, at: str, step: int, *, fed: int = 5, ranks: int = 1, **sections: dict[str, Any]
    ) -> AsyncIterator[TrainerRun]:
        """A run of 5 steps whose trainer is stopped at a point of the publication of ``step``, and state 2 is saved."""
        self.hold(at, step)
        async with self("run", **(_HELD | sections)) as run:
            os.mkfifo(run.folder / "release")
            run.start(ranks, fault="held")
            async with run.fed(fed):
                await run.until(at, (run.folder / "held").exists, pause=0.01)
                yield run

    async def calm_weights(self) -> bytes:
        """Last weights of a run like those of ``held`` that nothing interrupts."""
        async with self("calm", **_HELD) as run:
            await run.train(5)
            return await run.last_weights()


def release(run: TrainerRun) -> None:
    """Let a held trainer go on."""
    (run.folder / "release").write_bytes(b"")


def finish_of(trajectory_id: str, policy_version: int = 0) -> Finish:
    """All tokens of a trajectory, which its id determines."""
    group, member = trajectory_id.removeprefix("e0-").split(".")
    noise = np.random.default_rng([int(group), int(member)])
    count = int(noise.integers(4, 20))
    ids = noise.integers(0, VOCABULARY, count).astype(np.int32)
    logprobs = (-3.4 - 0.2 * noise.random(count)).astype(np.float32)
    segment = policy_tokens(ids, policy_version, behavior_logprobs=logprobs)
    chunks = [slice_segment(segment, 0, 2), slice_segment(segment, 2)]
    return Finish(trajectory_id=trajectory_id, token_offset=0, segments=chunks, finish_reason=FinishReason.STOP)


def _score(trajectory_id: str) -> Score:
    value = float(int(trajectory_id.rpartition(".")[2]) % 2)
    return Score(
        trajectory_id=trajectory_id,
        outcome=RewardOutcome(kind=OutcomeKind.SCORED, value=value),
        shaped_reward=value,
    )
