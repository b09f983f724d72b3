"""``rollmesh audit``: nothing lost, nothing trained twice, staleness bounded, every log-probability reproducible.

The ledger check and the re-scoring read batch files, committed trainer states and published policies, never Redis.
Only the check for lost groups requires the account of the queue.
"""

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rollmesh.checkpoints.bucket import open_location
from rollmesh.checkpoints.bucket_copies import MOST_BYTES
from rollmesh.checkpoints.checkpoint_store import CheckpointStore, CopyCheck
from rollmesh.checkpoints.sealing import SECRET_FILE, run_secret
from rollmesh.config.section import one_line
from rollmesh.errors import CheckpointError, DataError
from rollmesh.report.audit_result import (
    AUDIT_FILE,
    FEW_EXCUSED,
    GAP_BOUNDS,
    LEAST_MEAN_TOKENS,
    LEAST_SCORED_SHARE,
    MOST_EXCUSED_SHARE,
    MOST_PRUNED_SHARE,
    AuditResult,
    AuditVerdict,
    Rescoring,
)
from rollmesh.report.console import gap, listed, percent, print_sentence
from rollmesh.report.ledger_check import (
    QueueAccount,
    ReplayRule,
    StalenessRule,
    Trained,
    lost_groups,
    read_batches,
    train_steps_of_versions,
)
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.rescore import MISSING, PRUNED, PublishedPolicies, rescore
from rollmesh.report.series import train_series
from rollmesh.report.teacher_columns import TaughtTrajectories, check_columns, column_problems
from rollmesh.types import PolicyRecord

if TYPE_CHECKING:
    from rich.console import Console


SECRET_VARIABLE = "ROLLMESH_CHECKPOINTS__SECRET"
_VERDICT_STYLES = {
    AuditVerdict.GREEN: "bold green",
    AuditVerdict.NOT_GREEN: "bold red",
    AuditVerdict.INCOMPLETE: "bold yellow",
}


def audit_run(run_folder: Path, account: QueueAccount | None = None, progress: "Console | None" = None) -> AuditResult:
    """Audit a run, write ``audit.json`` and return the result.

    ``account`` is the content of the queue (None: lost groups are not checked); ``progress`` is a console for bars.
    Raises DataError when the folder or its checkpoint store is missing, CheckpointError for an unreadable secret.
    """
    folder = RecordedRun(run_folder)
    result = _audit(folder, open_checkpoints(folder), account, progress)
    folder.replace_file(AUDIT_FILE, result.to_json())
    return result


def open_checkpoints(folder: RecordedRun) -> CheckpointStore:
    """Open the checkpoint store of a run. Raises DataError without a store, CheckpointError without its secret."""
    section = folder.checkpoint_section
    if not section.remote and not folder.checkpoints.is_dir():
        raise DataError(f"{folder.checkpoints}: no checkpoint store; has this run started?")
    override = os.environ.get(SECRET_VARIABLE)
    if override:
        return open_location(section, folder.path, one_line(override).encode())
    if (folder.path / SECRET_FILE).exists():
        return open_location(section, folder.path, run_secret(folder.path))
    raise CheckpointError(f"{folder.path}: no secret in the run folder, and {SECRET_VARIABLE} is not set")


def known_train_steps(folder: RecordedRun, store: CheckpointStore, account: QueueAccount | None) -> dict[int, int]:
    """Return the train step of every policy version in the registry, the manifests, the metrics or a batch file."""
    steps: dict[int, int] = {}
    for step in store.batch_steps():
        # ``read_batches`` reports damaged files.
        with contextlib.suppress(CheckpointError):
            steps |= store.batch_footer(step).version_train_steps
    train = train_series(folder.metrics.records)
    logged = zip(train["policy_version"], train["train_step"], strict=True)
    registry = account.policies if account is not None else ()
    return steps | train_steps_of_versions([*registry, *store.complete_policies()], logged)


def print_audit(result: AuditResult, console: "Console") -> None:
    """Print the result as a table, followed by the verdict."""
    from rich.table import Table

    from rollmesh.report.sentences import audit_claims, verdict_line

    if result.rescoring is not None and result.rescoring.versions:
        table = Table(box=None, title="re-scored by policy version", title_justify="left")
        for name in ("policy version", "train step", "segments", "tokens", "largest gap", "mean gap", "note"):
            table.add_column(name, justify="left" if name == "note" else "right")
        for row in result.rescoring.versions:
            step = "" if row.train_step is None else str(row.train_step)
            gaps = (gap(row.largest_gap), gap(row.mean_gap))
            table.add_row(str(row.policy_version), step, f"{row.segments:,}", f"{row.tokens:,}", *gaps, row.skipped)
        console.print(table)
    claims = audit_claims(result)
    if (share := percent(result.off_policy_token_share)) is not None:
        claims.append(f"{share} of the tokens are off-policy, before token masks")
    for mark, style, texts in (("-", "", claims), ("!", "red", result.problems), ("?", "yellow", result.unchecked)):
        for text in texts:
            print_sentence(console, f"{mark} {text}", style)
    print_sentence(console, verdict_line(result), _VERDICT_STYLES[result.verdict])


def _audit(
    folder: RecordedRun, store: CheckpointStore, account: QueueAccount | None, progress: "Console | None"
) -> AuditResult:
    from rich.progress import Progress

    registry = None if account is None else account.policies
    committed, announced, unsound = _newest_steps(store, registry or ())
    train_steps = known_train_steps(folder, store, account)
    config = folder.config
    dtype = "float32" if config is None else config.model.dtype
    rule = StalenessRule(max_staleness=folder.max_staleness, mask_old_segments=folder.mask_old_segments)
    replay_rule = None
    if config is not None and folder.max_staleness is not None:
        replay_rule = ReplayRule(replay=config.trainer.replay, seed=config.seed, max_staleness=folder.max_staleness)
    with Progress(console=progress, transient=True, disable=progress is None or not progress.is_terminal) as bars:
        reading = bars.add_task("reading batch files", total=max(committed, 0))
        advance = partial(bars.advance, reading)
        taught = TaughtTrajectories({} if config is None else config.teachers)
        trained, damaged = read_batches(store, committed, rule, train_steps, advance, replay_rule, taught.add)
        scoring = bars.add_task("re-scoring policy versions", total=len(trained.pure_segments))
        keep_last = None if config is None else config.checkpoints.keep_last
        rescoring = rescore(
            store,
            trained,
            PublishedPolicies(store, registry, train_steps, keep_last),
            dtype=dtype,
            train_steps=train_steps,
            advance=partial(bars.advance, scoring),
        )
        if folder.checkpoint_section.remote:
            bars.add_task("comparing the copies in the bucket", total=None)
        copies = store.check_copies()
    result = AuditResult(
        run=folder.path.resolve().name if config is None else config.name,
        committed_step=committed,
        announced_step=announced,
        unsound_states=unsound,
        batch_files=max(committed, 0) - sum(step <= committed for step in damaged),
        damaged=damaged,
        max_staleness=folder.max_staleness,
        copies_note="" if copies is None else _copies_note(copies),
        rescoring=rescoring,
        teachers=check_columns(taught, config),
    )
    result = _with_queue(_with_counts(result, trained), account, trained)
    failed = tuple(problems(result, folder, {} if copies is None else copies.damaged))
    failed += tuple(_newest_policy_problem(store, registry or ()))
    incomplete = tuple(unchecked(rescoring, None if config is None else config.generator.on_new_version))
    return replace(result, problems=failed, unchecked=incomplete, green=not (failed or incomplete))


def _newest_steps(store: CheckpointStore, registry: Sequence[PolicyRecord]) -> tuple[int, int, dict[str, str]]:
    """Return the newest committed and the newest announced train step (-1 without one), and the damaged states."""
    # Read before the states: during a run, a later read could find a policy newer than the states already read.
    announced = [record.train_step for record in (*registry, *store.complete_policies(announced_only=True))]
    announced += [policy.train_step for policy in store.unsound_policies() if policy.announced]
    judged = store.judged_states()
    unsound = dict(judged.unsound)
    if judged.sound:
        newest = judged.sound[0]
        try:
            store.verify_state(newest)
        except CheckpointError as error:
            # A run in progress may have pruned it meanwhile.
            if any(state.folder == newest.folder for state in store.committed_states()):
                unsound[newest.folder.name] = str(error)
    committed = judged.sound[0].train_step if judged.sound else -1
    return committed, max(announced, default=-1), unsound


def _newest_policy_problem(store: CheckpointStore, registry: Sequence[PolicyRecord]) -> Iterator[str]:
    """Yield what is wrong with the newest policy, of which no batch file need have a token."""
    try:
        found = store.newest_policy()
        known = [*registry, *([] if found is None else [found])]
        if known:
            store.open(max(known, key=lambda record: record.policy_version))
    except CheckpointError as error:
        yield str(error)


def _with_counts(result: AuditResult, trained: Trained) -> AuditResult:
    """Add the counts over the batch files."""
    counted = trained.staleness.total()
    return replace(
        result,
        groups=trained.groups,
        trajectories=trained.trajectories,
        trained_tokens=trained.loss_tokens,
        policy_versions=tuple(sorted(trained.versions)),
        trained_twice=trained.trained_twice(),
        trajectories_twice={t: tuple(groups) for t, groups in trained.trajectories_twice.items()},
        replayed_groups=trained.replays.groups,
        replay_staleness=dict(sorted(trained.replays.staleness.items())),
        replay_problems=tuple(trained.replays.problems),
        off_policy_token_share=trained.off_policy_tokens / trained.loss_tokens if trained.loss_tokens else None,
        largest_staleness=max(trained.staleness, default=None),
        mean_staleness=sum(s * n for s, n in trained.staleness.items()) / counted if counted else None,
        staleness_counts=dict(sorted(trained.staleness.items())),
        staleness_violations=tuple(trained.violations),
        staleness_unknown=trained.unknown,
    )


def _with_queue(result: AuditResult, account: QueueAccount | None, trained: Trained) -> AuditResult:
    """Add the comparison with the queue."""
    if account is None:
        return replace(result, lost_note="queue unreachable")
    cursor, seen, steps = account.cursor, trained.cursor, trained.steps_of_group
    forgotten = (cursor.epoch, cursor.index) < (seen.epoch, seen.index)
    note = f"prompt cursor at epoch {cursor.epoch}, index {cursor.index}; {len(account.live)} groups live"
    if account.forgotten_drops:
        note += f"; the ledger no longer lists {account.forgotten_drops} groups that were dropped long ago"
    if forgotten:
        note += (
            f"; a batch file records epoch {seen.epoch}, index {seen.index}: Redis was restored to an earlier state, "
            "and the prompts in between had not been admitted again"
        )
    dropped = Counter(reason for group_id, reason in account.dropped.items() if group_id not in steps)
    return replace(
        result,
        lost=lost_groups(account, steps),
        lost_note=note,
        forgotten=forgotten,
        dropped=dict(sorted(dropped.items())),
        dropped_and_trained=tuple(sorted(account.dropped.keys() & steps.keys())),
    )


def _copies_note(copies: CopyCheck) -> str:
    note = f"{copies.compared} of its copies ({copies.compared_bytes:,} bytes) compared with their digests"
    if copies.skipped:
        note += f", {len(copies.skipped)} not read, because one audit reads at most {MOST_BYTES:,} bytes of a bucket"
    return note


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
    yield from column_problems(result.teachers)


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
