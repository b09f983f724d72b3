"""Problems and gaps of an audit, derived from its counts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rollmesh.report.audit_result import (
    FEW_EXCUSED,
    GAP_BOUNDS,
    LEAST_MEAN_TOKENS,
    LEAST_SCORED_SHARE,
    MOST_EXCUSED_SHARE,
    MOST_PRUNED_SHARE,
    AuditResult,
    Rescoring,
)
from rollmesh.report.formats import listed
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.rescore import MISSING, PRUNED


def problems(result: AuditResult, run: RecordedRun, damaged_copies: Mapping[str, str]) -> Iterator[str]:
    """Yield a description of every failed check.

    ``damaged_copies`` are the damaged copies in the bucket by name, with the reason.
    """
    if run.failure:
        yield f"the run failed: {run.failure}"
    if result.committed_step < 1 or not result.groups:
        yield "no batch has been trained and committed, so there is no data to audit"
    yield from _state_problems(result, run)
    for step, reason in result.damaged.items():
        yield f"train step {step} has no valid batch file: {reason}"
    for name, reason in damaged_copies.items():
        yield f"the bucket's copy of {name} is damaged: {reason}; another node cannot read it"
    if twice := result.trained_twice:
        places = listed([f"{g} at steps {' and '.join(map(str, steps))}" for g, steps in twice.items()])
        yield f"{len(twice)} group(s) were trained more than once: {places}"
    if twice_in := result.trajectories_twice:
        places = listed([f"{t} in {' and '.join(groups)}" for t, groups in twice_in.items()])
        yield f"{len(twice_in)} trajectories are in more than one place: {places}"
    yield from result.replay_problems
    if result.max_staleness is None:
        yield f"the staleness bound is not known, so staleness was not checked: {run.config_problem}"
    if late := result.staleness_violations:
        yield f"{len(late)} trajectories exceed the staleness bound of {result.max_staleness}: {listed(late)}"
    if result.staleness_unknown:
        yield f"{result.staleness_unknown} trajectories contain tokens of a policy version whose train step is unknown"
    if result.lost:
        yield f"{len(result.lost)} admitted group(s) are lost: {listed(result.lost)}"
    if result.rescoring is not None:
        yield from rescoring_problems(result.rescoring)


def unchecked(rescoring: Rescoring, on_new_version: str | None) -> Iterator[str]:
    """Yield the reasons why too little was checked for a green verdict.

    ``on_new_version`` is ``generator.on_new_version``, or None without a run file.
    """
    expected = rescoring.policy_tokens - rescoring.pruned_tokens
    if rescoring.is_pruned:
        yield (
            f"{rescoring.pruned_tokens:,} of {rescoring.policy_tokens:,} policy tokens name versions that "
            f"checkpoints.keep_last has pruned, more than {100 * MOST_PRUNED_SHARE:g}%, so nothing shows which policy "
            "sampled them; raise checkpoints.keep_last for the next run"
        )
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
            f"checkpoints.keep_last retains them: {listed([str(version.policy_version) for version in missing])}. "
            "They were deleted, or pruned while checkpoints.keep_last was smaller"
        )
    if rescoring.skipped_impure_segments and on_new_version not in ("keep_kv", None):
        yield (
            f"{rescoring.skipped_impure_segments} segments ({rescoring.skipped_impure_tokens:,} tokens) attended to "
            f"another version's cache, which generator.on_new_version={on_new_version} never does: they were "
            "not scored again. This is valid only if the run was started with keep_kv"
        )


def _state_problems(result: AuditResult, run: RecordedRun) -> Iterator[str]:
    for name, reason in result.unsound_states.items():
        yield f"trainer state {name} is damaged: {reason}"
    # A trainer commits before it announces, and always at its last step.
    expected, config = result.announced_step, run.config
    if config is not None and expected < config.trainer.train_steps:
        expected -= expected % config.checkpoints.state_every_steps
    if result.committed_step < expected and expected > 0:
        yield (
            f"train step {result.committed_step} is the newest that is committed, but a policy of train step "
            f"{result.announced_step} was announced: a trainer state is missing or damaged"
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
        elif version.tokens >= LEAST_MEAN_TOKENS and (version.mean_gap or 0.0) > version.mean_bound:
            yield f"{name}: mean gap of {version.mean_gap:.3g} nats to its checkpoint (bound {version.mean_bound:.2g})"
        elif version.unresolvable > max(FEW_EXCUSED, MOST_EXCUSED_SHARE * version.tokens):
            yield f"{name}: {_too_many_excused(version.unresolvable, version.tokens, bounds.token)}"
    if rescoring.unresolvable > MOST_EXCUSED_SHARE * rescoring.tokens:
        yield _too_many_excused(rescoring.unresolvable, rescoring.tokens, bounds.token)


def _too_many_excused(excused: int, tokens: int, bound: float) -> str:
    return (
        f"{excused} of {tokens:,} tokens are over the bound of {bound:g} nats by float32 rounding: rounding does not "
        f"explain more than {100 * MOST_EXCUSED_SHARE:g}%"
    )
