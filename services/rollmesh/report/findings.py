"""From the counts of an audit to its verdict: what does not hold, and what was checked too little."""

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
from rollmesh.report.rescore import GONE, PRUNED

_NAMED = 5
"""Ids that a problem spells out; the rest is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedSteps:
    """How far the committed trainer states reach, and how far the announced policies do."""

    committed: int
    """Train step of the newest sound state; -1 without one."""
    announced: int
    """Train step of the newest announced policy; -1 without one."""
    state_every_steps: int = 1
    train_steps: int | None = None
    """Train steps of the whole run; None where the run file is not known."""
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
    """``generator.on_new_version``; None where the run file is not known."""
    failure: str
    """The error that ended the run; empty when it did not fail."""


def problems(found: Findings) -> Iterator[str]:
    """Yield everything that does not hold, in plain words."""
    trained = found.trained
    if found.failure:
        yield f"the run failed: {found.failure}"
    if found.steps.committed < 1 or not trained.groups:
        yield "nothing has been trained and committed, so there is nothing to vouch for"
    yield from _state_problems(found.steps)
    for step, reason in found.damaged.items():
        yield f"train step {step} has no sound batch file: {reason}"
    twice = trained.trained_twice()
    if twice:
        named = ", ".join(f"{g} at steps {' and '.join(map(str, s))}" for g, s in list(twice.items())[:_NAMED])
        yield f"{len(twice)} group(s) were trained more than once: {named}"
    if trained.trajectories_twice:
        named = _some([f"{t} in {' and '.join(groups)}" for t, groups in trained.trajectories_twice.items()])
        yield f"{len(trained.trajectories_twice)} trajectories are in more than one place: {named}"
    if found.rule.max_staleness is None:
        yield f"the staleness bound is not known, so nothing was held against it: {found.config_problem}"
    if trained.violations:
        yield (
            f"{len(trained.violations)} trajectories exceed the staleness bound of {found.rule.max_staleness}: "
            f"{_some(trained.violations)}"
        )
    if trained.unknown:
        yield f"{trained.unknown} trajectories hold tokens of a policy version whose train step nothing names"
    if found.lost:
        yield f"{len(found.lost)} admitted group(s) are lost: {_some(found.lost)}"
    yield from rescoring_problems(found.rescoring)


def unchecked(found: Findings) -> Iterator[str]:
    """Yield the reasons why too little was checked to call the run green, in plain words."""
    rescoring = found.rescoring
    asked = rescoring.policy_tokens - rescoring.pruned_tokens
    if not rescoring.policy_tokens:
        yield "no batch file holds a token that a policy wrote, so no log-probability was checked"
    elif not rescoring.tokens or rescoring.tokens < LEAST_SCORED_SHARE * asked:
        yield (
            f"{rescoring.tokens:,} of {asked:,} policy tokens were scored again (without the pruned ones), less than "
            f"{100 * LEAST_SCORED_SHARE:g}%: {rescoring.skipped_tokens - rescoring.pruned_tokens:,} others name a "
            f"checkpoint that is gone or damaged, {rescoring.skipped_impure_tokens:,} attended to another version's "
            "cache (keep_kv)"
        )
    elif gone := [version for version in rescoring.versions if version.skipped == GONE]:
        yield (
            f"{sum(version.tokens for version in gone):,} tokens name policy versions that checkpoints.keep_last keeps "
            f"and that are gone: {_some([str(version.policy_version) for version in gone])}. Deleted, or pruned while "
            "checkpoints.keep_last was smaller"
        )
    if rescoring.skipped_impure_segments and found.on_new_version not in ("keep_kv", None):
        yield (
            f"{rescoring.skipped_impure_segments} segments ({rescoring.skipped_impure_tokens:,} tokens) attended to "
            f"another version's cache, which generator.on_new_version={found.on_new_version} never does: they were "
            "not scored again. Sound only if the run was begun with keep_kv"
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
    """Yield the versions whose log-probabilities are not those of their checkpoint."""
    bounds = GAP_BOUNDS[rescoring.dtype]
    for version in rescoring.versions:
        name = f"policy version {version.policy_version}"
        if version.skipped and version.skipped not in (PRUNED, GONE):
            yield f"{name}: {version.skipped}"
        elif version.not_finite:
            yield f"{name}: {version.not_finite} behavior_logprob(s) or their re-scoring are no finite number"
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
            f"float32 rounding: more than {100 * MOST_EXCUSED_SHARE:g}% cannot be that"
        )


def _some(ids: Sequence[str]) -> str:
    rest = len(ids) - _NAMED
    return ", ".join(ids[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")
