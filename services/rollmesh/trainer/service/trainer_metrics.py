"""Prometheus metrics of the trainer, and the length deciles of trained and dropped groups."""

import collections
import contextlib
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prometheus_client import Counter, Histogram

from rollmesh.algorithms.ratios import FALLBACK_REASONS
from rollmesh.config.loss_methods import MASKS, OWN_MASK
from rollmesh.errors import Reason
from rollmesh.prompt_history import DomainTotals
from rollmesh.runtime.metrics import STALENESS_BUCKETS, Metrics
from rollmesh.step_metrics import gauges
from rollmesh.store.queue_types import WASTE_REASONS, StoreCounts
from rollmesh.trainer.learner.step_report import BatchStats, StepReport
from rollmesh.types import Batch

DECILES = 10
"""Length deciles, of the longest trajectory of a group among the finished trajectories, as the queue computes them
(``store/scripts/lib/lengths.lua``). Dropping long groups is a bias that a mean length does not show."""
MOST_DOMAINS = 64
"""Most domains with metrics, because every label value is a series of its own."""
_OTHER_DOMAINS = "other"
IO_ERROR = "io_error"
"""Reason of a failed write that is an error of the operating system, other than a full disk."""
_CAUSES = (*Reason, IO_ERROR)
_PHASES = ("wait", "write_batch", "evidence", "gradient", "update", "statistics", "save", "publish")
PUBLICATION_PHASES = ("copy_out", "canary", "copy_canary", "write", "digest", "announce")
_DECILES = {"length_decile": tuple(str(decile) for decile in range(DECILES))}


class TrainerMetrics:
    """Counters, gauges and histograms of one trainer process."""

    def __init__(self, m: Metrics) -> None:
        self.train_step = m.gauge("rollmesh_trainer_train_step", "Batches the policy has been trained on.")
        self.committed_step = m.gauge("rollmesh_trainer_committed_step", "Train step of the newest committed state.")
        self.policy_version = m.gauge("rollmesh_trainer_policy_version", "Newest announced policy version.")
        self.steps = m.counter("rollmesh_trainer_steps_total", "Train steps, replays included.")
        self.replays = m.counter("rollmesh_trainer_replayed_steps_total", "Train steps replayed after a restart.")
        self.replayed_groups = m.counter(
            "rollmesh_trainer_replayed_groups_total", "Groups of earlier batches that were trained on again."
        )
        self.tokens = m.counter(
            "rollmesh_trainer_trained_tokens_total", "Tokens of fresh groups in the numerator of the loss."
        )
        self.trajectories = m.counter("rollmesh_trainer_trajectories_total", "Trajectories of fresh groups trained on.")
        self.skipped = m.counter("rollmesh_trainer_skipped_updates_total", "Updates skipped for a non-finite gradient.")
        self.fallbacks = m.counter(
            "rollmesh_trainer_old_logprob_fallbacks_total",
            "Tokens whose old logprob fell back to the sampler's.",
            {"reason": FALLBACK_REASONS},
        )
        self._left_out = LeftOut(m)
        self.zero_variance = m.counter(
            "rollmesh_trainer_zero_variance_groups_total",
            "Groups whose rewards were all equal.",
            {"outcome": ("all_right", "all_wrong")},
        )
        self.published = m.counter("rollmesh_trainer_published_policies_total", "Policies announced.")
        self.groups = GroupCounters(m)
        self.domains = DomainCounters(m)
        self.writes = m.counter("rollmesh_trainer_checkpoint_writes_total", "Trainer states saved.")
        self.failures = m.counter(
            "rollmesh_trainer_checkpoint_failures_total", "Failed writes to the checkpoint store.", {"reason": _CAUSES}
        )
        self.disk = DiskGauges(m)
        self.reasserted = m.counter(
            "rollmesh_trainer_reassertions_total", "Re-assertions of trained steps: at startup, after a Redis restart."
        )
        self.phase_seconds = m.histogram(
            "rollmesh_trainer_phase_seconds",
            "Wall time of a step's phases; wait is time with neither a batch nor a part of one to work on, publish is "
            "the wait for a publication, canary and copy of the weights.",
            labels={"phase": _PHASES},
        )
        self.publication_seconds = m.histogram(
            "rollmesh_trainer_publication_seconds",
            "Wall time of a publication's phases; training waits for copy_out and canary, not for a canary of the copy "
            "(copy_canary). write digests the weights, too; digest is for other files, manifest, flush and upload.",
            labels={"phase": PUBLICATION_PHASES},
        )
        self.staleness = m.histogram(
            "rollmesh_trainer_staleness_steps",
            "Staleness of trained trajectories of fresh groups, in train steps.",
            STALENESS_BUCKETS,
        )
        self.replayed_staleness = m.histogram(
            "rollmesh_trainer_replayed_staleness_steps",
            "Staleness of the trajectories of replayed groups, in train steps.",
            STALENESS_BUCKETS,
        )
        self.last_step = m.gauge("rollmesh_trainer_last_step_timestamp_seconds", "Unix time of the newest step's end.")
        self._gauges = [(metric, m.gauge(f"rollmesh_trainer_{metric.gauge}", metric.help)) for metric in gauges()]

    def observe_step(self, report: StepReport, line: Mapping[str, Any]) -> None:
        """Export one step report, and its line of metrics.jsonl."""
        batch, policy = report.batch, report.policy
        self.train_step.set(report.train_step)
        self.last_step.set(time.time())
        self.steps.inc()
        self.tokens.inc(batch.trained_tokens)
        self.trajectories.inc(batch.trajectories)
        self.skipped.inc(report.skipped_updates)
        self.zero_variance.labels(outcome="all_right").inc(batch.all_right_groups)
        self.zero_variance.labels(outcome="all_wrong").inc(batch.all_wrong_groups)
        self._left_out.observe(batch)
        for reason, count in policy.old_logprob_fallbacks.items():
            self.fallbacks.labels(reason=reason).inc(count)
        _observe_staleness(self.staleness, batch)
        for phase, seconds in report.seconds.items():
            self.phase_seconds.labels(phase=phase).observe(seconds)
        if report.replay is not None:
            self.replayed_groups.inc(report.replay.groups)
            _observe_staleness(self.replayed_staleness, report.replay)
        for metric, gauge in self._gauges:
            gauge.set(metric.value(line))


def _observe_staleness(histogram: Histogram, batch: BatchStats) -> None:
    for staleness, count in batch.trajectory_staleness.histogram.items():
        for _ in range(count):
            histogram.observe(int(staleness))


class GroupCounters:
    """Counters of groups by length decile, and of tokens discarded in the queue."""

    def __init__(self, m: Metrics) -> None:
        self._trained = m.counter(
            "rollmesh_trainer_groups_total",
            "Groups trained on, by length decile of their longest trajectory.",
            _DECILES,
        )
        self._dropped = Growth(
            m.counter(
                "rollmesh_trainer_dropped_groups_total",
                "Groups that left the queue untrained while this trainer ran, by length decile.",
                _DECILES,
            )
        )
        self._wasted = Growth(
            m.counter(
                "rollmesh_trainer_wasted_tokens_total",
                "Saved tokens discarded while this trainer ran: of dropped groups, of groups that began again, and of "
                "unscorable, dead, surplus or shortened members.",
                {"reason": WASTE_REASONS},
            )
        )

    def observe(self, trained: Sequence[int], counts: StoreCounts) -> None:
        """Export the groups of one step by length decile, and the drops and waste since the last step."""
        for decile, groups in enumerate(trained):
            self._trained.labels(length_decile=str(decile)).inc(groups)
        self._dropped.update({str(d): n for d, n in enumerate(dropped_by_decile(counts.drop_deciles))})
        self._wasted.update(counts.dropped_tokens)


class LeftOut:
    """Counters of the tokens and trajectories that a train step left out."""

    def __init__(self, m: Metrics) -> None:
        self._masked = m.counter(
            "rollmesh_trainer_masked_tokens_total",
            "Tokens of fresh (not replayed) groups that a mask took out of the loss.",
            {"reason": ("stale", *MASKS.methods, OWN_MASK)},
        )
        self._skipped = m.counter(
            "rollmesh_trainer_skipped_trajectories_total",
            "Trajectories of fresh (not replayed) groups without a pass: their advantage is 0.",
        )

    def observe(self, batch: BatchStats) -> None:
        """Add the counts of one train step."""
        self._skipped.inc(batch.skipped_trajectories)
        for reason, tokens in batch.masked_tokens.items():
            self._masked.labels(reason=reason).inc(tokens)


class DomainCounters:
    """Totals of the domains of the prompts: of the first ``MOST_DOMAINS`` that come, and of all others as ``other``."""

    def __init__(self, m: Metrics) -> None:
        self._named: set[str] = set()
        self._growth = {
            field: Growth(m.counter(f"rollmesh_trainer_domain_{name}_total", text, {"domain": (_OTHER_DOMAINS,)}))
            for field, name, text in (
                ("drawn", "groups", "Groups admitted while this trainer ran, by domain of their prompt."),
                ("completed", "trajectories", "Trajectories scored in ended groups, by domain of their prompt."),
                (
                    "solved",
                    "solved_trajectories",
                    "Members with a positive outcome of the verifier, or without one a positive reward, by domain.",
                ),
                ("tokens", "tokens", "Tokens of the scored trajectories, by domain of their prompt."),
            )
        }

    def observe(self, domains: Mapping[str, DomainTotals]) -> None:
        """Add what has been counted since the last step."""
        new = sorted(domains.keys() - self._named - {_OTHER_DOMAINS})
        self._named.update(new[: max(0, MOST_DOMAINS - len(self._named))])
        for field, growth in self._growth.items():
            totals: collections.Counter[str] = collections.Counter()
            for domain, counted in domains.items():
                totals[domain if domain in self._named else _OTHER_DOMAINS] += getattr(counted, field)
            growth.update(totals)


class DiskGauges:
    """Size and free space of the checkpoint store's disk."""

    def __init__(self, m: Metrics) -> None:
        self._free = m.gauge(
            "rollmesh_trainer_checkpoint_free_bytes", "Free space of the checkpoint store's disk after the last write."
        )
        self._size = m.gauge("rollmesh_trainer_checkpoint_disk_bytes", "Size of the checkpoint store's disk.")

    def observe(self, root: Path) -> None:
        """Export both; on an error the last values stay."""
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(root)
            self._free.set(usage.free)
            self._size.set(usage.total)


class Growth:
    """A counter with one label that follows external lifetime totals, from the first update."""

    def __init__(self, counter: Counter) -> None:
        self.counter = counter
        self._seen: Mapping[str, int] | None = None

    def update(self, totals: Mapping[str, int]) -> None:
        """Add the increase of each total. A total that decreased (Redis restored to an earlier state) adds 0."""
        if self._seen is not None:
            for label, total in totals.items():
                self.counter.labels(label).inc(max(0, total - self._seen.get(label, 0)))
        self._seen = dict(totals)


def length_decile(tokens: int, finished: Mapping[int, int]) -> int:
    """Return the decile (0 to 9) of a length among the finished trajectories, given as counts by length bucket."""
    bucket = math.floor(math.log2(tokens + 1) * 4)
    below = sum(count for other, count in finished.items() if other < bucket)
    total = sum(finished.values())
    return min(DECILES - 1, DECILES * below // total) if total else 0


def trained_by_decile(batch: Batch, finished: Mapping[int, int]) -> list[int]:
    """Count the groups of a batch by length decile, [10]."""
    counts = [0] * DECILES
    for group in batch.groups:
        longest = max((t.response_token_count for t in group.trajectories), default=0)
        counts[length_decile(longest, finished)] += 1
    return counts


def dropped_by_decile(drop_deciles: Mapping[str, int]) -> list[int]:
    """Sum dropped groups by length decile, [10], from counts by ``<reason>:<decile>``."""
    counts = [0] * DECILES
    for name, count in drop_deciles.items():
        counts[int(name.rpartition(":")[2])] += count
    return counts


def trained_share(trained: Sequence[int], dropped: Sequence[int]) -> list[float | None]:
    """Compute trained / (trained + dropped) by decile; None where no group has left the queue yet."""
    return [t / (t + d) if t + d else None for t, d in zip(trained, dropped, strict=True)]
