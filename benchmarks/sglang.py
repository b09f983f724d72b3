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

from __future__ import annotations

import asyncio
import secrets
import statistics
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import psutil
import torch
import typer

from benchmarks.frame import Quick
from benchmarks.measure import Bar, Measure, at_least, at_most, compared
from benchmarks.models import SMALL, BenchModel, RandomModel, SavedModel
from benchmarks.scene import STREAMS, Scene, open_scene
from benchmarks.sglang_load import CONTEXT, IN_FLIGHT, BareServer, Job, Spent, call_generator, make_load, measured

_KEY_VARIABLE = "ROLLMESH_GENERATOR__SGLANG__ADMIN_KEY"
_SLICES = (384, 256, 64)
"""Tokens per slice: one request per answer (as with the default of 512), few requests, and many."""
_RATE_BARS, _COST_BARS = (at_least("ratio", 0.95),), (at_most("ratio", 1.1),)
"""Bars of one request per answer."""
_MODES: dict[str, dict[str, Any]] = {
    "interrupt (retract)": {"on_new_version": "interrupt"},
    "interrupt (abort)": {"on_new_version": "interrupt", "sglang": {"interrupt": "abort"}},
    "keep_kv": {"on_new_version": "keep_kv"},
    "drain": {"on_new_version": "drain"},
}
_BARE = "bare server"
_STREAM_CHUNK = 16
_REQUESTS_STARTED_SECONDS = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """Size of the measurement."""

    passes: int
    calls: int
    """Calls of a pass; at most ``IN_FLIGHT`` of them at once."""
    slices: tuple[int, ...]
    modes: tuple[str, ...]
    reloads: int


_FULL = _Plan(passes=3, calls=64, slices=_SLICES, modes=tuple(_MODES), reloads=4)
_QUICK = _Plan(passes=1, calls=8, slices=_SLICES[1:2], modes=tuple(_MODES)[:1], reloads=1)


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
    torch.set_num_threads(1)
    plan = _QUICK if quick else _FULL
    if model is None:
        served: BenchModel = RandomModel(shape={**SMALL, "max_position_embeddings": CONTEXT})
    else:
        served = SavedModel(model, CONTEXT)
    server = {"url": url} if url is not None else {"python": python}
    measures: list[Measure] = []
    for number, mode in enumerate(plan.modes):
        measures += asyncio.run(_measure(plan, served, server, mode, serve=number == 0))
    return measures


async def _measure(
    plan: _Plan, model: BenchModel, server: Mapping[str, Any], mode: str, *, serve: bool
) -> list[Measure]:
    fields = _MODES[mode]
    sglang = {**server, **fields.get("sglang", {})}
    # A server that we start needs its device; a server at a URL already has one.
    device = {"device": "cpu"} if "url" not in server and not torch.cuda.is_available() else {}
    generator = {
        **fields,
        **device,
        "engine": "sglang",
        "slots": IN_FLIGHT,
        "max_context_tokens": CONTEXT,
        "sglang": sglang,
    }
    environment = {} if "url" in server else {_KEY_VARIABLE: secrets.token_hex(16)}
    with tempfile.TemporaryDirectory(prefix="rollmesh-bench-") as folder:
        async with open_scene(Path(folder), model, generator, environment) as scene:
            arms = _Arms(scene, environment.get(_KEY_VARIABLE), server.get("url"))
            try:
                measures = await _serving(plan, arms) if serve else []
                return measures + await _reloading(plan, arms, mode)
            finally:
                await arms.bare.aclose()


class _Arms:
    """Both arms of the bench, and the processes that serve each of them."""

    def __init__(self, scene: Scene, key: str | None, url: str | None) -> None:
        self.scene = scene
        ours = psutil.Process(scene.process.pid)
        if url is None:
            server_processes, words = _server_below(ours)
            url = f"http://127.0.0.1:{words[words.index('--port') + 1]}"
        else:
            server_processes = _processes_listening(url)
        self.bare = BareServer(url, key)
        self.server_processes = server_processes
        """Processes of the server; empty if it runs on another machine."""
        self.all_processes = [ours, *server_processes]

    async def ours(self, jobs: list[Job], slice_token_count: int) -> Spent:
        """Run a load through our generator."""
        scene = self.scene
        return await measured(
            jobs, lambda job: call_generator(scene.client, scene.record, job, slice_token_count), self.all_processes
        )

    async def directly(self, jobs: list[Job]) -> Spent:
        """Run a load directly on the server."""
        key = secrets.token_hex(4)
        return await measured(jobs, lambda job: self.bare.generate(job, key), self.server_processes)


def _server_below(process: psutil.Process) -> tuple[list[psutil.Process], list[str]]:
    """Return the processes of a generator's server, and the command line of its main process."""
    # A zombie process has no command line.
    commands = [(p, p.as_dict(["cmdline"], ad_value=[])["cmdline"]) for p in process.children(recursive=True)]
    server = [(p, words) for p, words in commands if words and "orphan_guard.py" not in " ".join(words)]
    return [p for p, _ in server], next(words for _, words in server if "sglang.launch_server" in words)


def _processes_listening(url: str) -> list[psutil.Process]:
    port = urlsplit(url).port
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.pid and connection.laddr[1:] == (port,):
            main = psutil.Process(connection.pid)
            return [main, *main.children(recursive=True)]
    return []


async def _serving(plan: _Plan, arms: _Arms) -> list[Measure]:
    vocab_size = arms.scene.model.vocab_size
    in_flight = min(plan.calls, IN_FLIGHT)
    warm_up = make_load(in_flight, vocab_size, 0)
    await arms.directly(warm_up)
    await arms.ours(warm_up, plan.slices[0])
    measures: list[Measure] = []
    for size in plan.slices:
        before = await arms.scene.metrics()
        loads = [make_load(plan.calls, vocab_size, 1000 * size + number) for number in range(plan.passes)]
        pairs = [(await arms.ours(jobs, size), await arms.directly(jobs)) for jobs in loads]
        after = await arms.scene.metrics()
        measures += _compare(pairs, in_flight, size, with_server=bool(arms.server_processes))
        spent = {name: after[name] - before[name] for name in ("prefill_tokens_total", "cached_tokens_total")}
        measures += _cached([job for jobs in loads for job in jobs], size, **spent)
    return measures


def _compare(pairs: list[tuple[Spent, Spent]], in_flight: int, size: int, *, with_server: bool) -> list[Measure]:
    """Return medians of both arms; the ratio is the median of the passes' ratios, so a busy period counts once."""
    title = f"{in_flight} in flight, slices of {size}"
    rates = [(a.tokens / a.wall_seconds, b.tokens / b.wall_seconds) for a, b in pairs]
    is_default = size == _SLICES[0]
    measures = [_median(f"tokens per second, {title}", "tokens/s", rates, _RATE_BARS if is_default else ())]
    if with_server:
        costs = [(1e6 * a.cpu_seconds / a.tokens, 1e6 * b.cpu_seconds / b.tokens) for a, b in pairs]
        name = f"CPU per token, server and generator, {title}"
        measures.append(_median(name, "us/token", costs, _COST_BARS if is_default else ()))
    return measures


def _median(name: str, unit: str, pairs: list[tuple[float, float]], bars: tuple[Bar, ...]) -> Measure:
    ours, bare = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(a / b for a, b in pairs)
    return replace(compared(name, ours, unit, _BARE, bare, bars), ratio=ratio)


def _cached(jobs: list[Job], size: int, *, prefill_tokens_total: float, cached_tokens_total: float) -> list[Measure]:
    """Return the shares of context tokens found in the server's cache: in first slices, and over all slices.

    The last token of a context is the input of the first decode step and is never prefilled.
    """
    first = sum(len(job.prompt) - 1 for job in jobs)
    later = sum(sum(len(job.prompt) - 1 + done for done in range(size, job.new_token_count, size)) for job in jobs)
    overall = (first + later - prefill_tokens_total) / (first + later)
    return [
        Measure(name=f"cached tokens, first slices ({size})", value=cached_tokens_total / first, unit="share"),
        Measure(name=f"cached tokens, with continuing slices ({size})", value=overall, unit="share"),
    ]


async def _reloading(plan: _Plan, arms: _Arms, mode: str) -> list[Measure]:
    scene = arms.scene
    scene.stream_chunk = _STREAM_CHUNK
    async with scene.streams():
        serving, pause, silence, *_ = await scene.reloads(plan.reloads)
    bare = [await _bare_update(arms, str(plan.reloads)) for _ in range(plan.reloads)]
    bare_pause, update = (statistics.median(column) for column in zip(*bare, strict=True))
    return [
        Measure(name=f"publish to serving, {mode}", value=serving, unit="seconds"),
        compared(f"pause of decoding, {mode}", pause, "seconds", "bare server: pause, update, continue", bare_pause),
        Measure(name=f"update_weights_from_disk alone, bare server, {mode}", value=update, unit="seconds"),
        Measure(name=f"longest silence of {STREAMS} streams, {mode}", value=silence, unit="seconds"),
    ]


async def _bare_update(arms: _Arms, version: str) -> tuple[float, float]:
    """Reload the current weights on the bare server during requests; return the seconds of pause and update."""
    jobs = make_load(STREAMS, arms.scene.model.vocab_size, int(version))
    requests = [asyncio.create_task(arms.bare.generate(job, "bare")) for job in jobs]
    await asyncio.sleep(_REQUESTS_STARTED_SECONDS)
    try:
        return await arms.bare.update_seconds(str(arms.scene.folder), version)
    finally:
        await asyncio.gather(*requests)
