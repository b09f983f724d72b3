"""A run of real processes: rollout workers, generators with the torch engine, a reward service, a real Redis.

The trainer's part is played here. Every published policy has the same weights under another name, and sampling noise
depends on (seed, trajectory, position) alone: so whatever was killed in between, a trajectory must come out token for
token as one engine writes it in one go.
"""

import asyncio
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.config import RunConfig
from rollmesh.generator.engines import build_engine
from rollmesh.mesh import Cursor
from rollmesh.recipes.countdown.tokenizer import VOCABULARY_SIZE, save_tokenizer, stop_token_ids
from rollmesh.scheduling import run_limits
from rollmesh.store import EmbeddedServer, TrajectoryStore
from rollmesh.types import Batch, Chunk, GenerationCall, PolicyRecord, Prompt, SamplingParams

from ...kit.checkpoint_samples import copy_of, publish
from ...kit.models import tiny_qwen2
from ...kit.run_files import write_run
from ...kit.waiting import reached
from ...kit.warm import WarmProcess, start_service

SECRET = "0123456789abcdef0123456789abcdef"


def write_model(folder: Path) -> Path:
    """A random Qwen2 that speaks the countdown vocabulary and stops now and then."""
    torch.manual_seed(5)
    config = tiny_qwen2(VOCABULARY_SIZE, max_position_embeddings=256, eos_token_id=stop_token_ids())
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.generation_config.eos_token_id = stop_token_ids()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def write_run_file(folder: Path, server: EmbeddedServer, **sections: dict[str, Any]) -> RunConfig:
    """The run file of ``folder``; keyword arguments replace values of its sections."""
    data: dict[str, Any] = {
        "seed": 11,
        "model": {"path": str(write_model(folder / "model"))},
        "data": {"max_prompt_tokens": 32},
        "rollout": {"max_new_tokens": 96, "partial_save_tokens": 8, "chunk_timeout_seconds": 20},
        "schedule": {"groups_per_batch": 2, "group_size": 4},
        "trainer": {"train_steps": 3},
        "reward": {"workers": 1},
        "checkpoints": {"secret": SECRET},
        "store": {"url": server.url, "heartbeat_seconds": 0.3, "session_ttl_seconds": 1.5},
        "generator": {
            "slots": 16,
            "max_context_tokens": 160,
            "device": "cpu",
            "drain_timeout_seconds": 5.0,
            "pace": [[1, 0.02]],
        },
    }
    return write_run(folder, data, sections)


@dataclass
class ProcessRun:
    """Starts and kills the processes of one run, and trains in their stead."""

    config: RunConfig
    store: TrajectoryStore
    checkpoints: CheckpointStore
    session: str = ""
    policies: list[PolicyRecord] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    processes: dict[str, subprocess.Popen[bytes] | WarmProcess] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return Path(self.config.folder)

    def start(self, service: str, index: int = 0) -> None:
        """Start a service; generators, which import torch, have that done already."""
        process = start_service(service, self.folder, index, warm=service == "generator")
        self.processes[f"{service}-{index}"] = process

    def kill(self, name: str) -> None:
        """SIGKILL: no drain, no release, no last message."""
        self.processes[name].kill()
        self.processes[name].wait()

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def logs(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name)[-3000:]}" for name in self.processes)

    async def until(self, what: str, condition: Callable[[], Awaitable[bool]], seconds: float = 120.0) -> None:
        await reached(condition, lambda: f"{what}\n{self.logs()}", seconds, pause=0.02)

    async def open(self) -> None:
        await self.store.limits.init_run(run_limits(self.config))
        self.session = await self.store.training.open_session("test")
        await self.store.training.reassert(self.session, 0, 0, [], [], Cursor())
        self.write_policies()
        await self.store.policies.announce(self.session, self.policies[0])

    def write_policies(self) -> None:
        """Write those of all steps: while one was written, the rollouts that a test looks for could come to an end."""
        model = self.folder / "model"
        ids = np.arange(2, 22)
        with torch.inference_mode():
            network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
            logprobs = torch.log_softmax(network(torch.from_numpy(ids)[None]).logits[0], dim=-1)
        own = logprobs[np.arange(len(ids) - 1), ids[1:]].tolist()
        canary = [CanarySequence(token_ids=ids.tolist(), logprobs=own)]
        self.policies = [
            publish(self.checkpoints, step, self.session, write=copy_of(model), canary=canary)
            for step in range(self.config.trainer.train_steps + 1)
        ]

    async def train(self, step: int, meanwhile: Callable[[], Awaitable[None]] | None = None) -> Batch:
        """Claim, confirm, report, publish: a train step with something else in place of the training."""
        found: list[Batch] = []

        async def claimed() -> bool:
            batch = await self.store.training.claim(self.session, step, timeout=0.2)
            found.extend([batch] if batch is not None else [])
            return bool(found)

        await self.until(f"the batch of train step {step}", claimed)
        if meanwhile is not None:
            await meanwhile()
        await self.store.training.confirm_batch_file(self.session, step, f"digest-{step}")
        await self.store.training.report_trained(self.session, step)
        await self.store.policies.announce(self.session, self.policies[step])
        self.batches.append(found[0])
        return found[0]


@asynccontextmanager
async def process_run(folder: Path, server: EmbeddedServer, **sections: dict[str, Any]) -> AsyncIterator[ProcessRun]:
    """A run with its policy 0 published and no service started; whatever was started is killed at the end."""
    config = write_run_file(folder, server, **sections)
    async with await TrajectoryStore.connect(config.store, config.name) as store:
        run = ProcessRun(config, store, open_checkpoints(config))
        await run.open()
        try:
            yield run
        finally:
            for name in run.processes:
                run.kill(name)


async def uninterrupted(config: RunConfig, prompts: dict[str, Prompt]) -> dict[str, list[Chunk]]:
    """Return the tokens that one engine writes for each trajectory without an interruption."""
    engine = build_engine(config.model_copy(update={"generator": config.generator.model_copy(update={"pace": None})}))
    await engine.start(Path(config.folder) / "model", 0)
    try:

        async def write(trajectory_id: str, prompt: Prompt) -> list[Chunk]:
            call = GenerationCall(
                trajectory_id=trajectory_id,
                context_ids=prompt.token_ids,
                prompt_token_count=len(prompt.token_ids),
                max_new_token_count=config.rollout.max_new_tokens,
                sampling=SamplingParams(
                    temperature=config.rollout.temperature, seed=config.seed, stop_token_ids=tuple(stop_token_ids())
                ),
                chunk_token_count=config.rollout.max_new_tokens,
            )
            return [chunk async for chunk in engine.generate(call)]

        chunks = await asyncio.gather(*(write(i, p) for i, p in prompts.items()))
        return dict(zip(prompts, chunks, strict=True))
    finally:
        await engine.aclose()
