"""Summary of one run, for the console, the HTML report and comparisons."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rollmesh.errors import DataError
from rollmesh.mesh import WasteReason
from rollmesh.report.audit_result import AuditResult, read_audit
from rollmesh.report.recorded_run import Evaluation, Record, RecordedRun
from rollmesh.report.series import (
    FloatArray,
    TimelineSeries,
    TrainSeries,
    newest_per_step,
    number,
    published_versions,
    seconds_of_training,
    timeline_series,
    train_series,
)
from rollmesh.store.queue_types import WASTE_TOTALS

Number = TypeVar("Number", int, float)

ALL_OR_NOTHING_VERIFIERS = frozenset({"exact", "numeric", "choice", "math", "countdown"})
"""Verifiers that return 1 for a correct response and 0 otherwise; their mean is an accuracy."""


def summarise(run_folder: Path | RecordedRun) -> "RunSummary":
    """Summarise a complete or partial run folder. Raises DataError for a missing folder."""
    return RunSummary(run_folder if isinstance(run_folder, RecordedRun) else RecordedRun(run_folder))


class RunSummary:
    """Facts of one run; None for unknown values."""

    def __init__(self, run: RecordedRun) -> None:
        """Read the whole run folder."""
        config = run.config
        self.name = run.name
        self.preset = None if config is None else config.schedule.preset
        self.on_new_version = None if config is None else config.generator.on_new_version
        self.seed = None if config is None else config.seed
        self._rewarded = config is None or config.trainer.algorithm.rewarded
        self.planned_steps = None if config is None else config.trainer.train_steps
        self.max_staleness = run.max_staleness
        self.score_name = _score_name(run)
        """``accuracy`` for all-or-nothing verifiers, else ``mean reward``."""
        self.missing = run.missing()
        """Descriptions of missing data of the folder."""
        self.audit: AuditResult | None = None
        try:
            self.audit = read_audit(run.path)
            if self.audit is None:
                self.missing += ("audit.json: not written",)
        except DataError as error:
            self.missing += (str(error),)
        records = (run.metrics.records, run.timeline.records, run.evaluations.records)
        self.policy_versions = len(published_versions(*records)) or None
        """Number of published versions, including the initial one."""
        self.evaluations = Evaluation.read(run.evaluations.records)
        by_version = {point.policy_version: point for point in self.evaluations}
        self.before = by_version[min(by_version)] if len(by_version) > 1 else None
        """Newest evaluation of the oldest evaluated version; None if only one version was evaluated."""
        self.after = by_version[max(by_version)] if by_version else None
        """Newest evaluation of the newest evaluated version."""
        steps = newest_per_step(run.metrics.records)
        mesh: Mapping[str, Any] = (steps[-1].get("mesh") if steps else None) or {}
        timeline = timeline_series(run.timeline.records)
        self._add_training(run, train_series(run.metrics.records, run.timeline.records))
        self._add_timeline(run, timeline, steps)
        self._add_batches(steps, [record.get("batch") or {} for record in steps])
        self._add_mesh(mesh, timeline.dropped)

    def _add_training(self, run: RecordedRun, train: TrainSeries) -> None:
        tokens = train["batch.trained_tokens"]
        self.train_steps = int(train["train_step"][-1]) if len(train) else 0
        """Newest train step in metrics.jsonl."""
        self.sessions: tuple[tuple[float, float], ...] = tuple((begin, end) for begin, end in train.sessions.tolist())
        """Unix seconds of the first step's begin and the last step's end of every session."""
        self.trained_tokens = _of_known(tokens, lambda known: int(known.sum()))
        self.goodput = _of_known(train["mesh.goodput"][-1:], lambda values: float(values[0]))
        """Trained tokens per generated token, from the last step report."""
        self.reprefill_share = _share(train["mesh.engines.reprefill_tokens"], train["mesh.engines.prefill_tokens"])
        """Share of the computed context tokens that had been sampled before, 0..1."""
        self.accepted_tokens, self.drafted_tokens = (
            _of_known(train[f"mesh.engines.speculation.{name}_tokens"], lambda known: int(known.sum()))
            for name in ("accepted", "drafted")
        )
        """Draft tokens that saved a decode step of their call, and all that were verified; None without drafts."""
        running, slots = (train[f"mesh.engines.{name}slot_seconds"] for name in ("running_", ""))
        self.bubble_ratio = _bubble_ratio(running, slots)
        """Share of the slot time of serving generators without a running call, 0..1."""
        self.rollout_bubble_ratio: float | None = None
        """The same without the time of the trainer, if the schedule samples nothing meanwhile, from the second train
        step on, as in ``sim/figures.py``."""
        if run.schedule is not None and len(train) > 1:
            running, slots = running[1:], slots[1:]
            if run.schedule.rests_while_training:
                seconds = np.diff(seconds_of_training(train.sessions, train["time"]))
                slots = slots * np.minimum(1.0, train["wait_seconds"][1:] / seconds)
            self.rollout_bubble_ratio = _bubble_ratio(running, slots)
        self.off_policy_share = _share(train["off_policy_token_share"] * tokens, tokens)
        """Share of the trained tokens sampled from an older policy, 0..1; without step reports before token masks."""
        if self.off_policy_share is None and self.audit is not None:
            self.off_policy_share = self.audit.off_policy_token_share
        self.mean_staleness = _of_known(train["staleness_mean"], lambda values: float(values.mean()))
        self.largest_staleness = _of_known(train["batch.trajectory_staleness.max"], lambda values: int(values.max()))

    def _add_timeline(self, run: RecordedRun, timeline: TimelineSeries, steps: Sequence[Record]) -> None:
        self.generated_tokens = int(timeline.generated_tokens[-1]) if len(timeline) else None
        seconds, tokens = np.diff(timeline.time), np.diff(timeline.generated_tokens)
        total = seconds[tokens > 0].sum()
        self.generated_per_second = float(tokens[tokens > 0].sum() / total) if total > 0 else None
        """Tokens per second of the intervals with generated tokens, without idle time."""
        served = [
            version
            for sample in run.timeline.records
            for generator in sample.get("generators") or ()
            if generator.get("serving") and (version := number(generator, "policy_version")) >= 0
        ]
        published = number(steps[-1], "policy_version") if steps else math.nan
        self.unserved_after = int(max(served)) if served and published >= max(served) + 2 else None
        """Newest policy version that a generator served, if two or more were published after it (the last one may be
        too new); else None."""

    def _add_batches(self, steps: Sequence[Record], batches: Sequence[Mapping[str, Any]]) -> None:
        masked, rollouts = Counter[str](), Counter[int]()
        for batch in batches:
            masked.update(batch.get("masked_tokens", {}))
            histogram = batch.get("rollouts_per_group", {}).get("histogram", {})
            rollouts.update({int(count): groups for count, groups in histogram.items()})
        rewards = [batch.get("reward_by_domain", {}) for batch in batches]
        factors = [record.get("rate_factor", 1.0) for record in steps]
        shares = [record.get("replayed_share", 0.0) for record in steps]
        self.masked_tokens = {mask: tokens for mask, tokens in masked.items() if tokens}
        """Tokens that a mask took out of the loss, by mask; masks without any are omitted."""
        self.skipped_trajectories = sum(batch.get("skipped_trajectories", 0) for batch in batches)
        """Trajectories without a pass, because their advantage is 0."""
        self.skipped_updates = sum(record.get("skipped_updates", 0) for record in steps)
        """Updates that were skipped for a gradient that is not finite, over all train steps."""
        self.steps_of_equal_rewards = sum(self._rewarded and batch.get("reward_std") == 0 for batch in batches)
        """Train steps in whose batch every reward was the same, in a run that learns from them."""
        self.mean_rate_factor = float(np.mean(factors)) if any(factor != 1.0 for factor in factors) else None
        """Mean factor of the update scale on the learning rate; None without one."""
        self.rollouts_per_group = dict(sorted(rollouts.items()))
        """Number of trained groups by their scored trajectories."""
        self.replayed_share = float(np.mean(shares)) if any(shares) else None
        """Mean share of replayed trajectories over all train steps; None without replay."""
        self.reward_by_domain: dict[str, tuple[float, float]] = {
            name: (seen[0], seen[-1])
            for name in sorted({name for by_domain in rewards for name in by_domain})
            if (seen := [by_domain[name] for by_domain in rewards if name in by_domain])
        }
        """Mean shaped reward of the first and of the last train step that had prompts of this domain."""

    def _add_mesh(self, mesh: Mapping[str, Any], dropped: Mapping[str, int]) -> None:
        """Add what the last step report tells of the mesh; ``dropped`` is what the timeline tells."""
        audited = self.audit.dropped if self.audit is not None and not self.audited_part else {}
        reported = {str(reason): int(groups) for reason, groups in mesh.get("dropped_groups", {}).items()}
        self.dropped: Mapping[str, int] = audited or dropped or reported
        """Number of dropped groups by reason."""
        totals = mesh.get("totals", {})
        kinds = {kind: totals.get(WASTE_TOTALS[kind], 0) for kind in (WasteReason.RESTARTED, WasteReason.SET_ASIDE)}
        self.begun_again: dict[str, int] = {kind.replace("_", " "): count for kind, count in kinds.items() if count}
        """Number of groups that were restarted or set aside, by kind."""
        again = mesh.get("groups_begun_again_by_reason_and_length_decile", {})
        self.begun_again_by_decile: dict[str, tuple[int, ...]] = {
            kind.replace("_", " "): tuple(again.get(f"{kind}:{decile}", 0) for decile in range(10))
            for kind, count in kinds.items()
            if count and again
        }
        """The same groups by kind and by length decile of their longest member, the shortest first."""
        self.surplus_tokens: int = mesh.get("wasted_tokens", {}).get(WasteReason.SURPLUS, 0)
        """Saved tokens of members that were cut off."""
        self.surplus_by_decile: tuple[int, ...] = tuple(mesh.get("surplus_members_by_length_decile", ()))
        """Members that were cut off by length decile, the shortest first."""
        shares = mesh.get("trained_share_by_length_decile", ())
        self.dropped_share = tuple(None if share is None else 1 - share for share in shares)
        """Share of the groups that were dropped rather than trained, by length decile, the shortest first; None where
        no group has left the queue."""
        self.rounds_per_group: float | None = mesh.get("rounds_per_group")
        """Mean rounds of closed groups; None without rounds."""
        self.domains: Mapping[str, Mapping[str, int]] = mesh.get("domains", {})
        """Groups drawn, trajectories completed and solved, and tokens by domain."""

    @property
    def finished(self) -> bool:
        """True after the last planned train step."""
        return self.planned_steps is not None and self.train_steps >= self.planned_steps

    @property
    def audited_part(self) -> str:
        """Part of the run that the audit covers if train steps followed it, such as ``up to train step 20 of 35``."""
        if self.audit is None or self.audit.committed_step >= self.train_steps or not self.train_steps:
            return ""
        return f"up to train step {max(self.audit.committed_step, 0)} of {self.train_steps}"

    @property
    def training_seconds(self) -> float | None:
        """Seconds from the begin of the first to the end of the last train step, summed over the sessions."""
        return sum(end - begin for begin, end in self.sessions) if self.sessions else None

    @property
    def audit_verdict(self) -> str | None:
        """Verdict of the audit with the part of the run that it covers; None without an audit."""
        if self.audit is None:
            return None
        return f"{self.audit.verdict.value}{f', {self.audited_part}' if self.audited_part else ''}"

    @property
    def gain(self) -> tuple[float, float | None] | None:
        """(after - before, standard error for independent evaluations if both are known); None without both."""
        if self.before is None or self.after is None:
            return None
        one, other = self.before.standard_error, self.after.standard_error
        error = None if one is None or other is None else math.hypot(one, other)
        return self.after.mean - self.before.mean, error


def _score_name(run: RecordedRun) -> str:
    if run.config is None:
        return "mean reward"
    source = run.config.data.evaluation_source or run.config.data.source
    # A generated task has its own verifier; the one in the run file applies to prompts without a verifier.
    generated = source.type in ("countdown", "reasoning_gym")
    verifier = source.type if generated else run.config.reward.verifier
    return "accuracy" if verifier in ALL_OR_NOTHING_VERIFIERS else "mean reward"


def _bubble_ratio(running_slot_seconds: FloatArray, slot_seconds: FloatArray) -> float | None:
    busy = _share(running_slot_seconds, slot_seconds)
    return None if busy is None else max(0.0, 1 - busy)


def _share(part: FloatArray, whole: FloatArray) -> float | None:
    known = ~np.isnan(part + whole)
    total = whole[known].sum()
    return float(part[known].sum() / total) if total > 0 else None


def _of_known(values: FloatArray, compute: Callable[[FloatArray], Number]) -> Number | None:
    """Apply ``compute`` to the known values; None without any."""
    known = values[~np.isnan(values)]
    return compute(known) if len(known) else None
