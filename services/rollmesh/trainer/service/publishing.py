"""Publishing of policies in the background. Each train step and version is published once.

    begin       wait for the publication in flight; copy the weights to host memory
    background  score the canary -> write the folder with its digests, manifest last -> announce -> mark it -> prune

The canary is scored with the copy. If only the model in training can compute, ``begin`` scores it.

One publication is in flight at most, so versions are announced in order, and the copy of the weights is free for the
next one. The training loop says what may happen before a publication is announced.

The trainer may crash between any two of these steps. A folder without a manifest is not a policy. A complete folder
without an announcement (or whose announcement is missing in a restored Redis) is announced unchanged and not rewritten,
so a version never has two sets of weights.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.errors import CheckpointError
from rollmesh.runtime.logging import Logger, get_logger
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.runtime.tracing import tracer
from rollmesh.trainer.learner.policy_files import ScoreSequences
from rollmesh.trainer.records.trainer_metrics import TrainerMetrics
from rollmesh.trainer.service.announcing import Announcer
from rollmesh.trainer.service.published_canary import scored_canary
from rollmesh.trainer.service.ranks import RankCoordinator
from rollmesh.trainer.service.trainer_progress import Progress
from rollmesh.trainer.service.training_session import TrainingSession
from rollmesh.trainer.service.write_retry import Retry
from rollmesh.types import Int32Array, PolicyRecord

T = TypeVar("T")
WritePolicy = Callable[[], Awaitable[PolicyRecord]]
"""Function that writes the folder of a copied policy, in other threads."""

_IDLE_SECONDS = 5.0
"""Time between two orders to the other ranks while a publication is awaited; a longer wait is logged."""


@dataclass(eq=False)
class Publisher:
    """Publisher of the ranks' weights under the trainer's session. Its methods are for one task: the training loop."""

    _ranks: RankCoordinator
    _session: TrainingSession
    _checkpoints: CheckpointStore
    _retry: Retry
    _metrics: TrainerMetrics
    _executor: Executor
    _canary: list[Int32Array]
    _progress: Progress
    _announcer: Announcer
    _in_flight: asyncio.Task[None] | None = field(default=None, init=False)
    _newest: int = field(default=-1, init=False)
    """Version of the newest publication of this process."""
    _log: Logger = field(default_factory=lambda: get_logger("publisher"), init=False)

    async def publish(self, train_step: int) -> int:
        """Publish the weights of ``train_step`` and wait until they are announced; return their version. Idempotent."""
        version = await self.begin(train_step)
        await self.announced()
        return version

    async def begin(self, train_step: int) -> int:
        """Copy the weights of ``train_step`` and publish them in the background; return their version. Idempotent.

        Waits for the publication in flight first. A step that is published already is not published again, unless the
        newest policy is damaged: every generator rejects it, so the same weights are published as the next version.
        """
        await self.announced()
        newest = await self._session.newest_policy()
        published = False
        if newest is not None:
            self._ranks.catalog.update([newest])
            self._metrics.policy_version.set(newest.policy_version)
            if newest.train_step > train_step:
                return newest.policy_version
            published = self._progress.published(newest)
            if newest.train_step == train_step and published and not await self._damaged(newest):
                return newest.policy_version
        version = newest.policy_version + 1 if newest else 0
        source: PolicyRecord | WritePolicy | None = None
        if newest is None or newest.policy_version != self._newest:
            # Only the publication in flight of a process that was killed, or of a registry that was lost, is left over.
            source = await self._retry.run("find_policy", lambda: self._whole_folder(version, train_step))
        label = self._progress.label(self._session.token)
        if source is None:
            parent = newest.policy_version if newest else None
            if newest is not None and not published:  # the first version after a rollback
                parent = self._progress.rolled_back_to
            source = await self._copied(label, version, train_step, parent)
        self._newest = version
        self._in_flight = asyncio.create_task(self._finish(source, version, train_step, label), name="publish-policy")
        return version

    async def announced(self) -> None:
        """Wait until the publication in flight is announced; raise its error. Returns at once without one."""
        task, logged = self._in_flight, False
        if task is None:
            return
        while not (await asyncio.wait({task}, timeout=_IDLE_SECONDS))[0]:
            if not logged:
                self._log.info("training_waits_for_publication", policy_version=self._newest)
            logged = True
            self._session.beat()
            await self._in_thread(self._ranks.idle)
        self._in_flight = None
        task.result()

    async def check(self) -> None:
        """Raise the error of the publication in flight, if it has failed; does not wait."""
        if self._in_flight is not None and self._in_flight.done():
            await self.announced()

    async def settle(self) -> None:
        """Wait for the publication in flight after an error of the training loop, and log an error of its own.

        Sends no orders to the other ranks, which may have failed too.
        """
        if (task := self._in_flight) is None:
            return
        self._log.info("training_waits_for_publication", policy_version=self._newest)
        await asyncio.wait({task})
        self._in_flight = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("publication_failed", policy_version=self._newest, message=str(error))

    async def cancel(self) -> None:
        """End the publication in flight, if there is one; the next start of the trainer publishes the step.

        Scoring or writing continues in its thread, and the process ends after it. A folder that is completed so is
        announced by the next start.
        """
        if self._in_flight is not None:
            await cancel_and_wait(self._in_flight)

    async def _finish(self, source: PolicyRecord | WritePolicy, version: int, train_step: int, label: str) -> None:
        step = tracer().train_step(train_step)
        with tracer().span("publish", step, kind="producer", policy_version=version):
            record = source if isinstance(source, PolicyRecord) else await source()
            with self._timed("announce"):
                await self._announcer.announce(record)
        await self._announcer.prune(label)

    async def _copied(self, session: str, version: int, train_step: int, parent: int | None) -> WritePolicy:
        """Copy the weights out; return the function that writes them."""
        base = await self._retry.run("read_base", lambda: self._in_thread(lambda: self._ranks.base_of(version)))
        with self._timed("copy_out"):
            copied = await self._in_thread(lambda: self._ranks.copy_out(version))
        # Without a score of the copy, the canary is scored before the next step changes the weights.
        early = None if copied.score else await self._in_thread(lambda: self._scored_canary(train_step, None))

        def write(canary: Sequence[CanarySequence]) -> PolicyRecord:
            begun = written = time.monotonic()

            def folder_and_digests(folder: Path) -> Mapping[str, str]:
                nonlocal written
                digests = copied.write(folder)
                written = time.monotonic()
                return digests

            record = self._checkpoints.publish(
                session=session,
                policy_version=version,
                train_step=train_step,
                parent=parent,
                write=folder_and_digests,
                canary=canary,
                base=base,
            )
            self._observe("write", written - begun)
            self._observe("digest", time.monotonic() - written)
            return record

        async def score_and_write() -> PolicyRecord:
            # A policy that no generator can serve fails here, before anything of it is written.
            canary = early
            if canary is None:
                canary = await asyncio.to_thread(self._scored_canary, train_step, copied.score)
            return await self._retry.run("publish", partial(asyncio.to_thread, write, canary))

        return score_and_write

    def _scored_canary(self, train_step: int, score: ScoreSequences | None) -> list[CanarySequence]:
        """Score the canary with the copied weights, or with the model in training if ``score`` is None."""
        with self._timed("copy_canary" if score else "canary"):
            return scored_canary(train_step, self._canary, (score or self._ranks.score)(self._canary))

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._observe(phase, time.monotonic() - started)

    def _observe(self, phase: str, seconds: float) -> None:
        self._metrics.publication_seconds.labels(phase=phase).observe(seconds)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    async def _whole_folder(self, version: int, train_step: int) -> PolicyRecord | None:
        """Return the complete folder of this version that a crash left without an announcement; None if none."""
        for record in await asyncio.to_thread(self._checkpoints.complete_policies):
            known = (record.policy_version, record.train_step) == (version, train_step)
            if known and self._progress.published(record):
                try:
                    await asyncio.to_thread(self._check, record)
                except CheckpointError as error:
                    if error.outside:  # a second set of weights of this version must not be written
                        raise
                    self._log.warning("unannounced_policy_refused", path=record.path, message=str(error))
                    return None
                return record
        return None

    async def _damaged(self, record: PolicyRecord) -> bool:
        """Tell whether what generators read differs from the announcement; False while the store is unreachable."""
        try:
            await asyncio.to_thread(self._check, record)
        except CheckpointError as error:
            self._log.error(
                "policy_damaged", policy_version=record.policy_version, reason=error.reason, message=str(error)
            )
            return not error.outside
        return False

    def _check(self, record: PolicyRecord) -> None:
        self._checkpoints.check_copy(record)
        self._checkpoints.open(record)
