"""Prometheus metrics of the trainer."""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from prometheus_client import Counter

from rollmesh.algorithms.old_logprobs import FALLBACK_REASONS
from rollmesh.checkpoints.reasons import Reason
from rollmesh.runtime.metrics import STALENESS_BUCKETS, Metrics
from rollmesh.store.queue_types import WASTE_REASONS, StoreCounts
from rollmesh.trainer.learner.step_report import StepReport
from rollmesh.trainer.records.trained_lengths import DECILES, dropped_by_decile

_PHASES = ("wait", "write_batch", "evidence", "gradient", "update", "statistics", "save", "publish")
_GAUGES = {
    "loss": "Loss of the newest step.",
    "learning_rate": "Learning rate of the newest step.",
    "grad_norm": "Gradient norm before clipping.",
    "reward_mean": "Mean shaped reward of the batch.",
    "outcome_mean": "Mean outcome value of the batch, before shaping, over trajectories with a verifier's value.",
    "entropy_nats": "Mean entropy per token.",
    "kl_behavior_k3_nats": "k3 KL(behavior || policy) per token.",
    "ratio_mean": "Mean importance ratio.",
    "ratio_clipped_ratio": "Share of tokens whose gradient was clipped.",
    "ratio_truncated_ratio": "Share of tokens whose importance weight was truncated at its cap.",
    "masked_ratio": "Share of tokens outside the numerator of the loss.",
    "effective_sample_ratio": "Effective sample size over trajectories, per trajectory.",
    "off_policy_token_ratio": "Share of trained tokens with staleness above 0.",
    "mixed_cache_token_ratio": "Share of trained tokens that attended to another version's cache.",
    "logprob_gap_pure_nats": "Mean |behavior_logprob - trainer logprob| on pure tokens of the current version.",
    "logprob_gap_mixed_cache_nats": "Like logprob_gap_pure_nats, on tokens that attended to another version's cache.",
    "logprob_gap_pure_tokens": "Tokens in logprob_gap_pure_nats.",
    "logprob_gap_mixed_cache_tokens": "Tokens in logprob_gap_mixed_cache_nats.",
    "kl_behavior_k1_nats": "k1 KL(behavior || policy) per token.",
    "version_span_mean": "Mean newest minus oldest policy version within a trajectory.",
    "token_staleness_mean_steps": "Mean staleness of trained tokens, in train steps.",
    "response_length_mean_tokens": "Mean response length of the batch.",
    "truncated_ratio": "Share of trajectories cut off by the token budget.",
    "goodput_ratio": "Trained tokens per generated token since the start of the run; NaN if unknown.",
}


class TrainerMetrics:
    """Counters, gauges and histograms of one trainer process."""

    def __init__(self, metrics: Metrics) -> None:
        m = metrics
        self.train_step = m.gauge("rollmesh_trainer_train_step", "Batches the policy has been trained on.")
        self.committed_step = m.gauge("rollmesh_trainer_committed_step", "Train step of the newest committed state.")
        self.policy_version = m.gauge("rollmesh_trainer_policy_version", "Newest announced policy version.")
        self.steps = m.counter("rollmesh_trainer_steps_total", "Train steps, replays included.")
        self.replays = m.counter("rollmesh_trainer_replayed_steps_total", "Train steps replayed after a restart.")
        self.tokens = m.counter("rollmesh_trainer_trained_tokens_total", "Tokens in the numerator of the loss.")
        self.trajectories = m.counter("rollmesh_trainer_trajectories_total", "Trajectories trained on.")
        self.skipped = m.counter("rollmesh_trainer_skipped_updates_total", "Updates skipped for a non-finite gradient.")
        self.fallbacks = m.counter(
            "rollmesh_trainer_old_logprob_fallbacks_total",
            "Tokens whose old logprob fell back to the sampler's.",
            ["reason"],
        )
        self.zero_variance = m.counter(
            "rollmesh_trainer_zero_variance_groups_total", "Groups whose rewards were all equal.", ["outcome"]
        )
        self.published = m.counter("rollmesh_trainer_published_policies_total", "Policies announced.")
        self.groups = m.counter(
            "rollmesh_trainer_groups_total",
            "Groups trained on, by length decile of their longest trajectory.",
            ["length_decile"],
        )
        self._dropped = Growth(
            m.counter(
                "rollmesh_trainer_dropped_groups_total",
                "Groups that left the queue untrained while this trainer ran, by length decile.",
                ["length_decile"],
            )
        )
        self._wasted = Growth(
            m.counter(
                "rollmesh_trainer_wasted_tokens_total",
                "Saved tokens discarded while this trainer ran: of dropped groups, unscorable and dead members.",
                ["reason"],
            )
        )
        self.writes = m.counter("rollmesh_trainer_checkpoint_writes_total", "Trainer states saved.")
        self.failures = m.counter(
            "rollmesh_trainer_checkpoint_failures_total", "Failed writes to the checkpoint store.", ["reason"]
        )
        self.free_bytes = m.gauge(
            "rollmesh_trainer_checkpoint_free_bytes", "Free space of the checkpoint store's disk after the last write."
        )
        self.disk_bytes = m.gauge("rollmesh_trainer_checkpoint_disk_bytes", "Size of the checkpoint store's disk.")
        self.reasserted = m.counter(
            "rollmesh_trainer_reassertions_total",
            "Re-assertions of the trained steps: at startup and after a Redis restart.",
        )
        self.phase_seconds = m.histogram(
            "rollmesh_trainer_phase_seconds", "Wall time of a step's phases.", labels=["phase"]
        )
        self.staleness = m.histogram(
            "rollmesh_trainer_staleness_steps", "Staleness of trained trajectories, in train steps.", STALENESS_BUCKETS
        )
        self.last_step = m.gauge(
            "rollmesh_trainer_last_step_timestamp_seconds", "Unix time at the end of the newest step."
        )
        self._gauges = {name: m.gauge(f"rollmesh_trainer_{name}", text) for name, text in _GAUGES.items()}
        for phase in _PHASES:
            self.phase_seconds.labels(phase=phase)
        for outcome in ("all_right", "all_wrong"):
            self.zero_variance.labels(outcome=outcome)
        for decile in map(str, range(DECILES)):
            self.groups.labels(length_decile=decile)
            self._dropped.counter.labels(length_decile=decile)
        for reason in WASTE_REASONS:
            self._wasted.counter.labels(reason=reason)
        for reason in FALLBACK_REASONS:
            self.fallbacks.labels(reason=reason)
        for reason in Reason:
            self.failures.labels(reason=str(reason))

    def observe_step(self, report: StepReport, goodput: float | None) -> None:
        """Export one step report; ``goodput`` is trained tokens per generated token so far."""
        batch, policy = report.batch, report.policy
        self.train_step.set(report.train_step)
        self.last_step.set(time.time())
        self.steps.inc()
        self.tokens.inc(batch.trained_tokens)
        self.trajectories.inc(batch.trajectories)
        self.skipped.inc(report.skipped_updates)
        self.zero_variance.labels(outcome="all_right").inc(batch.all_right_groups)
        self.zero_variance.labels(outcome="all_wrong").inc(batch.all_wrong_groups)
        for reason, count in policy.old_logprob_fallbacks.items():
            self.fallbacks.labels(reason=reason).inc(count)
        for staleness, count in batch.trajectory_staleness.histogram.items():
            for _ in range(count):
                self.staleness.observe(int(staleness))
        for phase, seconds in report.seconds.items():
            self.phase_seconds.labels(phase=phase).observe(seconds)
        for name, value in gauge_values(report, goodput).items():
            self._gauges[name].set(value)

    def observe_disk(self, root: Path) -> None:
        """Export size and free space of the checkpoint store's disk; on an error the last values stay."""
        with contextlib.suppress(OSError):
            usage = shutil.disk_usage(root)
            self.free_bytes.set(usage.free)
            self.disk_bytes.set(usage.total)

    def observe_groups(self, trained: Sequence[int], counts: StoreCounts) -> None:
        """Export the groups of one step by length decile, and the drops and waste since the last step."""
        for decile, groups in enumerate(trained):
            self.groups.labels(length_decile=str(decile)).inc(groups)
        self._dropped.update({str(d): n for d, n in enumerate(dropped_by_decile(counts.drop_deciles))})
        self._wasted.update(counts.dropped_tokens)


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


def gauge_values(report: StepReport, goodput: float | None) -> Mapping[str, float]:
    """Return the value of every gauge of a step, by its name without ``rollmesh_trainer_``."""
    batch, policy = report.batch, report.policy
    ratio = policy.ratio
    return {
        "loss": report.loss,
        "learning_rate": report.learning_rate,
        "grad_norm": report.grad_norm,
        "reward_mean": batch.reward_mean,
        "outcome_mean": batch.outcome_mean,
        "entropy_nats": policy.entropy,
        "kl_behavior_k3_nats": policy.kl_behavior_k3,
        "ratio_mean": ratio.mean,
        "ratio_clipped_ratio": ratio.clipped_high + ratio.clipped_low + ratio.clipped_dual,
        "ratio_truncated_ratio": ratio.truncated,
        "masked_ratio": batch.masked_fraction,
        "effective_sample_ratio": policy.effective_sample_share,
        "off_policy_token_ratio": batch.off_policy_token_share,
        "mixed_cache_token_ratio": batch.mixed_cache_token_share,
        "logprob_gap_pure_nats": policy.logprob_gap_pure.mean,
        "logprob_gap_mixed_cache_nats": policy.logprob_gap_mixed_cache.mean,
        "logprob_gap_pure_tokens": policy.logprob_gap_pure.tokens,
        "logprob_gap_mixed_cache_tokens": policy.logprob_gap_mixed_cache.tokens,
        "kl_behavior_k1_nats": policy.kl_behavior_k1,
        "version_span_mean": batch.version_span.mean,
        "token_staleness_mean_steps": batch.token_staleness.mean,
        "response_length_mean_tokens": batch.response_length_mean,
        "truncated_ratio": batch.truncated_share,
        "goodput_ratio": math.nan if goodput is None else goodput,
    }
