"""Run with a generator process and no trainer, for benches of serving and reload; the bench publishes the policies."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import yaml

from rollmesh.bench.models import CONTEXT, BenchModel, Policy
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.location import open_checkpoints
from rollmesh.config import RunConfig, load_run_config
from rollmesh.errors import EngineError, GenerationRefused
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.scheduling.run_limits import run_limits
from rollmesh.store import EmbeddedOptions, EmbeddedServer, TrajectoryStore
from rollmesh.types import GenerationCall, GeneratorRecord, SamplingParams
from rollmesh.wire.generation_client import GenerationClient

STREAMS = 16
_PREFIX = "rollmesh_generator_"
_DEADLINE_SECONDS = 600.0
"""Time limit of the start; an SGLang server starts slowly on busy cores."""


@dataclass(slots=True)
class Scene:
    """Run with one generator process."""

    config: RunConfig
    store: TrajectoryStore
    checkpoints: CheckpointStore
    client: GenerationClient
    model: BenchModel
    session: str = ""
    byte_count: int = 0
    last_token: float = 0.0
    silence: float = 0.0
    token_arrived: asyncio.Event = field(default_factory=asyncio.Event)
    folder: Path = field(default_factory=Path)
    """Folder of the newest policy."""
    process: subprocess.Popen[bytes] | None = None
    """Process of the generator."""
    serving_record: GeneratorRecord | None = None
    """Record of the generator with its first policy."""
    stream_chunk: int = 1
    """Tokens per chunk of the streams."""

    async def publish(self, version: int, policy: Policy) -> None:
        """Write and announce a policy."""
        write, canary = policy
        record = await asyncio.to_thread(
            lambda: self.checkpoints.publish(
                session=self.session,
                policy_version=version,
                train_step=version,
                parent=version - 1 if version else None,
                write=write,
                canary=canary,
            )
        )
        await self.store.policies.announce(self.session, record)
        self.folder = self.checkpoints.root / record.path
        self.byte_count = sum(f.stat().st_size for f in self.folder.iterdir())

    async def reload(self, version: int) -> tuple[float, float, float, float]:
        """Publish one version; return the seconds to serving, of the pause, of silence, and of the load alone."""
        before = await self.metrics()
        policy = await asyncio.to_thread(self.model.policy, version)
        await self.next_token()
        self.silence = 0.0
        started = time.monotonic()
        await self.publish(version, policy)
        await self.serving(version)
        seconds = time.monotonic() - started
        await self.next_token()
        after = await self.metrics()
        pause, load = (after[name] - before[name] for name in ("reload_pause_seconds_sum", "reload_seconds_sum"))
        return seconds, pause, self.silence, load

    async def serving(self, version: int) -> GeneratorRecord:
        """Wait until the generator serves ``version``. Raises EngineError if its process has ended."""
        async with asyncio.timeout(_DEADLINE_SECONDS):
            while True:
                for record in await self.store.generators.live():
                    if record.serving and record.policy_version == version:
                        return record
                if self.process is not None and self.process.poll() is not None:
                    raise EngineError("the generator process has ended")
                await asyncio.sleep(0.001)

    async def next_token(self) -> None:
        """Wait for a token in any stream."""
        self.token_arrived.clear()
        await self.token_arrived.wait()

    async def metrics(self) -> dict[str, float]:
        """Return the generator's metrics without labels, by their names without the prefix."""
        (endpoint,) = read_endpoints(Path(self.config.folder), "generator")
        async with httpx.AsyncClient(timeout=60) as client:
            text = (await client.get(f"http://{endpoint.admin}/metrics")).text
        lines = (line.split(" ") for line in text.splitlines() if line.startswith(_PREFIX) and "{" not in line)
        return {name.removeprefix(_PREFIX): float(value) for name, value in lines}

    @asynccontextmanager
    async def streams(self, count: int = STREAMS) -> AsyncIterator[None]:
        """Keep ``count`` streams running during the block."""
        assert self.serving_record is not None
        record = self.serving_record
        self.last_token = time.monotonic()
        tasks = [asyncio.create_task(self._keep_streaming(record, n)) for n in range(count)]
        try:
            yield
        finally:
            await cancel_and_wait(*tasks)

    async def _keep_streaming(self, record: GeneratorRecord, number: int) -> None:
        """Generate without end, one call after another, on any version."""
        prompt = np.random.default_rng(number).integers(0, self.model.vocab_size, 16).astype(np.int32)
        round_number = 0
        while True:
            round_number += 1
            call = GenerationCall(
                trajectory_id=f"{number}-{round_number}",
                context_ids=prompt,
                prompt_token_count=len(prompt),
                max_new_token_count=CONTEXT - len(prompt) - 8 * number,
                sampling=SamplingParams(),
                chunk_token_count=self.stream_chunk,
            )
            try:
                async for _ in self.client.generate(record, call):
                    now = time.monotonic()
                    self.silence = max(self.silence, now - self.last_token)
                    self.last_token = now
                    self.token_arrived.set()
            except (GenerationRefused, EngineError):
                await asyncio.sleep(0.002)

    def copy_seconds(self) -> float:
        """Measure a copy of the newest policy's files, flushed to disk."""
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=self.config.folder) as target:
            for file in self.folder.iterdir():
                copied = Path(target) / file.name
                shutil.copyfile(file, copied)
                with copied.open("rb") as handle:
                    os.fsync(handle.fileno())
            return time.monotonic() - started


@asynccontextmanager
async def open_scene(
    folder: Path, model: BenchModel, generator: Mapping[str, Any], environment: Mapping[str, str] | None = None
) -> AsyncIterator[Scene]:
    """Start the registry, publish a policy and start a generator with these fields and variables; stop them after."""
    server = EmbeddedServer(folder / "redis", EmbeddedOptions(maxmemory_bytes=1 << 26))
    server.start()
    async with AsyncExitStack() as stack:
        stack.callback(server.kill)
        config = _write_run_file(folder, server.url, model.dtype, generator)
        store = await stack.enter_async_context(await TrajectoryStore.connect(config.store, config.name))
        client = await stack.enter_async_context(GenerationClient())
        scene = Scene(config, store, open_checkpoints(config), client, model)
        await store.limits.init_run(run_limits(config))
        scene.session = await store.training.open_session("bench")
        await scene.publish(0, await asyncio.to_thread(model.policy, 0))
        process = _start_generator(folder, environment or {})
        stack.push_async_callback(_stop, process)
        scene.process = process
        scene.serving_record = await scene.serving(0)
        yield scene


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
    (folder / "run.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    return load_run_config(folder / "run.yaml", environ={})


def _start_generator(folder: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    command = [sys.executable, "-m", "rollmesh.cli.main", "generator", str(folder / "run.yaml")]
    command += ["--supervised-by", str(os.getpid())]
    return subprocess.Popen(command, env={**os.environ, **threads, **environment})


async def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    await asyncio.to_thread(process.wait)
