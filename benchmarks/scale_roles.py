"""Processes of the scale bench: unchanged services of a run, the consumer of the batches, and a probe in each.

The probe writes a line per second: the lag of the event loop, and the durations of views and decisions.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from benchmarks.scale_answers import Answers
from rollmesh.config import RunConfig, load_run_config
from rollmesh.runtime.lifecycle import Shutdown, die_with_parent, run_service
from rollmesh.runtime.logging import configure_logging
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.scheduling import run_limits
from rollmesh.store import TrajectoryStore
from rollmesh.types import Batch, PolicyRecord

_PROBE_SECONDS = 0.02
_CLAIM_SECONDS = 5.0

Samples = dict[str, list[float]]


@asynccontextmanager
async def _probed(file: Path, samples: Samples) -> AsyncIterator[None]:
    """Measure the lag of the event loop during the block."""
    with file.open("a", encoding="utf-8") as lines:
        task = asyncio.create_task(_probe(lines, samples))
        try:
            yield
        finally:
            await cancel_and_wait(task)


async def _probe(lines: IO[str], samples: Samples) -> None:
    while True:
        written = time.monotonic()
        while time.monotonic() < written + 1:
            due = time.monotonic() + _PROBE_SECONDS
            await asyncio.sleep(_PROBE_SECONDS)
            samples.setdefault("lag", []).append(max(0.0, time.monotonic() - due))
        lines.write(json.dumps({"t": time.time(), **samples}) + "\n")
        lines.flush()
        samples.clear()


def _time_the_leader(samples: Samples) -> None:
    """Time every view and every decision of this process's leader."""
    from rollmesh.rollout import leader
    from rollmesh.store.view import MeshReader

    @contextmanager
    def timed(name: str) -> Iterator[None]:
        begun = time.perf_counter()
        yield
        samples.setdefault(name, []).append(time.perf_counter() - begun)

    view, decide = MeshReader.view, vars(leader)["decide"]

    @functools.wraps(view)
    async def timed_view(*arguments: Any, **options: Any) -> Any:
        with timed("look"):
            return await view(*arguments, **options)

    @functools.wraps(decide)
    def timed_decide(*arguments: Any) -> Any:
        with timed("decision"):
            return decide(*arguments)

    MeshReader.view = timed_view  # type: ignore[method-assign]
    vars(leader)["decide"] = timed_decide


async def _consume(config: RunConfig, answers: Answers, ledger: Path, shutdown: Shutdown) -> None:
    """Act as a trainer without training: claim, check and acknowledge every batch, and announce a version."""
    async with await TrajectoryStore.connect(config.store, config.name) as store:
        await store.limits.init_run(run_limits(config))
        session = await store.training.open_session("scale")
        await store.policies.announce(session, _policy(0))
        step = 1
        with ledger.open("a", encoding="utf-8") as lines:
            while not shutdown.is_set():
                batch = await store.training.claim(session, step, _CLAIM_SECONDS)
                if batch is None:
                    continue
                lines.write(json.dumps({"step": step, "groups": await _checked(batch, answers)}) + "\n")
                lines.flush()
                await store.training.confirm_batch_file(session, step, f"digest-{step}")
                await store.training.report_trained(session, step)
                await store.training.report_committed(session, step)
                await store.policies.announce(session, _policy(step))
                step += 1


async def _checked(batch: Batch, answers: Answers) -> list[tuple[str, list[str], int]]:
    """Return group id, trajectory ids, and the number of trajectories whose tokens differ from their answers."""
    rows = []
    for group in batch.groups:
        ids = [t.trajectory_id for t in group.trajectories]
        rows.append((group.group_id, ids, sum(not answers.matches(t) for t in group.trajectories)))
        await asyncio.sleep(0)
    return rows


def _policy(step: int) -> PolicyRecord:
    return PolicyRecord(policy_version=step, train_step=step, path=str(step), manifest_digest=str(step))


def main() -> int:
    """Run one role: ROLE RUN_FILE INDEX FOLDER PARENT OPTIONS (JSON)."""
    role, run_file, index, folder, parent, options = sys.argv[1:7]
    die_with_parent(int(parent))
    config, settings = load_run_config(Path(run_file), environ={}), json.loads(options)
    configure_logging(config.telemetry, service=f"{role}-{index}", run=config.name)
    samples: Samples = {}
    serve = _role(role, config, int(index), Path(folder), settings)
    if role == "rollout":
        _time_the_leader(samples)

    async def serve_probed(shutdown: Shutdown) -> None:
        async with _probed(Path(folder) / f"{settings['part']}-{index}.probe", samples):
            await serve(shutdown)

    return run_service(serve_probed)


def _role(
    role: str, config: RunConfig, index: int, folder: Path, settings: dict[str, Any]
) -> Callable[[Shutdown], Awaitable[None]]:
    """Return the service of a role; a process imports only its own role."""
    answers = Answers(settings["mean_tokens"])
    if role == "consumer":
        return functools.partial(_consume, config, answers, folder / "ledger")
    if role == "generators":
        from benchmarks.scale_generators import Emulation, serve_generators

        return functools.partial(serve_generators, config, answers, Emulation(**settings["emulation"]))
    service = import_module(f"rollmesh.{role}.main")
    return functools.partial(service.serve, config, index)
