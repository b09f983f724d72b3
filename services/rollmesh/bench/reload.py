"""``rollmesh bench reload``: from publishing a policy to serving it, and what running calls notice.

A real generator process, a real registry and a real checkpoint store; 16 streams are kept running. For each mode of
``generator.on_new_version``, policies are published one after the other:

* publish to serving: from the start of the write (weights, digests, manifest, fsync, announcement) until the registry
  shows the generator serving it, verified and checked on the canary;
* pause: how long the generator held decoding, from its own histogram;
* silence: the longest time without a token in any stream around the swap, re-prefill and refusals included.

Bytes per second are those of the reload (noticed to serving: read, hash, load, canary) beside a plain copy of the
same files.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
import yaml

from rollmesh.bench.measure import Measure, compared
from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.checkpoints.store import CheckpointStore
from rollmesh.config import RunConfig, load_run_config
from rollmesh.errors import EngineError, GenerationRefused
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.scheduling.limits import run_limits
from rollmesh.store import EmbeddedOptions, EmbeddedServer, TrajectoryStore
from rollmesh.types import GenerationCall, GeneratorRecord, SamplingParams
from rollmesh.wire.generation_client import GenerationClient

MODES = ("interrupt", "keep_kv", "drain")
_STREAMS = 16
_CONTEXT = 256
_DEADLINE_SECONDS = 120.0
_SMALL: dict[str, Any] = {"hidden_size": 96, "num_hidden_layers": 3, "intermediate_size": 192, "vocab_size": 96}
_LARGE: dict[str, Any] = {"hidden_size": 512, "num_hidden_layers": 8, "intermediate_size": 1536, "vocab_size": 8192}


def run(*, quick: bool = False) -> list[Measure]:
    """Measure the demo's model (1 MB) in every mode and one of 120 MB; ``quick``: two reloads each, no large model."""
    torch.set_num_threads(1)
    reloads = 2 if quick else 5
    measures: list[Measure] = []
    for mode in MODES:
        measures += asyncio.run(_measure(_SMALL, "1 MB", mode, reloads))
    if not quick:
        measures += asyncio.run(_measure(_LARGE, "120 MB", "interrupt", reloads))
    return measures


async def _measure(shape: dict[str, Any], size: str, mode: str, reloads: int) -> list[Measure]:
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        async with _scene(Path(folder), shape, mode) as scene:
            results = [await scene.reload(version) for version in range(1, reloads + 1)]
            copy_seconds = statistics.median(scene.copy_seconds() for _ in range(reloads))
    serving, pause, silence, load = (statistics.median(column) for column in zip(*results, strict=True))
    title = f"{mode}, {size}"
    return [
        Measure(name=f"publish to serving, {title}", value=serving, unit="seconds"),
        Measure(name=f"pause of decoding, {title}", value=pause, unit="seconds"),
        Measure(name=f"longest silence of {_STREAMS} streams, {title}", value=silence, unit="seconds"),
        compared(
            f"reload, {title}", scene.byte_count / load, "bytes/s", "plain file copy", scene.byte_count / copy_seconds
        ),
    ]


_Policy = tuple[Callable[[Path], None], list[CanarySequence]]
"""How to write a policy's folder, and its canary."""


@dataclass(slots=True)
class _Scene:
    """One run with one generator process and streams that never rest."""

    config: RunConfig
    store: TrajectoryStore
    checkpoints: CheckpointStore
    client: GenerationClient
    shape: dict[str, Any]
    session: str = ""
    byte_count: int = 0
    last_token: float = 0.0
    silence: float = 0.0
    token_arrived: asyncio.Event = field(default_factory=asyncio.Event)
    folder: Path = field(default_factory=Path)
    """The newest policy."""

    async def publish(self, version: int, policy: _Policy) -> None:
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
        await self.store.announce_policy(self.session, record)
        self.folder = self.checkpoints.root / record.path
        self.byte_count = sum(f.stat().st_size for f in self.folder.iterdir())

    async def reload(self, version: int) -> tuple[float, float, float, float]:
        """Publish one version; returns seconds to serving, of pause, of silence, and of the load alone."""
        before = await self.sums()
        policy = await asyncio.to_thread(_make_policy, self.shape, version)
        await self.next_token()
        self.silence = 0.0
        started = time.monotonic()
        await self.publish(version, policy)
        await self.serving(version)
        seconds = time.monotonic() - started
        await self.next_token()
        after = await self.sums()
        pause, load = (after[name] - before[name] for name in ("reload_pause_seconds_sum", "reload_seconds_sum"))
        return seconds, pause, self.silence, load

    async def serving(self, version: int) -> GeneratorRecord:
        """Wait until the generator serves ``version``."""
        async with asyncio.timeout(_DEADLINE_SECONDS):
            while True:
                for record in await self.store.generators():
                    if record.serving and record.policy_version == version:
                        return record
                await asyncio.sleep(0.001)

    async def next_token(self) -> None:
        """Wait for a token in any stream."""
        self.token_arrived.clear()
        await self.token_arrived.wait()

    async def sums(self) -> dict[str, float]:
        """The generator's histogram sums, by name without its prefix."""
        (endpoint,) = read_endpoints(Path(self.config.folder), "generator")
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://{endpoint.admin}/metrics")).text
        lines = (line.split(" ") for line in text.splitlines() if "_sum " in line)
        return {name.removeprefix("rollmesh_generator_"): float(value) for name, value in lines}

    async def keep_streaming(self, record: GeneratorRecord, number: int) -> None:
        """Generate without end, one call after another, whatever version serves."""
        prompt = np.random.default_rng(number).integers(0, self.shape["vocab_size"], 16).astype(np.int32)
        round_number = 0
        while True:
            round_number += 1
            call = GenerationCall(
                trajectory_id=f"{number}-{round_number}",
                context_ids=prompt,
                prompt_token_count=len(prompt),
                max_new_token_count=_CONTEXT - len(prompt) - 8 * number,
                sampling=SamplingParams(),
                chunk_token_count=1,
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
        """Copy the newest policy's files and flush them."""
        started = time.monotonic()
        with tempfile.TemporaryDirectory(dir=self.config.folder) as target:
            for file in self.folder.iterdir():
                copied = Path(target) / file.name
                shutil.copyfile(file, copied)
                with copied.open("rb") as handle:
                    os.fsync(handle.fileno())
            return time.monotonic() - started


@asynccontextmanager
async def _scene(folder: Path, shape: dict[str, Any], mode: str) -> AsyncIterator[_Scene]:
    """Start the registry, the first policy, the generator and the streams."""
    server = EmbeddedServer(folder / "redis", EmbeddedOptions(maxmemory_bytes=1 << 26))
    server.start()
    async with AsyncExitStack() as stack:
        stack.callback(server.kill)
        config = _write_run_file(folder, server.url, mode)
        store = await stack.enter_async_context(await TrajectoryStore.connect(config.store, config.name))
        client = await stack.enter_async_context(GenerationClient())
        scene = _Scene(config, store, CheckpointStore.from_config(config), client, shape)
        await store.init_run(run_limits(config))
        scene.session = await store.open_trainer_session("bench")
        await scene.publish(0, _make_policy(shape, 0))
        stack.push_async_callback(_stop, _start_generator(folder))
        record = await scene.serving(0)
        scene.last_token = time.monotonic()
        streams = [asyncio.create_task(scene.keep_streaming(record, n)) for n in range(_STREAMS)]
        try:
            yield scene
        finally:
            for stream in streams:
                stream.cancel()
            await asyncio.gather(*streams, return_exceptions=True)


def _write_run_file(folder: Path, redis_url: str, mode: str) -> RunConfig:
    data = {
        "name": "bench-reload",
        "folder": str(folder),
        "model": {"path": str(folder)},
        "data": {"max_prompt_tokens": 16},
        "rollout": {"max_new_tokens": _CONTEXT - 16},
        "generator": {
            "slots": 2 * _STREAMS,
            "max_context_tokens": _CONTEXT,
            "on_new_version": mode,
            "drain_timeout_seconds": 2.0,
        },
        "store": {"url": redis_url},
        "telemetry": {"log_level": "error"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(data), encoding="utf-8")
    return load_run_config(folder / "run.yaml", environ={})


def _start_generator(folder: Path) -> subprocess.Popen[bytes]:
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    command = [sys.executable, "-m", "rollmesh.cli.main", "generator", str(folder / "run.yaml")]
    command += ["--supervised-by", str(os.getpid())]
    return subprocess.Popen(command, env={**os.environ, **threads})


async def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    await asyncio.to_thread(process.wait)


def _make_policy(shape: dict[str, Any], seed: int) -> _Policy:
    """A random model, with a canary of 8 sequences of 32 tokens, as the trainer's."""
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    torch.manual_seed(seed)
    heads = {"num_attention_heads": shape["hidden_size"] // 32, "num_key_value_heads": 1}
    config = Qwen2Config(**shape, **heads, tie_word_embeddings=True, max_position_embeddings=_CONTEXT)
    model: Any = Qwen2ForCausalLM(config)
    ids = torch.randint(0, shape["vocab_size"], (8, 32))
    with torch.inference_mode():
        logprobs = model.eval()(ids).logits.log_softmax(-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)
    canary = [
        CanarySequence(token_ids=row.tolist(), logprobs=scores.tolist())
        for row, scores in zip(ids, logprobs, strict=True)
    ]
    return model.save_pretrained, canary
