"""The training loop of rank 0.

    accumulate                             gradients of ready groups, while the cut is awaited (schedule.part_groups)
    batch file, or claim -> batch file      both fsynced before training
    confirm                                 Redis may drop the payloads
    stage end                               only with old_logprobs=stage_end, at its barrier
    train
    report_trained                          the batch's capacity is refunded
    record                                  one line in metrics.jsonl, its main numbers in the queue
    state -> COMMITTED -> report_committed  every state_every_steps
    copy out                                once per train step, also after a replay

    canary -> write -> announce -> prune    in the background, until before report_trained of the next step

While version s is written and announced, the trainer waits for batch s+1, writes and confirms its file and trains it.
It reports nothing of step s+1 before version s is announced, so the queue, the committed states and the announced
versions are never further apart than if the trainer waited for every publication.

The trainer may be killed between any two lines. At the next start it loads the newest committed state, replays the
batch files after it in order, and publishes only policies that were not announced. Killed while version s is in flight,
it has at most the file of batch s+1 beyond step s, and:

    before the manifest                     the folder is no policy; state s, or its replay, has the same weights
    manifest, not announced                 the folder is announced unchanged
    announced, not marked                   the registry has it; if Redis lost it, the folder is announced unchanged
    batch s+1 written, confirmed, trained   nothing of it was reported; it is replayed from its file, after step s
"""

import asyncio
import time
from collections.abc import Awaitable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

from rollmesh.config.recipes import resolve_model
from rollmesh.errors import RollmeshError, StoreUnavailable, TrainingDiverged
from rollmesh.runtime.lifecycle import wait_or_shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.runtime.tracing import tracer
from rollmesh.step_metrics import top_level_copies
from rollmesh.store import StoreCounts
from rollmesh.trainer.learner.step_report import StepReport
from rollmesh.trainer.service.batch_source import BatchSource, ClaimedBatch, ReplaySource
from rollmesh.trainer.service.early_work import PartSource, StageEnds
from rollmesh.trainer.service.leading_rank import LeadingRank
from rollmesh.trainer.service.publishing import Publisher
from rollmesh.trainer.service.rollback import RollbackRunner
from rollmesh.trainer.service.run_log import StepRecords, Tracker, decoder, flatten, sample_completions
from rollmesh.trainer.service.step_summaries import StepSummaries, mark_trained, step_span
from rollmesh.trainer.service.trainer_metrics import DECILES, dropped_by_decile, trained_by_decile, trained_share
from rollmesh.trainer.service.trainer_progress import EngineWork, Progress
from rollmesh.trainer.service.training_session import LOOP_NAME
from rollmesh.types import GeneratorRecord

_CLAIM_SECONDS = 5.0
_KEPT_STATES = 2


class TrainingLoop:
    """Training loop of rank 0, until the last step of the run or shutdown."""

    def __init__(self, rank: LeadingRank, publisher: Publisher, trackers: list[Tracker]) -> None:
        config, ranks, max_staleness = rank.config, rank.ranks, rank.schedule.max_staleness
        replay = ReplaySource(
            config.trainer.replay, rank.checkpoints, ranks.catalog, rank.progress, config.seed, max_staleness
        )
        self._rank = rank
        self._publisher = publisher
        self._trackers = trackers
        self._decode = decoder(resolve_model(config.model.path))
        self._batch_source = BatchSource(
            rank.session, rank.checkpoints, ranks.catalog, rank.retry, replay, ranks.trainer.settings
        )
        self._parts = PartSource(rank)
        self._stages = StageEnds(rank) if config.trainer.algorithm.old_logprobs == "stage_end" else None
        self._rollbacks = RollbackRunner(rank, publisher)
        self._records = StepRecords(Path(config.folder))
        self._reports = StepSummaries(rank.session, self._records)
        self._engines = EngineWork(rank.progress.generated)
        self._log = get_logger("training")

    @property
    def train_step(self) -> int:
        """Number of batches that the weights of this process were trained on."""
        return self._rank.ranks.trainer.train_step

    async def run(self) -> None:
        """Publish a missing policy, then train until the last step or shutdown."""
        await self._tidy()
        await self._reports.restore(self.train_step)
        try:
            # Before publishing: a rollback is the remedy for weights that cannot be published.
            await self._rollbacks.carry_out(self._save)
            await self._rollbacks.unless_abandoned(self._publisher.publish(self.train_step))
            self._engines.begin(await self._generators())
            watch = asyncio.create_task(self._watch_engines(), name="watch-engines")
            try:
                await self._train()
            finally:
                await cancel_and_wait(watch)
        except Exception:
            # The error may end the run; the last good version must be out.
            await self._publisher.settle()
            raise
        finally:
            await self._publisher.cancel()

    async def unfinished(self) -> str:
        """Name the work that a shutdown left; empty when the run is complete."""
        last = self._rank.config.trainer.train_steps
        if self.train_step < last:
            return f"train step {self.train_step} of {last}"
        if self._rank.shutdown.is_set() and await self._rollbacks.pending() is not None:
            return "a requested rollback"
        return ""

    async def _train(self) -> None:
        rank = self._rank
        last = rank.config.trainer.train_steps
        waited = 0.0
        while not self._rank.shutdown.is_set():
            rank.health.beat(LOOP_NAME)
            # The batch that this loop waits for may never be cut without that version.
            await self._rollbacks.unless_abandoned(self._publisher.check())
            # After the last step too: an operator may roll back the final policy of a finished run.
            await self._rollbacks.carry_out(self._save)
            if self.train_step >= last:
                break
            began = time.monotonic()
            async with self._parts.accumulating(self.train_step + 1):
                claimed = await self._batch_source.next(self.train_step + 1, _CLAIM_SECONDS)
            worked = self._parts.seconds + (0.0 if claimed is None else claimed.write_seconds)
            waited += max(0.0, time.monotonic() - began - worked)  # a pass may go on while the file is written
            if claimed is None:
                await self._rank.in_torch(rank.ranks.idle)
                continue
            with step_span(claimed):
                await self._step(claimed, waited, last)
            if self._diverged:
                break
            waited = 0.0
        await self._commit()
        await self._publisher.announced()
        await self._tidy()
        await self._reports.restore_if_lost(self.train_step)
        # A run that diverged at its last step raises this at every start.
        if self._diverged and (self.train_step >= last or not self._rank.shutdown.is_set()):
            limit, count = rank.config.trainer.nonfinite_updates_limit, rank.progress.nonfinite_updates_in_a_row
            raise TrainingDiverged(
                f"train step {self.train_step}: the gradients of the last {count} updates are not finite "
                f"(trainer.nonfinite_updates_limit={limit}); the policy has diverged. Roll back to an older version, "
                "or start a new run from one (model.path) with a lower trainer.learning_rate"
            )

    @property
    def _diverged(self) -> bool:
        limit = self._rank.config.trainer.nonfinite_updates_limit
        return self._rank.progress.nonfinite_updates_in_a_row >= limit

    async def _step(self, claimed: ClaimedBatch, waited: float, last: int) -> None:
        rank, step = self._rank, claimed.batch.train_step
        rank.metrics.phase_seconds.labels(phase="wait").observe(waited)
        if not claimed.replayed:
            rank.metrics.phase_seconds.labels(phase="write_batch").observe(claimed.write_seconds)
        stalled = stage_seconds = 0.0
        if self._stages is not None:
            # It records under the version of the current weights.
            stalled += await _seconds_of(self._rollbacks.unless_abandoned(self._publisher.announced()))
            stage_seconds = await _seconds_of(self._stages.record(claimed.batch))
        traceparent, started_ns = tracer().train_step(step), time.time_ns()
        with tracer().span("train", traceparent):
            report = await self._trained(claimed)
        seconds = {**report.seconds, "evidence": report.seconds["evidence"] + stage_seconds}
        mark_trained(claimed, started_ns)
        stalled += await _seconds_of(self._rollbacks.unless_abandoned(self._publisher.announced()))
        await rank.session.report_trained(step)
        await self._record(claimed, replace(report, seconds=seconds), waited)
        if step % rank.config.checkpoints.state_every_steps == 0 or step == last:
            with tracer().span("save", traceparent):
                await self._commit()
        started = time.monotonic()
        version = await self._rollbacks.unless_abandoned(self._publisher.begin(step))
        stalled += time.monotonic() - started
        rank.metrics.phase_seconds.labels(phase="publish").observe(stalled)
        self._log.info(
            "step_trained",
            train_step=step,
            policy_version=version,
            replayed=claimed.replayed,
            reward_mean=round(report.batch.reward_mean, 4),
            staleness_mean=round(report.batch.trajectory_staleness.mean, 3),
            trained_tokens=report.batch.trained_tokens,
            wait_seconds=round(waited, 3),
        )

    async def _trained(self, claimed: ClaimedBatch) -> StepReport:
        """Train on a batch; a single rank repeats it until the store has every policy that it reads."""
        ranks, settings, replayed = self._rank.ranks, claimed.stored.footer.settings, claimed.replayed_group_ids

        def train() -> Awaitable[StepReport]:
            return self._rank.in_torch(lambda: ranks.train(claimed.training, settings, replayed))

        return await (self._rank.retry.run("train", train) if ranks.world.size == 1 else train())

    async def _tidy(self) -> None:
        await self._rank.retried("tidy_records", partial(self._records.tidy, self.train_step))

    async def _commit(self) -> None:
        if self.train_step > self._rank.session.committed_step:
            await self._save()

    async def _save(self) -> None:
        rank, progress = self._rank, self._rank.progress
        started = time.monotonic()
        label, extra = progress.label(rank.session.token), progress.to_extra()
        await rank.retry.run(
            "save_state",
            lambda: self._rank.in_torch(lambda: rank.ranks.save(label, progress.rollback_count, extra)),
        )
        rank.metrics.writes.inc()
        await rank.session.report_committed(self.train_step)
        rank.metrics.committed_step.set(self.train_step)
        rank.metrics.phase_seconds.labels(phase="save").observe(time.monotonic() - started)
        prune = partial(rank.checkpoints.prune_states, keep_last=_KEPT_STATES, session=label)
        await rank.retried("prune_states", prune)
        await asyncio.to_thread(rank.metrics.disk.observe, rank.checkpoints.root)

    async def _record(self, claimed: ClaimedBatch, report: StepReport, waited: float) -> None:
        rank = self._rank
        progress = rank.progress
        counts = await rank.session.retry("counts", rank.session.store.mesh.counts)
        progress.trained_token_total += report.batch.trained_tokens
        progress.count_updates(report.updates, report.trailing_skipped_updates)
        deciles = trained_by_decile(claimed.batch, counts.finished_lengths)
        totals = zip(progress.trained_groups_by_length_decile, deciles, strict=True)
        progress.trained_groups_by_length_decile = [before + now for before, now in totals]
        engines = self._engines.since_last(await self._generators())
        domains = await rank.session.retry("domains", rank.session.store.prompt_records.domain_totals)
        mesh = mesh_numbers(counts, progress) | {"engines": engines}
        mesh["domains"] = {name: asdict(totals) for name, totals in domains.items()}
        record = step_record(report, mesh) | {
            "policy_version": rank.ranks.catalog.version_of(report.train_step),
            "replayed": claimed.replayed,
            "wait_seconds": waited,
        }
        samples = sample_completions(claimed.batch, rank.config.trainer.sample_completions, self._decode)
        # This call is fenced: a trainer that stalled here while another took over must not write the step twice.
        await self._reports.add(record)
        await rank.retried("record", lambda: self._records.append(record, samples))
        rank.metrics.observe_step(report, record)
        rank.metrics.groups.observe(deciles, counts)
        rank.metrics.domains.observe(domains)
        if claimed.replayed:
            rank.metrics.replays.inc()
        for tracker in self._trackers:
            tracker.log(report.train_step, flatten(record))

    async def _generators(self) -> list[GeneratorRecord]:
        session = self._rank.session
        return await session.retry("generators", session.store.generators.live)

    async def _watch_engines(self) -> None:
        """Count the generators' work during long steps and waits too; skip a poll while Redis is unreachable."""
        rank = self._rank
        while not await wait_or_shutdown(self._rank.shutdown, rank.config.store.heartbeat_seconds):
            try:
                self._engines.observe(await rank.session.store.generators.live())
            except StoreUnavailable:
                continue
            except RollmeshError as error:
                self._log.warning("generators_not_seen", message=str(error))


async def _seconds_of(work: Awaitable[object]) -> float:
    started = time.monotonic()
    await work
    return time.monotonic() - started


def mesh_numbers(counts: StoreCounts, progress: Progress) -> dict[str, Any]:
    """Return the totals of tokens and groups over the mesh: goodput, drops, waste and trained lengths."""
    dropped = dropped_by_decile(counts.drop_deciles)
    trained, closed = progress.trained_groups_by_length_decile, counts.totals.get("groups_closed_total", 0)
    return {
        "goodput": progress.generated.goodput(progress.trained_token_total),
        "generated_token_total": progress.generated.total,
        "saved_tokens": counts.totals.get("saved_tokens_total", 0),
        "trained_token_total": progress.trained_token_total,
        "dropped_groups": dict(counts.drops),
        "dropped_groups_by_reason_and_length_decile": dict(counts.drop_deciles),
        "trained_groups_by_length_decile": list(trained),
        "trained_share_by_length_decile": trained_share(trained, dropped),
        "wasted_tokens": dict(counts.dropped_tokens),
        "groups_begun_again_by_reason_and_length_decile": dict(counts.begun_again_deciles),
        "surplus_members_by_length_decile": [counts.surplus_deciles.get(str(d), 0) for d in range(DECILES)],
        # None without a closed group; the later rounds of open groups count too.
        "rounds_per_group": 1 + counts.totals.get("groups_extended_total", 0) / closed if closed else None,
        "totals": dict(counts.totals),
    }


def step_record(report: StepReport, mesh: dict[str, Any]) -> dict[str, Any]:
    """Return one line of metrics.jsonl: the report, the mesh, and the main numbers at the top level."""
    line = report.to_json()
    return line | {"time": time.time(), **top_level_copies(line), "mesh": mesh}
