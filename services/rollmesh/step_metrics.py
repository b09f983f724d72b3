"""The numbers of a train step: one row per number, with every place that shows it.

A number is a field of a line of metrics.jsonl. A new one needs its computation (a field of ``StepReport`` or of the
line's ``mesh``) and one row here. The row puts it into the trainer's ``/metrics`` and docs/metrics.md (``gauge``), the
curves of the page and the summaries in the queue (``curve``), and the series of the report.
"""

import itertools
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from statistics import median
from typing import Any


@dataclass(frozen=True, slots=True)
class StepMetric:
    """One number of a train step."""

    field: str
    """Path in a line of metrics.jsonl, separated by dots; `` + `` adds several fields."""
    unit: str
    help: str
    gauge: str = ""
    """Name of the Prometheus gauge, without ``rollmesh_trainer_``; empty without one."""
    curve: str = ""
    """Name of the gateway's curve; empty without one."""
    copy_of: str = ""
    """Field of the step report that the top-level ``field`` copies; empty for every other number."""

    def value(self, line: Mapping[str, Any]) -> float:
        """Return the number in a line of metrics.jsonl; NaN if a field is missing or not a number."""
        return reduce(add, (number(line, path) for path in self.paths))

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the added fields, usually one."""
        return tuple(self.field.split(" + "))


def lookup(line: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path of nested objects and lists; None if it is missing."""
    value: Any = line
    for key in path.split("."):
        if isinstance(value, list):
            value = value[int(key)] if key.isdecimal() and int(key) < len(value) else None
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    return value


def number(line: Mapping[str, Any], path: str) -> float:
    """Return the number at a dotted path, possibly infinite; NaN if it is missing or not a number."""
    value = lookup(line, path)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan


_CLIPPED = "policy.ratio.clipped_high + policy.ratio.clipped_low + policy.ratio.clipped_dual"

# fmt: off
STEP_METRICS: tuple[StepMetric, ...] = (
    # The gateway lists its curves in the order of this table.
    StepMetric("reward_mean", "reward", "Mean shaped reward of the batch.",
               gauge="reward_mean", curve="reward_mean", copy_of="batch.reward_mean"),
    StepMetric("batch.outcome_mean", "reward",
               "Mean outcome value of the batch, before shaping, over trajectories with a verifier's value.",
               gauge="outcome_mean", curve="outcome_mean"),
    StepMetric("response_length_mean", "tokens", "Mean response length of the batch.",
               gauge="response_length_mean_tokens", curve="response_length_mean", copy_of="batch.response_length_mean"),
    StepMetric("staleness_mean", "train steps", "Mean staleness of the batch's trajectories.",
               curve="staleness_mean", copy_of="batch.trajectory_staleness.mean"),
    StepMetric("off_policy_token_share", "ratio", "Share of trained tokens with staleness above 0.",
               gauge="off_policy_token_ratio", curve="off_policy_token_share", copy_of="batch.off_policy_token_share"),
    StepMetric("batch.truncated_share", "ratio", "Share of trajectories cut off by the token budget.",
               gauge="truncated_ratio", curve="truncated_share"),
    StepMetric("batch.masked_fraction", "ratio", "Share of tokens outside the numerator of the loss.",
               gauge="masked_ratio", curve="masked_share"),
    StepMetric("loss", "loss", "Loss of the newest step.", gauge="loss", curve="loss"),
    StepMetric("grad_norm", "norm", "Gradient norm before clipping.", gauge="grad_norm", curve="grad_norm"),
    StepMetric("learning_rate", "rate", "Learning rate of the newest step.",
               gauge="learning_rate", curve="learning_rate"),
    StepMetric("rate_factor", "ratio", "Factor of the update scale on the learning rate.",
               gauge="learning_rate_factor_ratio", curve="rate_factor"),
    StepMetric("replayed_share", "ratio", "Share of the batch's trajectories that are of replayed groups.",
               gauge="replayed_ratio", curve="replayed_share"),
    StepMetric("batch.rollouts_per_group.mean", "trajectories", "Mean scored trajectories of a group of the batch.",
               gauge="rollouts_per_group_mean", curve="rollouts_per_group"),
    StepMetric("mesh.rounds_per_group", "rounds",
               "Mean rounds of the groups that the leader has closed; NaN without a planner and a group shaper.",
               gauge="rounds_per_group_mean", curve="rounds_per_group"),
    StepMetric("policy.entropy", "nats", "Mean entropy per token.", gauge="entropy_nats", curve="entropy"),
    StepMetric("policy.kl_behavior_k3", "nats", "k3 KL(behavior || policy) per token.",
               gauge="kl_behavior_k3_nats", curve="kl_behavior"),
    StepMetric("batch.reverse_kl", "nats",
               "k1 KL(behavior || teacher) per token, which distillation lowers; NaN without teachers.",
               gauge="reverse_kl_nats", curve="reverse_kl"),
    StepMetric("policy.forward_kl", "nats",
               "KL(teacher || policy) per token over the teacher's top tokens; NaN unless it is in the loss.",
               gauge="forward_kl_nats", curve="forward_kl"),
    StepMetric("batch.top_token_share", "ratio",
               "Share of trained tokens that are among their teacher's top tokens; NaN without those.",
               gauge="top_token_ratio", curve="top_token_share"),
    StepMetric("policy.ratio.mean", "ratio", "Mean importance ratio.", gauge="ratio_mean", curve="ratio_mean"),
    StepMetric("policy.effective_sample_share", "ratio", "Effective sample size over trajectories, per trajectory.",
               gauge="effective_sample_ratio", curve="effective_sample_share"),
    StepMetric("policy.logprob_gap_pure.mean", "nats",
               "Mean |behavior_logprob - trainer logprob| on pure tokens of the current version.",
               gauge="logprob_gap_pure_nats", curve="logprob_gap"),
    StepMetric("mesh.goodput", "ratio",
               "Trained tokens per generated token since the start of the run; NaN if unknown.",
               gauge="goodput_ratio", curve="goodput"),
    StepMetric("wait_seconds", "seconds", "Time the trainer waited for the batch.", curve="trainer_wait"),
    StepMetric("seconds.evidence", "seconds", "Time of the old and the reference logprobs.", curve="seconds_evidence"),
    StepMetric("seconds.gradient", "seconds", "Time of the forward and the backward passes.",
               curve="seconds_gradient"),
    StepMetric("seconds.update", "seconds", "Time of the optimizer.", curve="seconds_update"),
    StepMetric("batch.response_length_deciles.9", "tokens", "90th percentile of the response lengths.",
               curve="response_length_p90"),
    StepMetric("batch.trajectory_staleness.max", "train steps", "Largest staleness of a trajectory.",
               curve="staleness_max"),
    StepMetric(f"{_CLIPPED} + policy.ratio.truncated", "ratio", "Share of tokens that were clipped or truncated.",
               curve="clipped_share"),
    StepMetric("policy.logprob_gap_pure.max", "nats",
               "Largest engine/trainer gap on pure tokens of the current version.", curve="logprob_gap_max"),
    StepMetric("mesh.trained_token_total", "tokens", "Trained tokens since the start of the run.",
               curve="trained_token_total"),

    StepMetric(_CLIPPED, "ratio", "Share of tokens whose gradient was clipped.", gauge="ratio_clipped_ratio"),
    StepMetric("policy.ratio.truncated", "ratio", "Share of tokens whose importance weight was truncated at its cap.",
               gauge="ratio_truncated_ratio"),
    StepMetric("batch.mixed_cache_token_share", "ratio",
               "Share of trained tokens that attended to another version's cache.", gauge="mixed_cache_token_ratio"),
    StepMetric("policy.logprob_gap_mixed_cache.mean", "nats",
               "Like logprob_gap_pure_nats, on tokens that attended to another version's cache.",
               gauge="logprob_gap_mixed_cache_nats"),
    StepMetric("policy.logprob_gap_pure.tokens", "tokens", "Tokens in logprob_gap_pure_nats.",
               gauge="logprob_gap_pure_tokens"),
    StepMetric("policy.logprob_gap_mixed_cache.tokens", "tokens", "Tokens in logprob_gap_mixed_cache_nats.",
               gauge="logprob_gap_mixed_cache_tokens"),
    StepMetric("policy.kl_behavior_k1", "nats", "k1 KL(behavior || policy) per token.", gauge="kl_behavior_k1_nats"),
    StepMetric("batch.version_span.mean", "policy versions",
               "Mean newest minus oldest policy version within a trajectory.", gauge="version_span_mean"),
    StepMetric("batch.token_staleness.mean", "train steps", "Mean staleness of trained tokens, in train steps.",
               gauge="token_staleness_mean_steps"),

    StepMetric("train_step", "train steps", "Number of the step."),
    StepMetric("policy_version", "policy versions", "Policy version of the trained weights."),
    StepMetric("time", "seconds", "Unix time at the end of the step."),
    StepMetric("batch.trained_tokens", "tokens", "Tokens in the numerator of the loss."),
    StepMetric("mesh.engines.prefill_tokens", "tokens", "Context tokens computed by the engines since the last step."),
    StepMetric("mesh.engines.reprefill_tokens", "tokens", "The part of the prefill that had been sampled before."),
    StepMetric("mesh.engines.speculation.drafted_tokens", "tokens", "Draft tokens verified since the last step."),
    StepMetric("mesh.engines.speculation.accepted_tokens", "tokens",
               "The accepted ones; each saved its call a decode step."),
    StepMetric("mesh.engines.slot_seconds", "seconds", "Slot time of serving generators since the last step."),
    StepMetric("mesh.engines.running_slot_seconds", "seconds", "The part of the slot time with a running call."),
)
# fmt: on
"""Every number that a service or the report reads from a line of metrics.jsonl."""


def gauges() -> list[StepMetric]:
    """Return the numbers that the trainer exports to Prometheus."""
    return [metric for metric in STEP_METRICS if metric.gauge]


def curves() -> dict[str, StepMetric]:
    """Return the numbers that the gateway draws, by curve name."""
    return {metric.curve: metric for metric in STEP_METRICS if metric.curve}


def top_level_copies(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return the main numbers of a step report, which a line of metrics.jsonl repeats at its top level."""
    return {metric.field: lookup(line, metric.copy_of) for metric in STEP_METRICS if metric.copy_of}


_RATE_SECONDS = 10.0


class RateWindow:
    """Growth per second of running totals over the last ten seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, tuple[float, ...]]] = deque()

    def update(self, now: float, *totals: float) -> list[float]:
        """Add the newest totals and return their rates, which are 0 before a second point."""
        if self._points and totals[0] < self._points[-1][1][0]:
            self._points.clear()  # Redis was restored to an earlier state
        self._points.append((now, totals))
        while len(self._points) > 2 and now - self._points[0][0] > _RATE_SECONDS:
            self._points.popleft()
        before, first = self._points[0]
        return [
            (last - start) / (now - before) if now > before else 0.0 for start, last in zip(first, totals, strict=True)
        ]


_PACE_STEPS = 20


class Pace:
    """Times of the newest train steps."""

    def __init__(self) -> None:
        self._ends: deque[tuple[int, float]] = deque(maxlen=_PACE_STEPS + 1)

    def add(self, train_step: int, time: float) -> None:
        """Add the end of a step; a repeated step replaces itself and all later ones."""
        self.remove(train_step)
        self._ends.append((train_step, time))

    def remove(self, from_step: int) -> None:
        """Remove a step and all later ones."""
        while self._ends and self._ends[-1][0] >= from_step:
            self._ends.pop()

    def remaining(self, train_step: int, train_steps: int, now: float) -> float | None:
        """Return the seconds to the last step at the median pace; None without two steps, or after the last step.

        The median ignores a pause of the run between two steps.
        """
        if train_step >= train_steps or len(self._ends) < 2:
            return None
        pace = median((b - a) / (n - m) for (m, a), (n, b) in itertools.pairwise(self._ends))
        return max(0.0, (train_steps - train_step) * pace - min(pace, max(0.0, now - self._ends[-1][1])))
