"""The same load twice: through our generator, and straight to the SGLang server behind it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import psutil

from rollmesh.errors import EngineError
from rollmesh.types import GenerationCall, GeneratorRecord, Int32Array, SamplingParams
from rollmesh.wire.generation_client import GenerationClient

IN_FLIGHT = 32
_SIBLINGS = 8
"""Calls that share a prompt, as the members of a group do."""
_PROMPT_TOKENS = 64
_SHORTEST, _LONGEST = 128, 384
CONTEXT = _PROMPT_TOKENS + _LONGEST + 64
_SERVER_SECONDS = 600.0
_IDLE_CONNECTION_SECONDS = 3.0
"""Less than the 5 s after which the server itself closes an idle connection, perhaps just when it is used again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One call of a load."""

    prompt: Int32Array  # [prompt_tokens]
    new_token_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """What one pass of a load took."""

    tokens: int
    wall_seconds: float
    cpu_seconds: float
    """Of the processes that serve; the client is not among them."""


def make_load(count: int, vocab_size: int, seed: int) -> list[Job]:
    """Groups of calls with one prompt each and lengths of their own, the same for the same seed."""
    rng = np.random.default_rng(seed)
    prompts = rng.integers(0, vocab_size, (-(-count // _SIBLINGS), _PROMPT_TOKENS)).astype(np.int32)
    lengths = rng.integers(_SHORTEST, _LONGEST, count)
    return [Job(prompt=prompts[i // _SIBLINGS], new_token_count=int(lengths[i])) for i in range(count)]


class BareServer:
    """The server's own endpoints, used as one would without us: a whole answer per request."""

    def __init__(self, url: str, key: str | None) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=2 * IN_FLIGHT, keepalive_expiry=_IDLE_CONNECTION_SECONDS
        )
        self.client = httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=_SERVER_SECONDS)

    async def generate(self, job: Job, cache_key: str) -> int:
        """One answer with its log-probabilities; returns its tokens."""
        answer = await self.post("/generate", self._body(job, cache_key))
        return len(answer["output_ids"])

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """One request; EngineError for an answer that is an error."""
        try:
            response = await self.client.post(path, json=body)
        except httpx.TransportError as error:
            raise EngineError(f"SGLang {path}: {error!r}") from error
        if response.status_code >= 400:
            raise EngineError(f"SGLang {path}: HTTP {response.status_code}: {response.text[:500]}")
        return response.json()

    async def update_seconds(self, folder: str, version: str) -> tuple[float, float]:
        """Load weights with the running requests put back; seconds of the whole pause, and of the update alone."""
        started = time.monotonic()
        await self.post("/pause_generation", {"mode": "retract"})
        begun = time.monotonic()
        await self.post("/update_weights_from_disk", {"model_path": folder, "weight_version": version})
        done = time.monotonic()
        await self.post("/continue_generation", {"torch_empty_cache": False})
        return time.monotonic() - started, done - begun

    async def aclose(self) -> None:
        """Close its connections."""
        await self.client.aclose()

    def _body(self, job: Job, cache_key: str) -> dict[str, Any]:
        sampling = {"max_new_tokens": job.new_token_count, "temperature": 1.0, "ignore_eos": True}
        return {
            "rid": uuid.uuid4().hex,
            "input_ids": job.prompt.tolist(),
            "extra_key": cache_key,
            "return_logprob": True,
            "logprob_start_len": -1,
            "sampling_params": sampling,
        }


async def generate_by_us(client: GenerationClient, record: GeneratorRecord, job: Job, chunk_token_count: int) -> int:
    """The same answer through a generator; returns its tokens."""
    call = GenerationCall(
        trajectory_id=uuid.uuid4().hex,
        context_ids=job.prompt,
        prompt_token_count=len(job.prompt),
        max_new_token_count=job.new_token_count,
        sampling=SamplingParams(),
        chunk_token_count=chunk_token_count,
    )
    return sum([len(chunk.token_ids) async for chunk in client.generate(record, call)])


async def measured(
    jobs: Sequence[Job], generate: Callable[[Job], Awaitable[int]], serving: Sequence[psutil.Process]
) -> Spent:
    """Run a load with ``IN_FLIGHT`` calls at once; EngineError when an answer is short."""
    places = asyncio.Semaphore(IN_FLIGHT)

    async def one(job: Job) -> int:
        async with places:
            count = await generate(job)
        if count != job.new_token_count:
            raise EngineError(f"an answer of {count} tokens where {job.new_token_count} were asked for")
        return count

    before, started = cpu_seconds(serving), time.monotonic()
    counts = await asyncio.gather(*(one(job) for job in jobs))
    wall = time.monotonic() - started
    return Spent(tokens=sum(counts), wall_seconds=wall, cpu_seconds=cpu_seconds(serving) - before)


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """CPU time of these processes so far."""
    return sum(t.user + t.system for t in (p.cpu_times() for p in processes))
