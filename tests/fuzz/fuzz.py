"""Random requests to every port of a training run, and checks of its services.

Some requests are not sent with the right token, because their effect is permanent: ``Drain`` (ends the process), and
the gateway's ``rollback`` and ``scale`` if they are valid. ``Pause``, ``pause`` and ``pin`` are undone at once; these,
``Interrupt`` of all calls and ``LoadPolicy`` of a version that may exist are rare. Request ``n`` of seed ``s`` is the
same in every run. Redis listens on a private unix socket and is not a target.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks.frame import NONE, Measure, Quick, at_least, at_most, compared
from benchmarks.processes import TrainingRun
from rollmesh.errors import RollmeshError
from rollmesh.report.console import output_console

from ..chaos.short_run import audit, finished_train_steps
from .fuzz_answers import Answer
from .fuzz_grpc import GrpcPort
from .fuzz_http import HttpPort, RawPort
from .fuzz_run import ServiceState, fuzzed_config, open_ports, service_states

SEED = 20261122
_IN_FLIGHT = 48
_DEADLINE_SECONDS = 90.0
"""Time limit of an answer, three times the limit for the head of a request; a slower answer counts as a hang."""
_PROGRESS_SECONDS = 300.0
"""Time limit of two train steps."""
_WARM_UP_SHARE = 0.1
_REQUESTS_PER_SLOW = 5_000
_REQUESTS_PER_LINE = 5_000
_RSS_RATIO = 1.2
_LINES_A_SECOND = 10.0
_MIB = 1 << 20
_STOPPED_STATUS = 130
"""Status of ``rollmesh up`` after SIGTERM."""


@dataclass(slots=True)
class Tally:
    """Answers of one port."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    backpressure: Counter[str] = field(default_factory=Counter)
    slowest: float = 0.0

    def add(self, answer: Answer, seconds: float) -> None:
        """Count an answer."""
        self.outcomes[answer.outcome] += 1
        self.slowest = max(self.slowest, seconds)
        if answer.fault:
            self.faults[f"{answer.outcome} {answer.detail[:300]}"] += 1
        elif answer.backpressure:
            self.backpressure[f"{answer.outcome} {answer.detail[:160]}"] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Results of the requests, and states of the services."""

    tallies: Mapping[str, Tally]
    fresh: Mapping[str, ServiceState]
    warm: Mapping[str, ServiceState]
    """States after a tenth of the requests."""
    last: Mapping[str, ServiceState]
    trained: int
    """Train steps during the requests after the warm-up."""
    trained_after: int
    requests: int
    seconds: float
    green: bool
    """True if the audit at the end, while the run is paused, is green."""
    exit_status: int
    """Exit status of the run, which is stopped at the end."""


class FuzzError(RollmeshError):
    """The run did not start, or stopped training."""


def run(
    *,
    quick: Quick = False,
    requests: Annotated[int, typer.Option(help="Number of requests.", min=1)] = 100_000,
    seed: Annotated[int, typer.Option(help="Seed of the requests.", min=0)] = SEED,
) -> list[Measure]:
    """Start a run, send the requests, print the answers, and return the counts; ``quick`` sends 1,000 requests.

    Raises FuzzError if the run does not start or stops training.
    """
    console = output_console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="rollmesh-fuzz-") as temporary:
        fuzzed = TrainingRun(Path(temporary))
        run_file = fuzzed_config(fuzzed.folder, quick=quick)
        traffic = asyncio.run(_fuzz(fuzzed, run_file, 1_000 if quick else requests, seed, console))
        _print(traffic, console)
        if not traffic.green or traffic.exit_status != _STOPPED_STATUS:
            console.print(fuzzed.output[-2_000:], markup=False, highlight=False)
        return _measures(traffic)


async def _fuzz(
    fuzzed: TrainingRun, run_file: Mapping[str, Any], requests: int, seed: int, console: Console
) -> Traffic:
    folder = fuzzed.folder
    with fuzzed.up(run_file) as process:
        await _two_more_steps(fuzzed, process)
        fresh = await service_states(folder)
        async with AsyncExitStack() as stack:
            ports = await open_ports(folder, stack, process.pid)
            tallies = {port.name: Tally() for port in ports}
            warm_up = int(requests * _WARM_UP_SHARE)
            await _send(ports, tallies, seed, range(warm_up), console)
            warm = await service_states(folder)
            steps, started = finished_train_steps(folder.path), time.monotonic()
            await _send(ports, tallies, seed, range(warm_up, requests), console)
            seconds, trained = time.monotonic() - started, finished_train_steps(folder.path) - steps
            for port in ports:
                if isinstance(port, GrpcPort):
                    await port.undo()
        trained_after = await _two_more_steps(fuzzed, process)
        last = await service_states(folder)
        for port in ports:
            if isinstance(port, HttpPort) and port.known:
                await port.order("/api/v1/pause")
        # The mesh is up during the audit, so that the queue's data is complete.
        green = await asyncio.to_thread(audit, fuzzed) == 0
        process.terminate()
        status = await asyncio.to_thread(process.wait)
    return Traffic(
        tallies=tallies,
        fresh=fresh,
        warm=warm,
        last=last,
        trained=trained,
        trained_after=trained_after,
        requests=requests - warm_up,
        seconds=seconds,
        green=green,
        exit_status=status,
    )


async def _two_more_steps(fuzzed: TrainingRun, process: subprocess.Popen[bytes]) -> int:
    """Wait for two train steps; return their number. Raises FuzzError if the run ends first or takes too long."""
    deadline, before = time.monotonic() + _PROGRESS_SECONDS, finished_train_steps(fuzzed.folder.path)
    while (steps := finished_train_steps(fuzzed.folder.path) - before) < 2:
        if process.poll() is not None or time.monotonic() > deadline:
            raise FuzzError(
                f"the run has not trained two steps after step {before} (status {process.poll()}): "
                f"{fuzzed.output[-2_000:]}"
            )
        await asyncio.sleep(0.2)
    return steps


async def _send(
    ports: Sequence[GrpcPort | RawPort], tallies: Mapping[str, Tally], seed: int, numbers: range, console: Console
) -> None:
    """Send the requests with these numbers concurrently; after the warm-up also requests that never end."""
    remaining = iter(numbers)
    weights = [port.weight for port in ports]

    async def send_next() -> None:
        for number in remaining:
            if number % _REQUESTS_PER_LINE == 0:
                console.print(f"request {number:,}", highlight=False)
            rng = random.Random(f"{seed}:{number}")
            (port,) = rng.choices(ports, weights)
            await _timed(port.send(rng), tallies[port.name], f"request {number}")

    async with asyncio.TaskGroup() as group:
        for _ in range(_IN_FLIGHT):
            group.create_task(send_next())
        for port in (p for p in ports if isinstance(p, RawPort)):
            for number in range(1 + len(numbers) // _REQUESTS_PER_SLOW if numbers.start else 0):
                rng = random.Random(f"{seed}:{port.name}:{number}")
                group.create_task(_timed(port.slow(rng), tallies[port.name], f"endless request {number}"))


async def _timed(request: Coroutine[Any, Any, Answer], tally: Tally, name: str) -> None:
    started = time.monotonic()
    try:
        async with asyncio.timeout(_DEADLINE_SECONDS):
            answer = await request
    except TimeoutError:
        answer = Answer(outcome="no answer", detail=name, fault=True)
    tally.add(answer, time.monotonic() - started)


def _print(traffic: Traffic, console: Console) -> None:
    table = Table("port", "requests", "answers", "backpressure", "slowest, s", "faults")
    for name, tally in traffic.tallies.items():
        answers = ", ".join(f"{count:,} {outcome}" for outcome, count in tally.outcomes.most_common())
        counts = (f"{tally.backpressure.total():,}", f"{tally.slowest:.1f}", f"{tally.faults.total():,}")
        table.add_row(name, f"{tally.outcomes.total():,}", answers, *counts)
    console.print(table)
    services = Table("service", "RSS before, MiB", "after the warm-up", "at the end", "log lines", "restarts")
    for name, last in traffic.last.items():
        states = [states[name] for states in (traffic.fresh, traffic.warm) if name in states]
        sizes = [f"{state.rss / _MIB:,.0f}" for state in (*states, last)]
        services.add_row(name, *sizes, f"{last.lines - states[0].lines:,}", "yes" if states[0].pid != last.pid else "")
    console.print(services)
    for name, state in traffic.last.items():
        for line in state.tracebacks[-3:]:
            console.print(f"{name}: {line[-3_000:]}", markup=False, highlight=False, soft_wrap=True)
    for name, tally in traffic.tallies.items():
        for text, count in (*tally.faults.most_common(8), *tally.backpressure.most_common(4)):
            console.print(f"{name}: {count:,} times {text}", markup=False, highlight=False, soft_wrap=True)


def _measures(traffic: Traffic) -> list[Measure]:
    some = (at_least("value", 1.0),)
    stopped = (at_least("value", _STOPPED_STATUS), at_most("value", _STOPPED_STATUS))
    tallies, warm, last = traffic.tallies.values(), traffic.warm, traffic.last
    hangs = sum(tally.outcomes["no answer"] for tally in tallies)
    kept = sum(name in last and last[name].pid == state.pid for name, state in traffic.fresh.items())
    lines = max(last[name].lines - warm[name].lines for name in last if name in warm) / traffic.seconds
    tracebacks = sum(len(state.tracebacks) for state in last.values())
    counts = (
        ("requests", sum(tally.outcomes.total() for tally in tallies), "requests", ()),
        ("requests a second", traffic.requests / traffic.seconds, "requests/s", ()),
        ("requests without an answer in time", hangs, "requests", NONE),
        ("answers that are a fault of the service", sum(t.faults.total() for t in tallies) - hangs, "answers", NONE),
        ("answers of documented backpressure", sum(t.backpressure.total() for t in tallies), "answers", ()),
        ("services that restarted or ended", len(traffic.fresh) - kept, "services", NONE),
        ("tracebacks in logs", tracebacks, "tracebacks", NONE),
        ("log lines, the most of a service", lines, "lines/s", (at_most("value", _LINES_A_SECOND),)),
        ("train steps during the requests", traffic.trained, "steps", some),
        ("train steps after them", traffic.trained_after, "steps", some),
        ("exit status of the stopped run", traffic.exit_status, "status", stopped),
        ("audit green", int(traffic.green), "audits", some),
    )
    memory = (at_most("ratio", _RSS_RATIO),)
    return [
        *(Measure(name=name, value=value, unit=unit, bars=bars) for name, value, unit, bars in counts),
        *(
            compared(f"RSS of {name}", state.rss, "bytes", "after the warm-up", warm[name].rss, memory)
            for name, state in last.items()
            if name in warm
        ),
    ]
