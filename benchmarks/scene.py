"""Run with a generator process and no trainer, for benches of serving and reload; the bench publishes the policies."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from benchmarks.models import CONTEXT, BenchModel, Policy
from benchmarks.processes import ONE_THREAD, command, running_redis, write_run_file
from benchmarks.workloads import make_call, random_ids
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.durable import sync_tree
from rollmesh.checkpoints.location import open_checkpoints
from rollmesh.config import RunConfig
from rollmesh.errors import EngineError, GenerationRefused
from rollmesh.generator.engines.engine_registry import ENGINES
from rollmesh.launcher.timeline_recorder import metric_sums
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.scheduling import run_limits
from rollmesh.store import TrajectoryStore
from rollmesh.types import GeneratorRecord
from rollmesh.wire.generation_client import GenerationClient

STREAMS = 16
_DEADLINE_SECONDS = 600.0
"""Time limit of the start; an inference server starts slowly on busy cores."""


@dataclass(frozen=True, slots=True)
class BenchPublisher:
    """Session of a trainer that publishes policies without training."""

    store: TrajectoryStore
    checkpoints: CheckpointStore
    session: str

    async def publish(self, version: int, policy: Policy) -> Path:
        """Score the canary of a policy, write it and announce it; return its folder."""
        write, score = policy
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
        return self.checkpoints.root / record.path


@dataclass(slots=True, kw_only=True)
class Scene:
    """Run with one generator process."""

    publisher: BenchPublisher
    client: GenerationClient
    model: BenchModel
    process: subprocess.Popen[bytes]
    """Process of the generator."""
    record: GeneratorRecord
    """Record of the generator with its first policy."""
    run_folder: Path
    folder: Path
    """Folder of the newest policy."""
    stream_chunk: int = 1
    """Tokens per chunk of the streams."""
    last_token: float = 0.0
    silence: float = 0.0
    token_arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def reloads(self, count: int) -> tuple[float, ...]:
        """Publish versions 1 to ``count`` while streams run.

        Return the median seconds to serving, of the pause, of silence, of the load, and until the announcement.
        """
        results = [await self.reload(version) for version in range(1, count + 1)]
        return tuple(statistics.median(column) for column in zip(*results, strict=True))

    async def reload(self, version: int) -> tuple[float, ...]:
        """Publish one version while streams run; return the seconds that ``reloads`` names."""
        before = await self.metrics()
        policy = await asyncio.to_thread(self.model.policy, version)
        await self._next_token()
        self.silence = 0.0
        started = time.monotonic()
        self.folder = await self.publisher.publish(version, policy)
        published = time.monotonic() - started
        await _serving(self.publisher.store, self.process, version)
        seconds = time.monotonic() - started
        await self._next_token()
        after = await self.metrics()
        pause, load = (after[name] - before[name] for name in ("reload_pause_seconds_sum", "reload_seconds_sum"))
        return seconds, pause, self.silence, load, published

    async def _next_token(self) -> None:
        """Wait for a token in any stream."""
        self.token_arrived.clear()
        await self.token_arrived.wait()

    async def metrics(self) -> dict[str, float]:
        """Return the generator's metrics, summed over their labels, by their names without the prefix."""
        sums = metric_sums(await self._exposition())
        return {name.removeprefix("rollmesh_generator_"): value for name, value in sums.items()}

    async def phase_seconds(self) -> dict[str, float]:
        """Return the seconds of the generator's loads so far, by phase."""
        samples = (s for f in text_string_to_metric_families(await self._exposition()) for s in f.samples)
        return {s.labels["phase"]: s.value for s in samples if s.name == "rollmesh_generator_reload_phase_seconds_sum"}

    async def _exposition(self) -> str:
        (endpoint,) = read_endpoints(self.run_folder, "generator")
        async with httpx.AsyncClient(timeout=60) as client:
            return (await client.get(f"http://{endpoint.admin}/metrics")).text

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
        prompt = random_ids(np.random.default_rng(number), self.model.vocab_size, 16)
        for round_number in itertools.count(1):
            new_tokens = CONTEXT - len(prompt) - 8 * number
            call = make_call(f"{number}-{round_number}", prompt, new_tokens, chunk_tokens=self.stream_chunk)
            try:
                async for _ in self.client.generate(self.record, call):
                    now = time.monotonic()
                    self.silence = max(self.silence, now - self.last_token)
                    self.last_token = now
                    self.token_arrived.set()
            except (GenerationRefused, EngineError):
                await asyncio.sleep(0.002)

    def two_copies_seconds(self) -> float:
        """Measure a copy of the newest policy's files, flushed to disk, and a copy of that copy, not flushed."""
        with tempfile.TemporaryDirectory(dir=self.run_folder) as target:
            started = time.monotonic()
            written, read = Path(target) / "written", Path(target) / "read"
            shutil.copytree(self.folder, written)
            sync_tree(written)
            shutil.copytree(written, read)
            return time.monotonic() - started

    def copy_seconds(self) -> float:
        """Measure a copy of the newest policy's files, flushed to disk."""
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=self.run_folder) as target:
            for file in self.folder.iterdir():
                copied = Path(target) / file.name
                shutil.copyfile(file, copied)
                with copied.open("rb") as handle:
                    os.fsync(handle.fileno())
            return time.monotonic() - started


def peak_bytes(pid: int) -> float:
    """Return the largest resident memory of a process so far, mapped files included."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(1024.0 * int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


@asynccontextmanager
async def open_scene(
    folder: Path, model: BenchModel, generator: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> AsyncIterator[Scene]:
    """Start the registry, publish a policy and start a generator with these fields and variables; stop them after."""
    async with AsyncExitStack() as stack:
        server = stack.enter_context(running_redis(folder / "redis", 64))
        config = _write_run_file(folder, server.url, model.dtype, generator)
        ENGINES[config.generator.engine].check_machine(config)
        store = await stack.enter_async_context(await TrajectoryStore.connect(config.store, config.name))
        client = await stack.enter_async_context(GenerationClient())
        await store.limits.init_run(run_limits(config))
        publisher = BenchPublisher(store, open_checkpoints(config), await store.training.open_session("bench"))
        policy_folder = await publisher.publish(0, await asyncio.to_thread(model.policy, 0))
        process = _start_generator(folder, environment or {})
        stack.push_async_callback(_stop, process)
        yield Scene(
            publisher=publisher,
            client=client,
            model=model,
            process=process,
            record=await _serving(store, process, 0),
            run_folder=folder,
            folder=policy_folder,
        )


async def _serving(store: TrajectoryStore, process: subprocess.Popen[bytes], version: int) -> GeneratorRecord:
    """Wait until the generator serves ``version``. Raises EngineError if its process has ended."""
    async with asyncio.timeout(_DEADLINE_SECONDS):
        while True:
            for record in await store.generators.live():
                if record.serving and record.policy_version == version:
                    return record
            if process.poll() is not None:
                raise EngineError("the generator process has ended")
            await asyncio.sleep(0.001)


def _write_run_file(folder: Path, redis_url: str, dtype: str, generator: Mapping[str, Any]) -> RunConfig:
    data = {
        "name": "bench",
        "folder": str(folder),
        "model": {"path": str(folder), "dtype": dtype},
        "data": {"max_prompt_tokens": 16},
        "rollout": {"max_new_tokens": CONTEXT - 16},
        "generator": {
            "slots": 2 * STREAMS,
            "max_context_tokens": CONTEXT,
            "drain_timeout_seconds": 2.0,
            **generator,
        },
        "store": {"url": redis_url},
        "telemetry": {"log_level": "error"},
    }
    return write_run_file(folder / "run.yaml", data)


def _start_generator(folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    arguments = command("generator", folder / "run.yaml", "--supervised-by", os.getpid())
    return subprocess.Popen(arguments, env={**os.environ, **ONE_THREAD, **environment})


async def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    await asyncio.to_thread(process.wait)
