"""Equal loads through our generator and directly on its SGLang server."""

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

from benchmarks.workloads import make_call, random_ids
from rollmesh.errors import EngineError
from rollmesh.types import GeneratorRecord, Int32Array
from rollmesh.wire.generation_client import GenerationClient

IN_FLIGHT = 32
_SIBLINGS = 8
"""Calls that share a prompt, like the members of a group."""
_PROMPT_TOKENS = 64
_SHORTEST, _LONGEST = 128, 384
CONTEXT = _PROMPT_TOKENS + _LONGEST + 64
_SERVER_SECONDS = 600.0
_IDLE_CONNECTION_SECONDS = 3.0
"""Lifetime of an idle connection, below the server's 5 s, so that the server never closes one that is being reused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One call of a load."""

    prompt: Int32Array  # [prompt_tokens]
    new_token_count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Cost of one pass of a load."""

    tokens: int
    wall_seconds: float
    cpu_seconds: float
    """CPU seconds of the serving processes, without the client."""


def make_load(count: int, vocab_size: int, seed: int) -> list[Job]:
    """Return groups of calls with one prompt per group and different lengths; equal seeds give equal loads."""
    rng = np.random.default_rng(seed)
    prompts = random_ids(rng, vocab_size, -(-count // _SIBLINGS), _PROMPT_TOKENS)
    lengths = rng.integers(_SHORTEST, _LONGEST, count)
    return [Job(prompt=prompts[i // _SIBLINGS], new_token_count=int(lengths[i])) for i in range(count)]


class BareServer:
    """Client of the server's own endpoints, with a whole answer per request."""

    def __init__(self, url: str, key: str | None) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=2 * IN_FLIGHT, keepalive_expiry=_IDLE_CONNECTION_SECONDS
        )
        self.client = httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=_SERVER_SECONDS)

    async def generate(self, job: Job, cache_key: str) -> int:
        """Request one answer with its log-probabilities; return its number of tokens."""
        answer = await self.post("/generate", self._body(job, cache_key))
        return len(answer["output_ids"])

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Send one request. Raises EngineError for an error response."""
        try:
            response = await self.client.post(path, json=body)
        except httpx.TransportError as error:
            raise EngineError(f"SGLang {path}: {error!r}") from error
        if response.status_code >= 400:
            raise EngineError(f"SGLang {path}: HTTP {response.status_code}: {response.text[:500]}")
        return response.json()

    async def update_seconds(self, folder: str, version: str) -> tuple[float, float]:
        """Load weights while the running requests are retracted; return the seconds of the pause and of the update."""
        started = time.monotonic()
        await self.post("/pause_generation", {"mode": "retract"})
        begun = time.monotonic()
        await self.post("/update_weights_from_disk", {"model_path": folder, "weight_version": version})
        done = time.monotonic()
        await self.post("/continue_generation", {"torch_empty_cache": False})
        return time.monotonic() - started, done - begun

    async def aclose(self) -> None:
        """Close the connections."""
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


async def call_generator(client: GenerationClient, record: GeneratorRecord, job: Job, chunk_token_count: int) -> int:
    """Request one answer from a generator; return its number of tokens."""
    call = make_call(uuid.uuid4().hex, job.prompt, job.new_token_count, chunk_tokens=chunk_token_count)
    return sum([len(chunk.token_ids) async for chunk in client.generate(record, call)])


async def measured(
    jobs: Sequence[Job], generate: Callable[[Job], Awaitable[int]], serving: Sequence[psutil.Process]
) -> Spent:
    """Run a load with ``IN_FLIGHT`` concurrent calls. Raises EngineError for an answer of the wrong length."""
    limit = asyncio.Semaphore(IN_FLIGHT)

    async def run_job(job: Job) -> int:
        async with limit:
            count = await generate(job)
        if count != job.new_token_count:
            raise EngineError(f"the answer has {count} tokens, expected {job.new_token_count}")
        return count

    before, started = cpu_seconds(serving), time.monotonic()
    counts = await asyncio.gather(*(run_job(job) for job in jobs))
    wall = time.monotonic() - started
    return Spent(tokens=sum(counts), wall_seconds=wall, cpu_seconds=cpu_seconds(serving) - before)


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """Return the CPU seconds of these processes so far."""
    return sum(t.user + t.system for t in (p.cpu_times() for p in processes))
