"""Random requests to every port of a training run, which must go on.

What a schema describes is sent by schemathesis (tests of the gateway and of the agents service). Here are the others:
every gRPC method with messages of boundary values and damaged bytes, bytes that no protocol allows, damaged bodies, and
requests that never end, with the right token, a wrong one and none. ``Drain`` is not sent with the right token, because
it ends the process. ``Pause``, which is undone at once, ``Interrupt`` of all calls and ``LoadPolicy`` of a version that
may exist are rare. Request ``n`` of seed ``s`` is the same in every run. Redis listens on a private unix socket and is
not a target.
"""

import asyncio
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx
import psutil
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.frame import NONE, Measure, Quick, at_least, at_most, compared, run_command
from benchmarks.processes import TrainingRun
from rollmesh.checkpoints.sealing import TOKEN_FILE
from rollmesh.errors import RollmeshError
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.report.console import output_console
from rollmesh.runtime.endpoints import Endpoint, read_endpoints

from ..chaos.short_run import audit, finished_train_steps, short_run_config
from .ports import Answer, GrpcPort, RawPort, open_ports

_IN_FLIGHT = 48
_DEADLINE_SECONDS = 90.0
"""Time limit of an answer, three times the limit for the head of a request; a slower answer counts as a hang."""
_PROGRESS_SECONDS = 300.0
"""Time limit of two train steps."""
_WARM_UP_SHARE = 0.1
_REQUESTS_PER_SLOW = 5_000
_STOPPED_STATUS = 130
"""Status of ``rollmesh up`` after SIGTERM."""


class FuzzError(RollmeshError):
    """The run did not start, or stopped training."""


@dataclass(slots=True)
class Tally:
    """Answers of one port."""

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    backpressure: int = 0

    def add(self, answer: Answer) -> None:
        """Count an answer."""
        self.outcomes[answer.outcome] += 1
        self.backpressure += answer.backpressure
        if answer.fault:
            self.faults[f"{answer.outcome} {answer.detail[:300]}"] += 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceState:
    """State of a service process at one time."""

    pid: int
    rss: int
    """Resident memory of the process and its children, in bytes."""
    lines: int
    """Number of lines in its log."""
    tracebacks: tuple[str, ...]
    """Lines of its log with a traceback."""


States = Mapping[str, ServiceState]
"""States by service and index."""


def run(
    *,
    quick: Quick = False,
    requests: Annotated[int, typer.Option(help="Number of requests.", min=1)] = 100_000,
    seed: Annotated[int, typer.Option(help="Seed of the requests.", min=0)] = 20261122,
) -> list[Measure]:
    """Start a run, send the requests, print the answers, and return the counts; ``quick`` sends 1,000 requests.

    Raises FuzzError if the run does not start or stops training.
    """
    console = output_console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="rollmesh-fuzz-") as temporary:
        fuzzed = TrainingRun(Path(temporary))
        data = short_run_config(fuzzed.folder.path, 0)
        data |= {"name": "fuzz", "agents": {"enabled": True}}
        data["trainer"]["train_steps"] = 1_000_000
        data["trainer"]["algorithm"] = {"teacher": {"reverse_kl_coefficient": 0.01, "with_reward": True}}
        data["teachers"] = {"wise": {"model": "recipe:countdown", "top_k": 4}}
        data["checkpoints"]["keep_last"] = 10_000
        if quick:  # paced generators leave the processor to the requests, and few steps are audited
            data["generator"]["pace"] = [[1, 0.05]]
        else:
            data["schedule"] |= {"groups_per_batch": 16, "group_size": 8, "pool_size": 192}
        return asyncio.run(_fuzz(fuzzed, data, 1_000 if quick else requests, seed, console))


async def _fuzz(
    fuzzed: TrainingRun, data: Mapping[str, Any], requests: int, seed: int, console: Console
) -> list[Measure]:
    folder, warm_up = fuzzed.folder, int(requests * _WARM_UP_SHARE)
    with fuzzed.up(data) as process:
        await _two_more_steps(fuzzed, process)
        fresh = await _service_states(folder)
        async with AsyncExitStack() as stack:
            ports = await open_ports(folder, stack, process.pid)
            tallies = {port.name: Tally() for port in ports}
            await _send(ports, tallies, seed, range(warm_up))
            warm = await _service_states(folder)
            steps, started = finished_train_steps(folder.path), time.monotonic()
            await _send(ports, tallies, seed, range(warm_up, requests))
            seconds, trained = time.monotonic() - started, finished_train_steps(folder.path) - steps
            for port in ports:
                if isinstance(port, GrpcPort):
                    await port.undo()
        trained_after = await _two_more_steps(fuzzed, process)
        last = await _service_states(folder)
        # The mesh is up and paused during the audit, so that the queue's data is complete.
        await _pause(folder)
        is_green = await asyncio.to_thread(audit, fuzzed) == 0
        process.terminate()
        status = await asyncio.to_thread(process.wait)
    _print(tallies, last, console)
    if not is_green or status != _STOPPED_STATUS:
        console.print(fuzzed.output[-2_000:], markup=False, highlight=False)
    some = (at_least("value", 1.0),)
    stopped = (at_least("value", _STOPPED_STATUS), at_most("value", _STOPPED_STATUS))
    return [
        *_counts_of_answers(list(tallies.values()), (requests - warm_up) / seconds),
        *_counts_of_services(fresh, warm, last, seconds),
        Measure(name="train steps during the requests", value=trained, unit="steps", bars=some),
        Measure(name="train steps after them", value=trained_after, unit="steps", bars=some),
        Measure(name="exit status of the stopped run", value=status, unit="status", bars=stopped),
        Measure(name="audit green", value=int(is_green), unit="audits", bars=some),
    ]


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


async def _send(ports: Sequence[GrpcPort | RawPort], tallies: Mapping[str, Tally], seed: int, numbers: range) -> None:
    """Send the requests with these numbers concurrently; after the warm-up also requests that never end."""
    remaining, weights = iter(numbers), [port.weight for port in ports]

    async def send_next() -> None:
        for number in remaining:
            rng = random.Random(f"{seed}:{number}")
            (port,) = rng.choices(ports, weights)
            tallies[port.name].add(await _in_time(port.send(rng), f"request {number}"))

    async def send_endless(port: RawPort, number: int) -> None:
        rng = random.Random(f"{seed}:{port.name}:{number}")
        tallies[port.name].add(await _in_time(port.slow(rng), f"endless request {number}"))

    async with asyncio.TaskGroup() as group:
        for _ in range(_IN_FLIGHT):
            group.create_task(send_next())
        for port in (p for p in ports if isinstance(p, RawPort)):
            for number in range(1 + len(numbers) // _REQUESTS_PER_SLOW if numbers.start else 0):
                group.create_task(send_endless(port, number))


async def _in_time(request: Coroutine[Any, Any, Answer], name: str) -> Answer:
    try:
        async with asyncio.timeout(_DEADLINE_SECONDS):
            return await request
    except TimeoutError:
        return Answer(outcome="no answer", detail=name, fault=True)


async def _service_states(folder: RunFolder) -> dict[str, ServiceState]:
    """Return the state of every service process, with the smallest memory of three samples."""
    samples = []
    for _ in range(3):
        await asyncio.sleep(1.0)
        samples.append({f"{e.service}-{e.index}": _state(folder, e) for e in read_endpoints(folder.path)})
    return {name: min((s[name] for s in samples if name in s), key=lambda s: s.rss) for name in samples[-1]}


def _state(folder: RunFolder, endpoint: Endpoint) -> ServiceState:
    rss = 0
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(endpoint.pid)
        for each in (process, *process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                rss += each.memory_info().rss
    lines = folder.log_file(endpoint.service, endpoint.index).read_text(errors="replace").splitlines()
    tracebacks = tuple(line for line in lines if "Traceback (most recent" in line)
    return ServiceState(pid=endpoint.pid, rss=rss, lines=len(lines), tracebacks=tracebacks)


async def _pause(folder: RunFolder) -> None:
    (gateway,) = read_endpoints(folder.path, "gateway")
    headers = {"Authorization": f"Bearer {(folder.path / TOKEN_FILE).read_text().strip()}"}
    async with httpx.AsyncClient(trust_env=False, timeout=_DEADLINE_SECONDS) as client:
        answer = await client.post(httpx.URL(gateway.url).join("/api/v1/pause"), headers=headers)
        answer.raise_for_status()


def _counts_of_answers(tallies: Sequence[Tally], rate: float) -> list[Measure]:
    hangs = sum(tally.outcomes["no answer"] for tally in tallies)
    faults = sum(tally.faults.total() for tally in tallies) - hangs
    backpressure, sent = sum(t.backpressure for t in tallies), sum(t.outcomes.total() for t in tallies)
    return [
        Measure(name="requests", value=sent, unit="requests"),
        Measure(name="requests a second", value=rate, unit="requests/s"),
        Measure(name="requests without an answer in time", value=hangs, unit="requests", bars=NONE),
        Measure(name="answers that are a fault of the service", value=faults, unit="answers", bars=NONE),
        Measure(name="answers of documented backpressure", value=backpressure, unit="answers"),
    ]


def _counts_of_services(fresh: States, warm: States, last: States, seconds: float) -> list[Measure]:
    """Compare the states before the requests, after a tenth of them, and at the end."""
    kept = sum(name in last and last[name].pid == state.pid for name, state in fresh.items())
    tracebacks = sum(len(state.tracebacks) for state in last.values())
    common = [name for name in last if name in warm]
    lines = max(last[name].lines - warm[name].lines for name in common) / seconds
    memory = (at_most("ratio", 1.2),)
    return [
        Measure(name="services that restarted or ended", value=len(fresh) - kept, unit="services", bars=NONE),
        Measure(name="tracebacks in logs", value=tracebacks, unit="tracebacks", bars=NONE),
        Measure(name="log lines, the most of a service", value=lines, unit="lines/s", bars=(at_most("value", 10.0),)),
        *(
            compared(f"RSS of {name}", last[name].rss, "bytes", "after the warm-up", warm[name].rss, memory)
            for name in common
        ),
    ]


def _print(tallies: Mapping[str, Tally], last: Mapping[str, ServiceState], console: Console) -> None:
    table = Table("port", "requests", "answers", "backpressure", "faults")
    for name, tally in tallies.items():
        answers = ", ".join(f"{count:,} {outcome}" for outcome, count in tally.outcomes.most_common())
        counts = (f"{tally.backpressure:,}", f"{tally.faults.total():,}")
        table.add_row(name, f"{tally.outcomes.total():,}", answers, *counts)
    console.print(table)
    found = [(name, line[-3_000:]) for name, state in last.items() for line in state.tracebacks[-3:]]
    faults = [(name, f"{n:,} times {text}") for name, t in tallies.items() for text, n in t.faults.most_common(8)]
    for name, text in (*found, *faults):
        console.print(f"{name}: {text}", markup=False, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    run_command(run, "fuzz", __doc__)
