"""Summary of one run, for the console, the HTML report and comparisons."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rollmesh.errors import DataError
from rollmesh.mesh import WasteReason
from rollmesh.report.audit_result import AuditResult, read_audit
from rollmesh.report.recorded_run import Record, RecordedRun
from rollmesh.report.series import (
    EvaluationPoint,
    FloatArray,
    TimelineSeries,
    TrainSeries,
    evaluation_points,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Facts of one run; None for unknown values."""

    folder: Path
    name: str
    preset: str | None
    on_new_version: str | None
    seed: int | None
    planned_steps: int | None
    train_steps: int
    """Newest train step in metrics.jsonl."""
    policy_versions: int | None
    """Number of published versions, including the initial one."""
    sessions: tuple[tuple[float, float], ...]
    """Unix seconds of the first step's begin and the last step's end of every session."""
    score_name: str
    """``accuracy`` for all-or-nothing verifiers, else ``mean reward``."""
    before: EvaluationPoint | None
    """Evaluation of the oldest evaluated version; None if only one version was evaluated."""
    after: EvaluationPoint | None
    """Evaluation of the newest evaluated version."""
    evaluations: tuple[EvaluationPoint, ...]
    trained_tokens: int | None
    generated_tokens: int | None
    generated_per_second: float | None
    goodput: float | None
    """Trained tokens per generated token, from the last step report."""
    reprefill_share: float | None
    """Share of the computed context tokens that had been sampled before, 0..1."""
    bubble_ratio: float | None
    """Share of the slot time of serving generators without a running call, 0..1."""
    rollout_bubble_ratio: float | None
    """The same without the time of the trainer, if the schedule samples nothing meanwhile."""
    off_policy_share: float | None
    """Share of the trained tokens sampled from an older policy, 0..1."""
    mean_staleness: float | None
    largest_staleness: int | None
    max_staleness: int | None
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Number of dropped groups by reason."""
    begun_again: Mapping[str, int] = field(default_factory=dict)
    """Number of groups that were restarted or set aside, by kind, at the last train step."""
    surplus_tokens: int = 0
    """Saved tokens of members that were cut off, at the last train step."""
    dropped_share: tuple[float | None, ...] = ()
    """Share of the groups that were dropped rather than trained, by length decile, the shortest first; None where no
    group has left the queue."""
    begun_again_by_decile: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The same groups by kind and by length decile of their longest member, the shortest first."""
    surplus_by_decile: tuple[int, ...] = ()
    """Members that were cut off by length decile, the shortest first."""
    masked_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens that a mask took out of the loss, by mask; masks without any are omitted."""
    skipped_trajectories: int = 0
    """Trajectories without a pass, because their advantage is 0."""
    skipped_updates: int = 0
    """Updates that were skipped for a gradient that is not finite, over all train steps."""
    steps_of_equal_rewards: int = 0
    """Train steps in whose batch every reward was the same."""
    unserved_after: int | None = None
    """Newest policy version that a generator served, if two or more were published after it; else None."""
    mean_rate_factor: float | None = None
    """Mean factor of the update scale on the learning rate; None without one."""
    rollouts_per_group: Mapping[int, int] = field(default_factory=dict)
    """Number of trained groups by their scored trajectories."""
    rounds_per_group: float | None = None
    """Mean rounds of closed groups, at the last train step; None without rounds."""
    replayed_share: float | None = None
    """Mean share of replayed trajectories over all train steps; None without replay."""
    reward_by_domain: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Mean shaped reward of the first and of the last train step that had prompts of this domain."""
    domains: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Groups drawn, trajectories completed and solved, and tokens by domain, at the last train step."""
    audit: AuditResult | None = None
    missing: tuple[str, ...] = ()
    """Descriptions of missing data of the folder."""

    @property
    def finished(self) -> bool:
        """True after the last planned train step."""
        return self.planned_steps is not None and self.train_steps >= self.planned_steps

    @property
    def audited_part(self) -> str:
        """Part of the run that the audit covers if train steps followed it, such as ``up to train step 20 of 35``."""
        if self.audit is None or _is_newest(self.audit, self.train_steps):
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
    def gain(self) -> tuple[float, float] | None:
        """(after - before, standard error for independent evaluations); None without both."""
        if self.before is None or self.after is None:
            return None
        error = math.hypot(self.before.standard_error, self.after.standard_error)
        return self.after.mean - self.before.mean, error


def summarise(run_folder: Path | RecordedRun) -> RunSummary:
    """Summarise a complete or partial run folder. Raises DataError for a missing folder."""
    folder = run_folder if isinstance(run_folder, RecordedRun) else RecordedRun(run_folder)
    train = train_series(folder.metrics.records, folder.timeline.records)
    timeline = timeline_series(folder.timeline.records)
    evaluations = evaluation_points(folder.evaluations.records)
    audit, audit_problem = _audit(folder.path)
    config, steps = folder.config, newest_per_step(folder.metrics.records)
    mesh: Mapping[str, Any] = (steps[-1].get("mesh") if steps else None) or {}
    versions = published_versions(folder.metrics.records, folder.timeline.records, folder.evaluations.records)
    before, after = _before_and_after(evaluations)
    train_steps = int(train["train_step"][-1]) if len(train) else 0
    newest_audit = audit if audit is not None and _is_newest(audit, train_steps) else None
    return RunSummary(
        folder=folder.path,
        name=folder.name,
        preset=config.schedule.preset if config is not None else None,
        on_new_version=config.generator.on_new_version if config is not None else None,
        seed=config.seed if config is not None else None,
        planned_steps=config.trainer.train_steps if config is not None else None,
        train_steps=train_steps,
        policy_versions=len(versions) or None,
        sessions=tuple(map(tuple, train.sessions.tolist())),
        score_name=_score_name(folder),
        before=before,
        after=after,
        evaluations=evaluations,
        trained_tokens=_of_known(train["batch.trained_tokens"], lambda tokens: int(tokens.sum())),
        generated_tokens=int(timeline.generated_tokens[-1]) if len(timeline) else None,
        generated_per_second=_generated_per_second(timeline),
        goodput=_of_known(train["mesh.goodput"][-1:], lambda values: float(values[0])),
        reprefill_share=_share(train["mesh.engines.reprefill_tokens"], train["mesh.engines.prefill_tokens"]),
        bubble_ratio=_bubble_ratio(train["mesh.engines.running_slot_seconds"], train["mesh.engines.slot_seconds"]),
        rollout_bubble_ratio=_rollout_bubble_ratio(folder, train),
        off_policy_share=_off_policy_share(train, audit),
        mean_staleness=_of_known(train["staleness_mean"], lambda values: float(values.mean())),
        largest_staleness=_of_known(train["batch.trajectory_staleness.max"], lambda values: int(values.max())),
        max_staleness=folder.max_staleness,
        dropped=_dropped(newest_audit, timeline, mesh),
        **_fates(mesh),
        **_left_out(folder, steps),
        **_curriculum(mesh, steps),
        audit=audit,
        missing=folder.missing() + audit_problem,
    )


def _audit(path: Path) -> tuple[AuditResult | None, tuple[str, ...]]:
    try:
        audit = read_audit(path)
    except DataError as error:
        return None, (str(error),)
    return audit, () if audit is not None else ("audit.json: not written",)


def _is_newest(audit: AuditResult, train_steps: int) -> bool:
    """Tell whether no recorded train step follows the audit."""
    return audit.committed_step >= train_steps or not train_steps


def _before_and_after(points: Sequence[EvaluationPoint]) -> tuple[EvaluationPoint | None, EvaluationPoint | None]:
    """Return the newest evaluations of the oldest and of the newest evaluated version."""
    if not points:
        return None, None
    by_version = {point.policy_version: point for point in points}
    oldest, newest = by_version[min(by_version)], by_version[max(by_version)]
    return (None, newest) if oldest is newest else (oldest, newest)


def _score_name(folder: RecordedRun) -> str:
    if folder.config is None:
        return "mean reward"
    data = folder.config.data
    source = data.evaluation_source or data.source
    # A generated task has its own verifier; the one in the run file applies to prompts without a verifier.
    generated = source.type in ("countdown", "reasoning_gym")
    verifier = source.type if generated else folder.config.reward.verifier
    return "accuracy" if verifier in ALL_OR_NOTHING_VERIFIERS else "mean reward"


def _generated_per_second(timeline: TimelineSeries) -> float | None:
    """Compute the rate over the intervals with generated tokens, without idle time."""
    if len(timeline) < 2:
        return None
    seconds, tokens = np.diff(timeline.time), np.diff(timeline.generated_tokens)
    busy = tokens > 0
    return float(tokens[busy].sum() / seconds[busy].sum()) if busy.any() and seconds[busy].sum() > 0 else None


def _bubble_ratio(running_slot_seconds: FloatArray, slot_seconds: FloatArray) -> float | None:
    busy = _share(running_slot_seconds, slot_seconds)
    return None if busy is None else max(0.0, 1 - busy)


def _rollout_bubble_ratio(folder: RecordedRun, train: TrainSeries) -> float | None:
    """Return the idle share of the slots during rollout, as ``sim/figures.py`` does, from the second train step on."""
    if folder.schedule is None or len(train) < 2:
        return None
    running, slots = (train[f"mesh.engines.{name}slot_seconds"][1:] for name in ("running_", ""))
    if folder.schedule.rests_while_training:
        seconds = np.diff(seconds_of_training(train.sessions, train["time"]))
        slots = slots * np.minimum(1.0, train["wait_seconds"][1:] / seconds)
    return _bubble_ratio(running, slots)


def _off_policy_share(train: TrainSeries, audit: AuditResult | None) -> float | None:
    """Return the share from the step reports, weighted by tokens; without them that of the audit, before masks."""
    tokens = train["batch.trained_tokens"]
    share = _share(train["off_policy_token_share"] * tokens, tokens)
    return audit.off_policy_token_share if share is None and audit is not None else share


def _dropped(audit: AuditResult | None, timeline: TimelineSeries, mesh: Mapping[str, Any]) -> Mapping[str, int]:
    """Return dropped groups by reason from the first available source: audit, timeline, last step report."""
    if audit is not None and audit.dropped:
        return audit.dropped
    if timeline.dropped:
        return timeline.dropped
    return {str(reason): int(groups) for reason, groups in mesh.get("dropped_groups", {}).items()}


def _fates(mesh: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields on groups that begin again, on surplus members and on drops by length, of the last report."""
    totals = mesh.get("totals", {})
    kinds = {kind: totals.get(WASTE_TOTALS[kind], 0) for kind in (WasteReason.RESTARTED, WasteReason.SET_ASIDE)}
    again = mesh.get("groups_begun_again_by_reason_and_length_decile", {})
    trained = mesh.get("trained_share_by_length_decile", ())
    return {
        "begun_again": {kind.replace("_", " "): count for kind, count in kinds.items() if count},
        "begun_again_by_decile": {
            kind.replace("_", " "): tuple(again.get(f"{kind}:{decile}", 0) for decile in range(10))
            for kind, count in kinds.items()
            if count and again
        },
        "surplus_tokens": mesh.get("wasted_tokens", {}).get(WasteReason.SURPLUS, 0),
        "dropped_share": tuple(None if share is None else 1 - share for share in trained),
        "surplus_by_decile": tuple(mesh.get("surplus_members_by_length_decile", ())),
    }


def _left_out(folder: RecordedRun, records: Sequence[Record]) -> dict[str, Any]:
    """Return the fields on masks, skipped passes and the update scale, over all train steps."""
    batches: list[Mapping[str, Any]] = [record.get("batch") or {} for record in records]
    masked: Counter[str] = Counter()
    for batch in batches:
        masked.update(batch.get("masked_tokens", {}))
    factors = [record.get("rate_factor", 1.0) for record in records]
    return {
        "skipped_updates": sum(record.get("skipped_updates", 0) for record in records),
        "steps_of_equal_rewards": sum(batch.get("reward_std") == 0 for batch in batches),
        "unserved_after": _unserved_after(folder, records),
        "masked_tokens": {mask: tokens for mask, tokens in masked.items() if tokens},
        "skipped_trajectories": sum(batch.get("skipped_trajectories", 0) for batch in batches),
        "mean_rate_factor": float(np.mean(factors)) if any(factor != 1.0 for factor in factors) else None,
    }


def _unserved_after(folder: RecordedRun, steps: Sequence[Record]) -> int | None:
    """Return the newest served version of a run whose later ones no generator served; the last one may be too new."""
    served = [
        version
        for sample in folder.timeline.records
        for generator in sample.get("generators") or ()
        if generator.get("serving") and (version := number(generator, "policy_version")) >= 0
    ]
    published = number(steps[-1], "policy_version") if steps else math.nan
    return int(max(served)) if served and published >= max(served) + 2 else None


def _curriculum(mesh: Mapping[str, Any], records: Sequence[Record]) -> dict[str, Any]:
    """Return the fields on rounds, domains and replay."""
    rollouts: Counter[int] = Counter()
    for record in records:
        histogram = (record.get("batch") or {}).get("rollouts_per_group", {}).get("histogram", {})
        rollouts.update({int(count): groups for count, groups in histogram.items()})
    rewards = [(record.get("batch") or {}).get("reward_by_domain", {}) for record in records]
    shares = [record.get("replayed_share", 0.0) for record in records]
    return {
        "rollouts_per_group": dict(sorted(rollouts.items())),
        "rounds_per_group": mesh.get("rounds_per_group"),
        "replayed_share": float(np.mean(shares)) if any(shares) else None,
        "domains": mesh.get("domains", {}),
        "reward_by_domain": {
            name: (seen[0], seen[-1])
            for name in sorted({name for by_domain in rewards for name in by_domain})
            if (seen := [by_domain[name] for by_domain in rewards if name in by_domain])
        },
    }


def _share(part: FloatArray, whole: FloatArray) -> float | None:
    known = ~np.isnan(part + whole)
    total = whole[known].sum()
    return float(part[known].sum() / total) if total > 0 else None


def _of_known(values: FloatArray, compute: Callable[[FloatArray], Number]) -> Number | None:
    """Apply ``compute`` to the known values; None without any."""
    known = values[~np.isnan(values)]
    return compute(known) if len(known) else None
