"""Processes of the scale bench: unchanged services of a run, emulated generators, the consumer, and a probe in each.

The probe writes a line per second: the lag of the event loop, and the durations of views and decisions. Run as
``python -m benchmarks.scale_processes OPTIONS``, with the services of the build on the process's path.
"""

import asyncio
import json
import sys
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from rollmesh.config import RunConfig, load_run_config
from rollmesh.recipes.countdown.tokenizer import SIGNS, VOCABULARY_SIZE, stop_token_ids
from rollmesh.runtime.lifecycle import Shutdown, die_with_parent, run_service
from rollmesh.runtime.logging import configure_logging
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.scheduling import run_limits
from rollmesh.store import TrajectoryStore
from rollmesh.types import Batch, Float32Array, Int32Array, PolicyRecord, Trajectory

_PROBE_SECONDS = 0.02
_CLAIM_SECONDS = 5.0
_SPREAD = 0.875
"""Spread of the lengths: uniform between 0.125 and 1.875 times the mean, so that rollouts end at different times."""
_TABLE_TOKENS = 1 << 16
TEACHER = "emulated"

Samples = dict[str, list[float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """Options of one process, as JSON on its command line."""

    role: str
    """``generators``, ``teacher``, ``consumer``, or the service with this name."""
    part: str
    """Part of the mesh that its figures belong to."""
    index: int
    run_file: str
    folder: str
    parent: int
    mean_tokens: int
    emulation: dict[str, Any]
    """Arguments of ``serve_generators``."""


def main() -> int:
    """Run one process until SIGTERM."""
    options = ProcessOptions(**json.loads(sys.argv[1]))
    die_with_parent(options.parent)
    config, folder = load_run_config(Path(options.run_file), environ={}), Path(options.folder)
    configure_logging(config.telemetry, service=f"{options.role}-{options.index}", run=config.name)
    samples: Samples = {}
    serve = _service(options, config, folder)
    if options.role == "rollout":
        _time_the_leader(samples)

    async def serve_probed(shutdown: Shutdown) -> None:
        async with _probed(folder / f"{options.part}-{options.index}.probe", samples):
            await serve(shutdown)

    return run_service(serve_probed)


def _service(options: ProcessOptions, config: RunConfig, folder: Path) -> Callable[[Shutdown], Awaitable[None]]:
    answers = Answers(options.mean_tokens)
    if options.role == "consumer":
        return partial(_consume, config, answers, folder / "ledger")
    if options.role == "teacher":
        from benchmarks.scale_teacher import serve_teacher

        return partial(serve_teacher, config)
    if options.role == "generators":
        from benchmarks.scale_generators import serve_generators

        return partial(serve_generators, config, answers, **options.emulation)
    return partial(import_module(f"rollmesh.{options.role}.main").serve, config, options.index)


@asynccontextmanager
async def _probed(file: Path, samples: Samples) -> AsyncIterator[None]:
    async def probe() -> None:
        while True:
            written = time.monotonic()
            while time.monotonic() < written + 1:
                due = time.monotonic() + _PROBE_SECONDS
                await asyncio.sleep(_PROBE_SECONDS)
                samples.setdefault("lag", []).append(max(0.0, time.monotonic() - due))
            lines.write(json.dumps({"t": time.time(), **samples}) + "\n")
            lines.flush()
            samples.clear()

    with file.open("a", encoding="utf-8") as lines:
        task = asyncio.create_task(probe())
        try:
            yield
        finally:
            await cancel_and_wait(task)


def _time_the_leader(samples: Samples) -> None:
    """Time every view and every decision of this process's leader."""
    from rollmesh.rollout import leader
    from rollmesh.store.view import MeshReader

    view, decide = MeshReader.view, vars(leader)["decide"]

    async def timed_view(*arguments: Any, **options: Any) -> Any:
        begun = time.perf_counter()
        seen = await view(*arguments, **options)
        samples.setdefault("look", []).append(time.perf_counter() - begun)
        return seen

    def timed_decide(*arguments: Any) -> Any:
        begun = time.perf_counter()
        decision = decide(*arguments)
        samples.setdefault("decision", []).append(time.perf_counter() - begun)
        return decision

    MeshReader.view = timed_view  # type: ignore[method-assign]
    vars(leader)["decide"] = timed_decide


async def _consume(config: RunConfig, answers: "Answers", ledger: Path, shutdown: Shutdown) -> None:
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
                lines.write(json.dumps(await _checked(batch, answers, bool(config.teachers))) + "\n")
                lines.flush()
                await store.training.confirm_batch_file(session, step, f"digest-{step}")
                await store.training.report_trained(session, step)
                await store.training.report_committed(session, step)
                await store.policies.announce(session, _policy(step))
                step += 1


async def _checked(batch: Batch, answers: "Answers", taught: bool) -> list[tuple[str, list[str], int]]:
    """Return group id, trajectory ids, and the number of trajectories with other tokens, or other scores."""
    rows = []
    for group in batch.groups:
        ids = [t.trajectory_id for t in group.trajectories]
        wrong = sum(not (answers.matches(t) and _is_taught(t) is taught) for t in group.trajectories)
        rows.append((group.group_id, ids, wrong))
        await asyncio.sleep(0)
    return rows


def _is_taught(trajectory: Trajectory) -> bool:
    """Return True if a trajectory has the scores of the emulated teacher."""
    # A build of another time has no teachers.
    column = getattr(trajectory, "teacher", None)
    return column is not None and np.array_equal(column.logprobs, known_scores(trajectory.response_ids))


def known_scores(token_ids: Int32Array) -> Float32Array:
    """Return the scores of a response by the emulated teacher."""
    return (token_ids * np.float32(-0.125)).astype(np.float32)


def _policy(step: int) -> PolicyRecord:
    return PolicyRecord(policy_version=step, train_step=step, path=str(step), manifest_digest=str(step))


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers of the emulated generators, known in advance so that the consumer can check every token.

    Length and tokens depend on the trajectory's id alone, so a later call on a trajectory continues the same answer.
    Token ids and log-probabilities are views of two tables.
    """

    mean_tokens: int
    _tokens: Int32Array = field(init=False, repr=False)
    _logprobs: Float32Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        size = _TABLE_TOKENS + 2 * self.mean_tokens
        object.__setattr__(self, "_tokens", rng.integers(len(SIGNS) + 2, VOCABULARY_SIZE, size, dtype=np.int32))
        object.__setattr__(self, "_logprobs", -rng.random(size, dtype=np.float32))

    def length(self, trajectory_id: str) -> int:
        """Return the number of tokens of a trajectory's answer, with its stop token."""
        low = int((1 - _SPREAD) * self.mean_tokens)
        return low + zlib.crc32(b"length " + trajectory_id.encode()) % (2 * (self.mean_tokens - low)) + 1

    def pace(self, trajectory_id: str) -> float:
        """Return the relative speed of a trajectory's calls, 0.8 to 1.2, so that streams do not send in step."""
        return 0.8 + zlib.crc32(b"pace " + trajectory_id.encode()) % 4001 / 10_000

    def tokens(self, trajectory_id: str, first: int, count: int) -> tuple[Int32Array, Float32Array]:
        """Return ``count`` tokens of an answer from ``first``, with their log-probabilities."""
        start = zlib.crc32(trajectory_id.encode()) % _TABLE_TOKENS + first
        ids, logprobs = self._tokens[start : start + count], self._logprobs[start : start + count]
        if first + count < self.length(trajectory_id):
            return ids, logprobs
        return np.append(ids[:-1], np.int32(stop_token_ids()[0])), logprobs

    def matches(self, trajectory: Trajectory) -> bool:
        """Return True if a trajectory has exactly the tokens and log-probabilities of its answer."""
        ids, logprobs = self.tokens(trajectory.trajectory_id, 0, self.length(trajectory.trajectory_id))
        found = [s.behavior_logprobs for s in trajectory.segments if s.behavior_logprobs is not None]
        sampled = np.concatenate(found) if found else np.empty(0, np.float32)
        return np.array_equal(trajectory.response_ids, ids) and np.array_equal(sampled, logprobs)


if __name__ == "__main__":
    sys.exit(main())
