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

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.config import RunConfig
from rollmesh.errors import CheckpointError, ConfigError, Conflict, TrainingDiverged
from rollmesh.runtime.logging import Logger, get_logger, note_policy_version
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.runtime.tracing import tracer
from rollmesh.scheduling import Schedule
from rollmesh.trainer.learner.policy_files import ScoreSequences
from rollmesh.trainer.service.leading_rank import LeadingRank
from rollmesh.types import Float32Array, Int32Array, PolicyRecord

WritePolicy = Callable[[], Awaitable[PolicyRecord]]
"""Function that writes the folder of a copied policy, in other threads."""

_IDLE_SECONDS = 5.0
"""Time between two orders to the other ranks while a publication is awaited; a longer wait is logged."""


@dataclass(eq=False)
class Publisher:
    """Publisher of the ranks' weights under the trainer's session. Its methods are for one task: the training loop."""

    _rank: LeadingRank
    _canary: list[Int32Array]
    _references: Collection[int] = ()
    """KL reference versions, which are never pruned."""
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
        newest = await self._rank.session.newest_policy()
        published = False
        if newest is not None:
            self._rank.ranks.catalog.update([newest])
            self._rank.metrics.policy_version.set(newest.policy_version)
            if newest.train_step > train_step:
                return newest.policy_version
            published = self._rank.progress.published(newest)
            if newest.train_step == train_step and published and not await self._damaged(newest):
                return newest.policy_version
        version = newest.policy_version + 1 if newest else 0
        source: PolicyRecord | WritePolicy | None = None
        if newest is None or newest.policy_version != self._newest:
            # Only the publication in flight of a process that was killed, or of a registry that was lost, is left over.
            source = await self._rank.retry.run("find_policy", lambda: self._whole_folder(version, train_step))
        label = self._rank.progress.label(self._rank.session.token)
        if source is None:
            parent = newest.policy_version if newest else None
            if newest is not None and not published:  # the first version after a rollback
                parent = self._rank.progress.rolled_back_to
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
            self._rank.session.beat()
            await self._rank.in_torch(self._rank.ranks.idle)
        self._in_flight = None
        task.result()

    async def check(self) -> None:
        """Raise the error of the publication in flight, if it has failed; does not wait."""
        if self._in_flight is not None and self._in_flight.done():
            await self.announced()

    async def settle(self) -> None:
        """Await the publication in flight after an error, and log its own; the other ranks get no orders any more."""
        if (task := self._in_flight) is None:
            return
        self._log.info("training_waits_for_publication", policy_version=self._newest)
        await asyncio.wait({task})
        self._in_flight = None
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("publication_failed", policy_version=self._newest, message=str(error))

    async def cancel(self) -> None:
        """End the publication in flight; the next start publishes the step, or announces what a thread completes."""
        if self._in_flight is not None:
            await cancel_and_wait(self._in_flight)

    async def _finish(self, source: PolicyRecord | WritePolicy, version: int, train_step: int, label: str) -> None:
        step = tracer().train_step(train_step)
        with tracer().span("publish", step, kind="producer", policy_version=version):
            record = source if isinstance(source, PolicyRecord) else await source()
            with self._timed("announce"):
                await self._announce(record)
        await self._rank.session.learn_policies()
        if removed := await self._rank.retry.run("prune_policies", lambda: self._prune(label)):
            self._log.info("policies_pruned", paths=removed)

    async def _copied(self, session: str, version: int, train_step: int, parent: int | None) -> WritePolicy:
        base = await self._rank.retry.run(
            "read_base", lambda: self._rank.in_torch(lambda: self._rank.ranks.base_of(version))
        )
        with self._timed("copy_out"):
            copied = await self._rank.in_torch(lambda: self._rank.ranks.copy_out(version))
        # Without a score of the copy, the canary is scored before the next step changes the weights.
        early = None if copied.score else await self._rank.in_torch(lambda: self._scored_canary(train_step, None))

        def write(canary: Sequence[CanarySequence]) -> PolicyRecord:
            begun = written = time.monotonic()

            def folder_and_digests(folder: Path) -> Mapping[str, str]:
                nonlocal written
                digests = copied.write(folder)
                written = time.monotonic()
                return digests

            record = self._rank.checkpoints.publish(
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
            return await self._rank.retry.run("publish", partial(asyncio.to_thread, write, canary))

        return score_and_write

    def _scored_canary(self, train_step: int, score: ScoreSequences | None) -> list[CanarySequence]:
        """Score the canary with the copied weights, or with the model in training if ``score`` is None."""
        with self._timed("copy_canary" if score else "canary"):
            return scored_canary(train_step, self._canary, (score or self._rank.ranks.score)(self._canary))

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self._observe(phase, time.monotonic() - started)

    def _observe(self, phase: str, seconds: float) -> None:
        self._rank.metrics.publication_seconds.labels(phase=phase).observe(seconds)

    async def _whole_folder(self, version: int, train_step: int) -> PolicyRecord | None:
        """Return the complete folder of this version that a crash left without an announcement; None if none."""
        for record in await asyncio.to_thread(self._rank.checkpoints.complete_policies):
            known = (record.policy_version, record.train_step) == (version, train_step)
            if known and self._rank.progress.published(record):
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
        self._rank.checkpoints.check_copy(record)
        self._rank.checkpoints.open(record)

    async def _announce(self, record: PolicyRecord) -> None:
        """Announce a policy, then mark its folder. Idempotent."""
        store, token = self._rank.session.store, self._rank.session.token
        try:
            await self._rank.session.retry("announce_policy", lambda: store.policies.announce(token, record))
        except Conflict:
            # A re-assertion after a Redis restart may have announced the policy already.
            if await self._rank.session.retry("policy", lambda: store.policies.get(record.policy_version)) != record:
                raise
        self._rank.ranks.catalog.update([record])
        self._rank.metrics.published.inc()
        note_policy_version(record.policy_version)
        self._rank.metrics.policy_version.set(record.policy_version)
        await self._rank.retried("mark_announced", partial(self._rank.checkpoints.mark_announced, record))
        self._log.info(
            "policy_announced", policy_version=record.policy_version, train_step=record.train_step, path=record.path
        )

    async def _prune(self, session: str) -> list[str]:
        store = self._rank.session.store
        pinned = await self._rank.session.retry("pinned_policy", store.policies.pinned)
        generators = await self._rank.session.retry("generators", store.generators.live)
        evaluations = await self._rank.session.retry("evaluations", store.evaluations.all)
        rollback = await self._rank.session.retry("rollback_request", store.rollbacks.pending)
        kept = {0, *self._references} if pinned is None else {0, *self._references, pinned}
        kept |= {g.policy_version for g in generators}
        kept |= {g.loading_version for g in generators if g.loading_version is not None}
        kept |= {e.request.policy_version for e in evaluations if e.result is None}
        if rollback is not None:  # it is carried out only after the publication in flight, which prunes
            kept.add(rollback.policy_version)
        prune = partial(
            self._rank.checkpoints.prune,
            self._rank.ranks.catalog.records,
            keep_last=kept_policies(self._rank.config),
            keep_versions=kept,
            session=session,
        )
        return await asyncio.to_thread(prune)


def kept_policies(config: RunConfig) -> int:
    """Return the number of newest policies to keep.

    The old-logprob source ``snapshot`` requires the versions within the staleness bound, plus one for each step that a
    crash replays: a replay that falls back to other logprobs would give other weights than the published ones.
    """
    if config.trainer.algorithm.old_logprobs != "snapshot":
        return config.checkpoints.keep_last
    staleness = Schedule.from_config(config).max_staleness
    return max(config.checkpoints.keep_last, staleness + 1 + config.checkpoints.state_every_steps)


CANARY_SEQUENCES = 8
CANARY_TOKENS = 32
_FEW_SEQUENCES = 2
_LARGE_PARAMETERS = 100_000_000
_SEED = 20_071_115


def canary_count(parameter_count: int, device_type: str) -> int:
    """Return the number of canary sequences: a large model takes seconds of a CPU core, in every generator, for all."""
    return _FEW_SEQUENCES if device_type == "cpu" and parameter_count >= _LARGE_PARAMETERS else CANARY_SEQUENCES


def canary_sequences(vocab_size: int, count: int = CANARY_SEQUENCES) -> list[Int32Array]:
    """Return the first canary sequences, which are fixed for a vocabulary size, int32 [tokens] each."""
    noise = np.random.default_rng(_SEED)
    return [noise.integers(0, vocab_size, CANARY_TOKENS).astype(np.int32) for _ in range(count)]


def scored_canary(
    train_step: int, sequences: Sequence[Int32Array], logprobs: Sequence[Float32Array]
) -> list[CanarySequence]:
    """Return the scored sequences. Raises TrainingDiverged (ConfigError for step 0) if a score is not finite."""
    if not all(np.isfinite(values).all() for values in logprobs):
        if train_step == 0:
            raise ConfigError(
                "model.path: the log-probabilities of the initial model are not finite although its weights are; it "
                "cannot be trained: use another checkpoint, or the dtype that it was made for (model.dtype)"
            )
        raise TrainingDiverged(
            f"train step {train_step}: the log-probabilities of the policy are not finite, so no generator can serve "
            "it. Start a new run from an older policy (model.path) with a lower trainer.learning_rate"
        )
    return [
        CanarySequence(token_ids=ids.tolist(), logprobs=values.tolist())
        for ids, values in zip(sequences, logprobs, strict=True)
    ]
