"""A run with real policies, a real registry and real generator processes; the trainer's part is played here."""

import asyncio
import itertools
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.config import RunConfig
from rollmesh.generator.main import serve
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.scheduling import run_limits
from rollmesh.store import EmbeddedServer, TrajectoryStore
from rollmesh.types import (
    Chunk,
    FinishReason,
    GenerationCall,
    GeneratorRecord,
    Int32Array,
    PolicyRecord,
    VersionNeed,
)
from rollmesh.v1 import generation_service_pb2 as pb
from rollmesh.wire.generation_client import GenerationClient

from ...kit import generation, models
from ...kit.checkpoint_samples import copy_of, publish
from ...kit.generation import VOCAB, Rollout, hf_logprobs, prompt_ids
from ...kit.run_files import write_run
from ...kit.waiting import reached
from ...kit.warm import WarmProcess, start_service

_NUMBERS = itertools.count()
CANARY = [prompt_ids(90 + i, 20) for i in range(2)]
SECRET = "0123456789abcdef0123456789abcdef"
SLOW = [[1, 0.02]]
"""A pace at which a call of a hundred tokens can be met half-way, by a process that comes a second late, too."""
SLOWEST = [[1, 0.06]]
"""A pace for calls that a message through Redis has to meet: of 150 tokens they take 9 seconds."""


def write_model(folder: Path, seed: int, hidden_size: int = 32) -> Path:
    """A random Qwen2 whose distributions differ from token to token."""
    return models.write_model(folder, models.tiny_qwen2(VOCAB, hidden_size=hidden_size), seed, scale=6.0, shift=0.0)


def make_config(
    folder: Path,
    server: EmbeddedServer,
    *,
    session_ttl_seconds: float = 60.0,
    adapter: dict[str, Any] | None = None,
    **generator: Any,
) -> RunConfig:
    """The run file of ``folder``; no entry or lease ends here by the clock, unless a test waits for that."""
    data = {
        "model": {"path": str(folder / "model"), "adapter": adapter},
        "data": {"max_prompt_tokens": 16},
        "rollout": {"max_new_tokens": 200},
        "checkpoints": {"secret": SECRET},
        "store": {"url": server.url, "heartbeat_seconds": 0.2, "session_ttl_seconds": session_ttl_seconds},
        "generator": {
            "slots": 8,
            "max_context_tokens": 256,
            "device": "cpu",
            "drain_timeout_seconds": 5.0,
        },
    }
    return write_run(folder, data, {"generator": generator})


def make_call(name: str = "t", context: Int32Array | None = None, **changes: Any) -> GenerationCall:
    """A call of 150 tokens."""
    return generation.make_call(name, context, **{"max_new_token_count": 150, "seed": 3, **changes})


def raw_request(instance_id: str, **changes: Any) -> pb.GenerateRequest:
    """A call of 5 tokens as bytes on the wire have it: what ``make_call`` cannot say is in ``changes``."""
    context = pb.GenerateRequest().context_ids
    context.dtype, context.data = 1, prompt_ids(0).tobytes()
    fields: dict[str, Any] = {
        "trajectory_id": "t",
        "sampling": {"temperature": 1.0, "top_p": 1.0},
        "max_new_token_count": 5,
        "chunk_token_count": 4,
        "prompt_token_count": 12,
        **changes,
    }
    return pb.GenerateRequest(context_ids=context, instance_id=instance_id, **fields)


@dataclass(frozen=True)
class Stream(Rollout):
    """A call under way, and its chunks so far."""

    task: asyncio.Task[None]

    @property
    def versions(self) -> set[int]:
        return {version for version, _ in self.stamps}

    async def end(self) -> FinishReason | None:
        await self.task
        return self.reason


@dataclass
class Inside:
    """A generator served in this process."""

    task: asyncio.Task[None]
    shutdown: asyncio.Event

    async def stop(self) -> None:
        self.shutdown.set()
        await self.task


@dataclass
class GeneratorRun:
    """Publishes policies and starts, calls and kills generators."""

    config: RunConfig
    store: TrajectoryStore
    checkpoints: CheckpointStore
    client: GenerationClient
    models: dict[int, Path] = field(default_factory=dict)
    session: str = ""
    inside: list[Inside] = field(default_factory=list)
    processes: list[subprocess.Popen[bytes] | WarmProcess] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return Path(self.config.folder)

    async def publish(self, version: int, **policy: Any) -> Path:
        """Publish and announce a policy that ``prepare`` makes; its folder."""
        record = await self.prepare(version, **policy)
        await self.announce(record)
        return self.checkpoints.root / record.path

    async def announce(self, record: PolicyRecord) -> None:
        """Let the generators know of a policy."""
        await self.store.policies.announce(self.session, record)

    async def prepare(
        self, version: int, *, seed: int | None = None, hidden_size: int = 32, canary_error: float = 0.0
    ) -> PolicyRecord:
        """Write a random policy with a true canary (or one that is wrong by ``canary_error``), to be announced.

        That takes a while in which nothing else of this process is done, but generators in it decode on: a policy that
        is to meet a running call is written before the call.
        """
        if not self.session:
            await self.store.limits.init_run(run_limits(self.config))
            self.session = await self.store.training.open_session("test")
        source = write_model(self.folder / f"model-{version}", version if seed is None else seed, hidden_size)
        return self.write(version, source, source, canary_error=canary_error)

    def write(
        self, version: int, source: Path, model: Path, *, canary_error: float = 0.0, base: PolicyRecord | None = None
    ) -> PolicyRecord:
        """Write the files of ``source`` as a policy that computes what ``model`` does."""
        self.models[version] = model
        canary = [
            CanarySequence(token_ids=ids.tolist(), logprobs=(hf_logprobs(model, ids) - canary_error).tolist())
            for ids in CANARY
        ]
        return publish(self.checkpoints, version, self.session, write=copy_of(source), canary=canary, base=base)

    async def begin(self) -> GeneratorRecord:
        """Publish version 0, and start a generator that serves it."""
        await self.publish(0)
        self.start()
        (record,) = await self.serving(0)
        return record

    def start(self, index: int = 0, **options: Any) -> Inside:
        """Serve a generator in this process, with these options in place of those of the run."""
        shutdown = asyncio.Event()
        config = self.config.model_copy(update={"generator": self.config.generator.model_copy(update=options)})
        generator = Inside(asyncio.create_task(serve(config, index, shutdown)), shutdown)
        self.inside.append(generator)
        return generator

    def start_process(self, index: int, *, fresh: bool = False) -> subprocess.Popen[bytes] | WarmProcess:
        """Start a real generator process, with its imports done or in a ``fresh`` interpreter.

        One in front of SGLang imports no torch, and always starts in a fresh interpreter.
        """
        warm = not fresh and self.config.generator.engine == "torch"
        process = start_service("generator", self.folder, index, warm=warm)
        self.processes.append(process)
        return process

    async def until(self, what: str, condition: Callable[[], Awaitable[bool]], seconds: float = 120.0) -> None:
        def fail() -> None:
            for generator in self.inside:
                if generator.task.done() and not generator.shutdown.is_set():
                    generator.task.result()

        def missed() -> str:
            return what + "".join(f"\n{file.read_text()[-3000:]}" for file in self.folder.glob("generator-*.log"))

        await reached(condition, missed, seconds, check=fail)

    async def until_live(self, what: str, wanted: Callable[[list[GeneratorRecord]], bool]) -> None:
        """Wait until the registered generators are as wanted."""

        async def there() -> bool:
            return wanted(await self.store.generators.live())

        await self.until(what, there)

    async def until_status(
        self, record: GeneratorRecord, what: str, wanted: Callable[[pb.GetStatusResponse], bool]
    ) -> None:
        """Wait until a generator's status is as wanted."""

        async def there() -> bool:
            return wanted(await self.client.status(record))

        await self.until(what, there)

    async def serving(self, version: int, count: int = 1, seconds: float = 120.0) -> list[GeneratorRecord]:
        """Wait until ``count`` generators serve ``version``; their records, ordered by address."""
        found: list[GeneratorRecord] = []

        async def there() -> bool:
            found[:] = [g for g in await self.store.generators.live() if g.serving and g.policy_version == version]
            return len(found) >= count

        await self.until(f"{count} generators serving {version}", there, seconds)
        return sorted(found, key=lambda g: g.address)

    async def out_of_rotation(self, reason: str = "canary") -> None:
        """Wait until a generator takes no calls for this reason."""
        await self.until_live(
            "a generator out of rotation", lambda live: any(reason in g.reason and not g.serving for g in live)
        )

    async def metric(self, name: str, index: int = 0) -> float:
        """Value of a metric of one generator; the name of one with labels of its own ends with them."""
        (admin,) = [e.admin for e in read_endpoints(self.folder, "generator") if e.index == index]
        async with httpx.AsyncClient(timeout=60) as client:
            text = (await client.get(f"http://{admin}/metrics")).text
        (line,) = [line for line in text.splitlines() if line.startswith((f"{name} ", f"{name}{{"))]
        return float(line.split()[-1])

    def stream(self, record: GeneratorRecord, call: GenerationCall, **need: Any) -> Stream:
        """Start a call."""
        chunks: list[Chunk] = []

        async def read() -> None:
            async for chunk in self.client.generate(record, call, VersionNeed(**need)):
                chunks.append(chunk)

        return Stream(call, chunks, asyncio.create_task(read()))

    async def under_way(self, record: GeneratorRecord, call: GenerationCall, chunks: int = 2, **need: Any) -> Stream:
        """Start a call and wait for its first chunks."""
        stream = self.stream(record, call, **need)

        async def begun() -> bool:
            if stream.task.done():
                stream.task.result()
            return len(stream.chunks) >= chunks

        await self.until("the first chunks", begun)
        return stream

    async def aclose(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        for generator in self.inside:
            generator.shutdown.set()
        await asyncio.gather(*(g.task for g in self.inside), return_exceptions=True)


@asynccontextmanager
async def runs(server: EmbeddedServer, folder: Path) -> AsyncIterator[Callable[..., Awaitable[GeneratorRun]]]:
    """Yield a function that makes a run with options of ``make_config``, without policies and generators."""
    async with AsyncExitStack() as stack:

        async def make(**options: Any) -> GeneratorRun:
            config = make_config(folder / f"run{next(_NUMBERS)}", server, **options)
            store = await stack.enter_async_context(await TrajectoryStore.connect(config.store, config.name))
            client = await stack.enter_async_context(GenerationClient())
            run = GeneratorRun(config, store, open_checkpoints(config), client)
            stack.push_async_callback(run.aclose)
            return run

        yield make
