"""Run with a generator process and no trainer, for benches of serving and reload; the bench publishes the policies."""

import asyncio
import itertools
import os
import statistics
import subprocess
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.models import PublishedModel
from benchmarks.processes import command, running_redis, write_run_file
from benchmarks.workloads import make_call, random_ids
from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.config import RunConfig
from rollmesh.errors import EngineError, GenerationRefused
from rollmesh.generator.engines import ENGINES
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.scheduling import run_limits
from rollmesh.store import TrajectoryStore
from rollmesh.types import GeneratorRecord
from rollmesh.wire.generation_client import GenerationClient

STREAMS = 16
_CONTEXT, _PROMPT_TOKENS = 256, 16
_PREFIX = "rollmesh_generator_"
_DEADLINE_SECONDS = 600.0
"""Time limit of the start; an inference server starts slowly on busy cores."""


class Reload(NamedTuple):
    """Seconds of one new version."""

    serving: float
    """From the copy of the weights until the registry shows that the generator serves it."""
    pause: float
    silence: float
    """Longest time without a token in any stream."""
    published: float
    """From the copy of the weights until the announcement."""

    @classmethod
    def median(cls, reloads: Iterable[Self]) -> Self:
        """Return the medians of the fields."""
        return cls(*map(statistics.median, zip(*reloads, strict=True)))


@dataclass(slots=True, kw_only=True)
class Scene:
    """Run with one generator process; the scene has a trainer's session."""

    store: TrajectoryStore
    checkpoints: CheckpointStore
    session: str
    client: GenerationClient
    model: PublishedModel
    run_folder: Path
    process: subprocess.Popen[bytes] = field(init=False)
    """Process of the generator."""
    record: GeneratorRecord = field(init=False)
    """Record of the generator with its first policy."""
    folder: Path = field(init=False)
    """Folder of the newest policy."""
    stream_chunk: int = 1
    """Tokens per chunk of the streams."""
    last_token: float = 0.0
    silence: float = 0.0
    token_arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def publish(self, version: int) -> float:
        """Copy the next policy out, score its canary, write and announce it; return when that began."""
        write, score = await asyncio.to_thread(self.model.policy, version)
        if version:
            await self._next_token()
        self.silence, started = 0.0, time.monotonic()
        canary = await asyncio.to_thread(score)
        record = await asyncio.to_thread(
            self.checkpoints.publish,
            session=self.session,
            policy_version=version,
            train_step=version,
            parent=version - 1 if version else None,
            write=write,
            canary=canary,
        )
        await self.store.policies.announce(self.session, record)
        self.folder = self.checkpoints.root / record.path
        return started

    async def reload(self, version: int) -> Reload:
        """Publish one version while streams run."""
        before = await self.metrics()
        started = await self.publish(version)
        published = time.monotonic() - started
        await self.serving(version)
        seconds = time.monotonic() - started
        await self._next_token()
        after = await self.metrics()
        pause = after["reload_pause_seconds_sum"] - before["reload_pause_seconds_sum"]
        return Reload(seconds, pause, self.silence, published)

    async def serving(self, version: int) -> GeneratorRecord:
        """Wait until the generator serves ``version``. Raises EngineError if its process has ended."""
        async with asyncio.timeout(_DEADLINE_SECONDS):
            while True:
                for record in await self.store.generators.live():
                    if record.serving and record.policy_version == version:
                        return record
                if self.process.poll() is not None:
                    raise EngineError("the generator process has ended")
                await asyncio.sleep(0.001)

    async def metrics(self) -> dict[str, float]:
        """Return the generator's metrics by name without the prefix, summed over labels; phases of a load by theirs."""
        (endpoint,) = read_endpoints(self.run_folder, "generator")
        async with httpx.AsyncClient(timeout=60) as client:
            text = (await client.get(f"http://{endpoint.admin}/metrics")).text
        sums: dict[str, float] = {}
        for sample in (s for family in text_string_to_metric_families(text) for s in family.samples):
            name = sample.name.removeprefix(_PREFIX)
            phase = sample.labels.get("phase")
            for key in (name, *([f"{name} {phase}"] if phase else [])):
                sums[key] = sums.get(key, 0.0) + sample.value
        return sums

    @asynccontextmanager
    async def streams(self) -> AsyncIterator[None]:
        """Keep the streams running during the block."""
        self.last_token = time.monotonic()
        tasks = [asyncio.create_task(self._keep_streaming(number)) for number in range(STREAMS)]
        try:
            yield
        finally:
            await cancel_and_wait(*tasks)

    async def _keep_streaming(self, number: int) -> None:
        """Generate without end, one call after another, on any version."""
        prompt = random_ids(np.random.default_rng(number), self.model.vocab_size, _PROMPT_TOKENS)
        for round_number in itertools.count(1):
            new_tokens = _CONTEXT - len(prompt) - 8 * number
            call = make_call(f"{number}-{round_number}", prompt, new_tokens, chunk_tokens=self.stream_chunk)
            try:
                async for _ in self.client.generate(self.record, call):
                    now = time.monotonic()
                    self.silence = max(self.silence, now - self.last_token)
                    self.last_token = now
                    self.token_arrived.set()
            except (GenerationRefused, EngineError):
                await asyncio.sleep(0.002)

    async def _next_token(self) -> None:
        self.token_arrived.clear()
        await self.token_arrived.wait()


@asynccontextmanager
async def open_scene(
    folder: Path, model: PublishedModel, generator: Mapping[str, Any], variables: Mapping[str, str] | None = None
) -> AsyncIterator[Scene]:
    """Start the registry, publish a policy and start a generator with these fields and variables; stop them after."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(running_redis(folder / "redis", 64))
        config = _write_run_file(folder, server.url, model.dtype, generator)
        ENGINES[config.generator.engine].check_machine(config)
        store = await stack.enter_async_context(await TrajectoryStore.connect(config.store, config.name))
        await store.limits.init_run(run_limits(config))
        scene = Scene(
            store=store,
            checkpoints=open_checkpoints(config),
            session=await store.training.open_session("bench"),
            client=await stack.enter_async_context(GenerationClient()),
            model=model,
            run_folder=folder,
        )
        await scene.publish(0)
        scene.process = _start_generator(folder, variables or {})
        stack.push_async_callback(_stop, scene.process)
        scene.record = await scene.serving(0)
        yield scene


def _write_run_file(folder: Path, redis_url: str, dtype: str, generator: Mapping[str, Any]) -> RunConfig:
    fields = {"slots": 2 * STREAMS, "max_context_tokens": _CONTEXT, "drain_timeout_seconds": 2.0, **generator}
    data = {
        "name": "bench",
        "folder": str(folder),
        "model": {"path": str(folder), "dtype": dtype},
        "data": {"max_prompt_tokens": _PROMPT_TOKENS},
        "rollout": {"max_new_tokens": _CONTEXT - _PROMPT_TOKENS},
        "generator": fields,
        "store": {"url": redis_url},
        "telemetry": {"log_level": "error"},
    }
    return write_run_file(folder / "run.yaml", data)


def _start_generator(folder: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    words = command("generator", folder / "run.yaml", "--supervised-by", os.getpid())
    return subprocess.Popen(words, env={**os.environ, **variables})


async def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    await asyncio.to_thread(process.wait)
