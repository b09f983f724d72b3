"""Cost of our generator on top of its SGLang server.

A generator process starts its own server (``--python``: the interpreter with SGLang), or uses a running one
(``--url``), with a random model of the demo's shape or a given one (``--model``: a Hugging Face folder). The baseline
is the same server with direct requests.

Serving: 32 calls in flight, groups of 8 with one prompt, lengths uniform between 128 and 384, a log-probability per
token. The passes alternate (ours, bare, ours, bare) with new prompts each time; medians count. Bare is one request per
answer; ours is a gRPC stream of slices. CPU seconds are those of the serving processes: the server in both, and our
generator in ours. The client, this process, counts in neither.

Reload: policies are published under 16 running streams, for every mode. The pause of our generator, with the canary, is
compared with the time in which the bare server pauses, updates its weights from the same folder and continues, also
under 16 running requests.
"""

import asyncio
import json
import secrets
import statistics
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import torch
import typer

from benchmarks.frame import Measure, Quick, at_least, at_most, compared
from benchmarks.models import SMALL, PublishedModel, write_random_model
from benchmarks.scene import STREAMS, Reload, Scene, open_scene
from benchmarks.workloads import make_call, random_ids
from rollmesh.errors import ConfigError, EngineError
from rollmesh.types import Int32Array

IN_FLIGHT = 32
_SIBLINGS = 8
"""Calls that share a prompt, like the members of a group."""
_PROMPT_TOKENS = 64
_SHORTEST, _LONGEST = 128, 384
_CONTEXT = _PROMPT_TOKENS + _LONGEST + 64
_SLICES = (384, 256, 64)
"""Tokens per slice: one request per answer (as with the default of 512), few requests, and many."""
_MODES: Mapping[str, Mapping[str, Any]] = {
    "interrupt (retract)": {"on_new_version": "interrupt"},
    "interrupt (abort)": {"on_new_version": "interrupt", "sglang": {"interrupt": "abort"}},
    "keep_kv": {"on_new_version": "keep_kv"},
    "drain": {"on_new_version": "drain"},
}
_KEY_VARIABLE = "ROLLMESH_GENERATOR__SGLANG__ADMIN_KEY"
_STREAM_CHUNK = 16
_REQUESTS_STARTED_SECONDS = 0.2
_SERVER_SECONDS = 600.0
_IDLE_CONNECTION_SECONDS = 3.0
"""Lifetime of an idle connection, below the server's 5 s, so that the server never closes one that is being reused."""


def run(
    *,
    quick: Quick = False,
    python: Annotated[str | None, typer.Option(help="Python interpreter that has SGLang.")] = None,
    url: Annotated[str | None, typer.Option(help="URL of a running server of that model.")] = None,
    model: Annotated[Path | None, typer.Option(help="Hugging Face folder; default: demo model.")] = None,
) -> list[Measure]:
    """Measure; ``quick``: one pass of 8 calls of each arm and one reload in one mode.

    Raises ConfigError if both ``python`` and ``url`` are set, or the interpreter has no SGLang, or the model is
    invalid. Raises EngineError if the server does not start.
    """
    server = {"url": url} if url is not None else {"python": python}
    measures: list[Measure] = []
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        if model is None:
            write_random_model(Path(folder), {**SMALL, "max_position_embeddings": _CONTEXT})
        else:
            _check_model(model)
        served = PublishedModel(model or Path(folder))
        for number, mode in enumerate(list(_MODES)[:1] if quick else _MODES):
            measures += asyncio.run(_measure(served, server, mode, quick=quick, serve=number == 0))
    return measures


def _check_model(folder: Path) -> None:
    try:
        positions = int(json.loads((folder / "config.json").read_text())["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--model {folder}: expected a Hugging Face folder: {error!r}") from error
    if positions < _CONTEXT:
        raise ConfigError(f"--model {folder}: max_position_embeddings={positions}, the bench needs {_CONTEXT}")


async def _measure(
    model: PublishedModel, server: Mapping[str, Any], mode: str, *, quick: bool, serve: bool
) -> list[Measure]:
    fields = {"engine": "sglang", "slots": IN_FLIGHT, "max_context_tokens": _CONTEXT, **_MODES[mode]}
    fields["sglang"] = {**server, **fields.get("sglang", {})}
    # A server that we start needs its device and has a key; a server at a URL already has both.
    if "url" not in server and not torch.cuda.is_available():
        fields["device"] = "cpu"
    variables = {} if "url" in server else {_KEY_VARIABLE: secrets.token_hex(16)}
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        async with open_scene(Path(folder), model, fields, variables) as scene:
            arms = _Arms(scene, variables.get(_KEY_VARIABLE), server.get("url"))
            try:
                measures = await _serving(arms, quick=quick) if serve else []
                return measures + await _reloading(arms, mode, 1 if quick else 4)
            finally:
                await arms.client.aclose()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One call of a load."""

    prompt: Int32Array  # [prompt_tokens]
    new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spent:
    """Cost of one pass of a load."""

    tokens_per_second: float
    cpu_us_per_token: float
    """CPU of the serving processes, without the client."""


class _Arms:
    """Both arms of the bench, and the processes that serve each of them."""

    def __init__(self, scene: Scene, key: str | None, url: str | None) -> None:
        self.scene = scene
        self._generator = psutil.Process(scene.process.pid)
        if url is None:
            self.server, words = _server_below(self._generator)
            url = f"http://127.0.0.1:{words[words.index('--port') + 1]}"
        else:
            self.server = _processes_listening(url)
        limits = httpx.Limits(
            max_connections=None, max_keepalive_connections=2 * IN_FLIGHT, keepalive_expiry=_IDLE_CONNECTION_SECONDS
        )
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.client = httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=_SERVER_SECONDS)

    async def ours(self, jobs: Sequence[_Job], slice_tokens: int) -> _Spent:
        """Run a load through our generator."""

        async def answer(job: _Job) -> int:
            call = make_call(uuid.uuid4().hex, job.prompt, job.new_tokens, chunk_tokens=slice_tokens)
            chunks = self.scene.client.generate(self.scene.record, call)
            return sum([len(chunk.token_ids) async for chunk in chunks])

        return await _spent(jobs, answer, [self._generator, *self.server])

    async def directly(self, jobs: Sequence[_Job]) -> _Spent:
        """Run a load directly on the server."""
        key = secrets.token_hex(4)
        return await _spent(jobs, lambda job: self.request(job, key), self.server)

    async def request(self, job: _Job, cache_key: str) -> int:
        """Request one whole answer of the server with its log-probabilities; return its number of tokens."""
        body = {
            "rid": uuid.uuid4().hex,
            "input_ids": job.prompt.tolist(),
            "extra_key": cache_key,
            "return_logprob": True,
            "logprob_start_len": -1,
            "sampling_params": {"max_new_tokens": job.new_tokens, "temperature": 1.0, "ignore_eos": True},
        }
        return len((await self._post("/generate", body))["output_ids"])

    async def update_seconds(self, version: str) -> tuple[float, float]:
        """Load the newest weights on the bare server during requests; return seconds of the pause and of the update."""
        jobs = make_load(STREAMS, self.scene.model.vocab_size, int(version))
        requests = [asyncio.create_task(self.request(job, "bare")) for job in jobs]
        await asyncio.sleep(_REQUESTS_STARTED_SECONDS)
        try:
            started = time.monotonic()
            await self._post("/pause_generation", {"mode": "retract"})
            begun = time.monotonic()
            weights = {"model_path": str(self.scene.folder), "weight_version": version}
            await self._post("/update_weights_from_disk", weights)
            done = time.monotonic()
            await self._post("/continue_generation", {"torch_empty_cache": False})
            return time.monotonic() - started, done - begun
        finally:
            await asyncio.gather(*requests)

    async def _post(self, path: str, body: Mapping[str, Any]) -> Any:
        try:
            response = await self.client.post(path, json=body)
        except httpx.TransportError as error:
            raise EngineError(f"SGLang {path}: {error!r}") from error
        if response.status_code >= 400:
            raise EngineError(f"SGLang {path}: HTTP {response.status_code}: {response.text[:500]}")
        return response.json()


async def _spent(
    jobs: Sequence[_Job], answer: Callable[[_Job], Awaitable[int]], serving: Sequence[psutil.Process]
) -> _Spent:
    """Run a load with ``IN_FLIGHT`` concurrent calls. Raises EngineError for an answer of the wrong length."""
    limit = asyncio.Semaphore(IN_FLIGHT)

    async def run_job(job: _Job) -> int:
        async with limit:
            count = await answer(job)
        if count != job.new_tokens:
            raise EngineError(f"the answer has {count} tokens, expected {job.new_tokens}")
        return count

    def cpu_seconds() -> float:
        return sum(t.user + t.system for t in (p.cpu_times() for p in serving))

    before, started = cpu_seconds(), time.monotonic()
    tokens = sum(await asyncio.gather(*(run_job(job) for job in jobs)))
    wall = time.monotonic() - started
    return _Spent(tokens_per_second=tokens / wall, cpu_us_per_token=1e6 * (cpu_seconds() - before) / tokens)


def make_load(count: int, vocab_size: int, seed: int) -> list[_Job]:
    """Return groups of calls with one prompt per group and different lengths; equal seeds give equal loads."""
    rng = np.random.default_rng(seed)
    prompts = random_ids(rng, vocab_size, -(-count // _SIBLINGS), _PROMPT_TOKENS)
    lengths = rng.integers(_SHORTEST, _LONGEST, count).tolist()
    return [_Job(prompt=prompts[i // _SIBLINGS], new_tokens=length) for i, length in enumerate(lengths)]


def _server_below(process: psutil.Process) -> tuple[list[psutil.Process], list[str]]:
    """Return the processes of a generator's server, and the command line of its main process."""
    # A zombie process has no command line.
    commands = [(p, p.as_dict(["cmdline"], ad_value=[])["cmdline"]) for p in process.children(recursive=True)]
    server = [(p, words) for p, words in commands if words and "orphan_guard.py" not in " ".join(words)]
    return [p for p, _ in server], next(words for _, words in server if "sglang.launch_server" in words)


def _processes_listening(url: str) -> list[psutil.Process]:
    """Return the processes of a server at a URL; none if it runs on another machine."""
    port = urlsplit(url).port
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.pid and connection.laddr[1:] == (port,):
            main = psutil.Process(connection.pid)
            return [main, *main.children(recursive=True)]
    return []


async def _serving(arms: _Arms, *, quick: bool) -> list[Measure]:
    """Compare both arms for every size of a slice; one request per answer has bars."""
    vocab_size, calls = arms.scene.model.vocab_size, 8 if quick else 2 * IN_FLIGHT
    warm_up = make_load(min(calls, IN_FLIGHT), vocab_size, 0)
    await arms.directly(warm_up)
    await arms.ours(warm_up, _SLICES[0])
    measures: list[Measure] = []
    for size in _SLICES[1:2] if quick else _SLICES:
        before = await arms.scene.metrics()
        loads = [make_load(calls, vocab_size, 1000 * size + number) for number in range(1 if quick else 3)]
        pairs = [(await arms.ours(jobs, size), await arms.directly(jobs)) for jobs in loads]
        after = await arms.scene.metrics()
        title = f"{min(calls, IN_FLIGHT)} in flight, slices of {size}"
        rates = [(ours.tokens_per_second, bare.tokens_per_second) for ours, bare in pairs]
        row = _median(f"tokens per second, {title}", "tokens/s", rates)
        measures.append(replace(row, bars=(at_least("ratio", 0.95),) if size == _SLICES[0] else ()))
        if arms.server:
            costs = [(ours.cpu_us_per_token, bare.cpu_us_per_token) for ours, bare in pairs]
            row = _median(f"CPU per token, server and generator, {title}", "us/token", costs)
            measures.append(replace(row, bars=(at_most("ratio", 1.1),) if size == _SLICES[0] else ()))
        prefilled, cached = (after[n] - before[n] for n in ("prefill_tokens_total", "cached_tokens_total"))
        measures += _cached([job for jobs in loads for job in jobs], size, prefilled, cached)
    return measures


def _median(name: str, unit: str, pairs: Sequence[tuple[float, float]]) -> Measure:
    """Return medians of both arms; the ratio is the median of the passes' ratios, so a busy period counts once."""
    ours, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
    return replace(compared(name, ours, unit, "bare server", bare), ratio=statistics.median(a / b for a, b in pairs))


def _cached(jobs: Sequence[_Job], size: int, prefilled: float, cached: float) -> list[Measure]:
    """Return the shares of context tokens found in the server's cache: in first slices, and over all slices.

    The last token of a context is the input of the first decode step and is never prefilled.
    """
    first = sum(len(job.prompt) - 1 for job in jobs)
    every = first + sum(len(job.prompt) - 1 + done for job in jobs for done in range(size, job.new_tokens, size))
    return [
        Measure(name=f"cached tokens, first slices ({size})", value=cached / first, unit="share"),
        Measure(
            name=f"cached tokens, with continuing slices ({size})", value=(every - prefilled) / every, unit="share"
        ),
    ]


async def _reloading(arms: _Arms, mode: str, reloads: int) -> list[Measure]:
    scene = arms.scene
    scene.stream_chunk = _STREAM_CHUNK
    async with scene.streams():
        ours = Reload.median([await scene.reload(version) for version in range(1, reloads + 1)])
    bare = [await arms.update_seconds(str(reloads)) for _ in range(reloads)]
    pause, update = (statistics.median(column) for column in zip(*bare, strict=True))
    return [
        Measure(name=f"publish to serving, {mode}", value=ours.serving, unit="seconds"),
        compared(f"pause of decoding, {mode}", ours.pause, "seconds", "bare server: pause, update, continue", pause),
        Measure(name=f"update_weights_from_disk alone, bare server, {mode}", value=update, unit="seconds"),
        Measure(name=f"longest silence of {STREAMS} streams, {mode}", value=ours.silence, unit="seconds"),
    ]
