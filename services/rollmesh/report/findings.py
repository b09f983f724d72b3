"""Problems and gaps of an audit, derived from its counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from rollmesh.report.audit_result import (
    GAP_BOUNDS,
    LEAST_MEAN_TOKENS,
    LEAST_SCORED_SHARE,
    MOST_EXCUSED_SHARE,
    Rescoring,
)
from rollmesh.report.ledger_counts import StalenessRule, Trained
from rollmesh.report.rescore import MISSING, PRUNED

_LISTED = 5
"""Number of ids listed in a problem; the others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedSteps:
    """Train steps of the committed trainer states and of the announced policies."""

    committed: int
    """Train step of the newest undamaged state; -1 without one."""
    announced: int
    """Train step of the newest announced policy; -1 without one."""
    state_every_steps: int = 1
    train_steps: int | None = None
    """Train steps of the whole run; None without a run file."""
    unsound: Mapping[str, str] = field(default_factory=dict)
    """Damaged states by folder name, with the reason."""

    @property
    def expected(self) -> int:
        """Train step that must be committed: a trainer commits before it announces, and always at its last step."""
        if self.train_steps is not None and self.announced >= self.train_steps:
            return self.announced
        return self.announced - self.announced % self.state_every_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """The counts of an audit."""

    steps: CommittedSteps
    trained: Trained
    damaged: Mapping[int, str]
    rule: StalenessRule
    lost: tuple[str, ...] | None
    rescoring: Rescoring
    config_problem: str | None
    on_new_version: str | None
    """``generator.on_new_version``; None without a run file."""
    failure: str
    """Error that ended the run; empty without a failure."""


def problems(findings: Findings) -> Iterator[str]:
    """Yield a description of every failed check."""
    trained = findings.trained
    if findings.failure:
        yield f"the run failed: {findings.failure}"
    if findings.steps.committed < 1 or not trained.groups:
        yield "no batch has been trained and committed, so there is no data to audit"
    yield from _state_problems(findings.steps)
    for step, reason in findings.damaged.items():
        yield f"train step {step} has no valid batch file: {reason}"
    twice = trained.trained_twice()
    if twice:
        listed = ", ".join(f"{g} at steps {' and '.join(map(str, s))}" for g, s in list(twice.items())[:_LISTED])
        yield f"{len(twice)} group(s) were trained more than once: {listed}"
    if trained.trajectories_twice:
        listed = _some([f"{t} in {' and '.join(groups)}" for t, groups in trained.trajectories_twice.items()])
        yield f"{len(trained.trajectories_twice)} trajectories are in more than one place: {listed}"
    if findings.rule.max_staleness is None:
        yield f"the staleness bound is not known, so staleness was not checked: {findings.config_problem}"
    if trained.violations:
        yield (
            f"{len(trained.violations)} trajectories exceed the staleness bound of {findings.rule.max_staleness}: "
            f"{_some(trained.violations)}"
        )
    if trained.unknown:
        yield f"{trained.unknown} trajectories contain tokens of a policy version whose train step is unknown"
    if findings.lost:
        yield f"{len(findings.lost)} admitted group(s) are lost: {_some(findings.lost)}"
    yield from rescoring_problems(findings.rescoring)


def unchecked(findings: Findings) -> Iterator[str]:
    """Yield the reasons why too little was checked for a green verdict."""
    rescoring = findings.rescoring
    expected = rescoring.policy_tokens - rescoring.pruned_tokens
    if not rescoring.policy_tokens:
        yield "no batch file contains a sampled token, so no log-probability was checked"
    elif not rescoring.tokens or rescoring.tokens < LEAST_SCORED_SHARE * expected:
        yield (
            f"{rescoring.tokens:,} of {expected:,} policy tokens were scored again (without the pruned ones), less "
            f"than {100 * LEAST_SCORED_SHARE:g}%: {rescoring.skipped_tokens - rescoring.pruned_tokens:,} others have a "
            f"missing or damaged checkpoint, {rescoring.skipped_impure_tokens:,} attended to another version's "
            "cache (keep_kv)"
        )
    elif missing := [version for version in rescoring.versions if version.skipped == MISSING]:
        yield (
            f"{sum(version.tokens for version in missing):,} tokens have policy versions that are missing although "
            f"checkpoints.keep_last retains them: {_some([str(version.policy_version) for version in missing])}. "
            "They were deleted, or pruned while checkpoints.keep_last was smaller"
        )
    if rescoring.skipped_impure_segments and findings.on_new_version not in ("keep_kv", None):
        yield (
            f"{rescoring.skipped_impure_segments} segments ({rescoring.skipped_impure_tokens:,} tokens) attended to "
            f"another version's cache, which generator.on_new_version={findings.on_new_version} never does: they were "
            "not scored again. This is valid only if the run was started with keep_kv"
        )


def _state_problems(steps: CommittedSteps) -> Iterator[str]:
    for name, reason in steps.unsound.items():
        yield f"trainer state {name} is damaged: {reason}"
    if steps.committed < steps.expected and steps.expected > 0:
        yield (
            f"train step {steps.committed} is the newest that is committed, but a policy of train step "
            f"{steps.announced} was announced: a trainer state is missing or damaged"
        )


def rescoring_problems(rescoring: Rescoring) -> Iterator[str]:
    """Yield the versions whose log-probabilities differ from their checkpoint."""
    bounds = GAP_BOUNDS[rescoring.dtype]
    for version in rescoring.versions:
        name = f"policy version {version.policy_version}"
        if version.skipped and version.skipped not in (PRUNED, MISSING):
            yield f"{name}: {version.skipped}"
        elif version.not_finite:
            yield f"{name}: {version.not_finite} behavior_logprob(s) or their re-scoring are not finite"
        elif version.over_bound:
            yield (
                f"{name}: {version.over_bound} behavior_logprob(s) are up to {version.largest_gap:.3g} nats from its "
                f"checkpoint (bound {bounds.token:g})"
            )
        elif version.tokens >= LEAST_MEAN_TOKENS and (version.mean_gap or 0.0) > bounds.mean:
            yield f"{name}: mean gap of {version.mean_gap:.3g} nats to its checkpoint (bound {bounds.mean:g})"
    if rescoring.unresolvable > MOST_EXCUSED_SHARE * rescoring.tokens:
        yield (
            f"{rescoring.unresolvable} of {rescoring.tokens:,} tokens are over the bound of {bounds.token:g} nats by "
            f"float32 rounding: rounding does not explain more than {100 * MOST_EXCUSED_SHARE:g}%"
        )


def _some(ids: Sequence[str]) -> str:
    rest = len(ids) - _LISTED
    return ", ".join(ids[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")
