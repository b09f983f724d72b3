"""``rollmesh audit``: nothing lost, nothing trained twice, staleness bounded, every log-probability reproducible.

The ledger check and the re-scoring read batch files, committed trainer states and published policies, never Redis.
Only the check for lost groups requires the account of the queue.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.copy_check import MOST_BYTES, CopyCheck
from rollmesh.checkpoints.location import open_location
from rollmesh.checkpoints.sealing import SECRET_FILE
from rollmesh.config.section import one_line
from rollmesh.errors import CheckpointError, DataError
from rollmesh.report.audit_result import AUDIT_FILE, AuditResult, AuditVerdict
from rollmesh.report.findings import problems, unchecked
from rollmesh.report.ledger_counts import (
    QueueAccount,
    StalenessRule,
    Trained,
    lost_groups,
    read_batches,
    train_steps_of_versions,
)
from rollmesh.report.published import PublishedPolicies
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.replay_check import ReplayRule
from rollmesh.report.rescore import rescore
from rollmesh.report.series import train_series
from rollmesh.types import PolicyRecord

if TYPE_CHECKING:
    from rich.console import Console

SECRET_VARIABLE = "ROLLMESH_CHECKPOINTS__SECRET"
_VERDICT_STYLES = {
    AuditVerdict.GREEN: "bold green",
    AuditVerdict.NOT_GREEN: "bold red",
    AuditVerdict.INCOMPLETE: "bold yellow",
}


def audit_run(run_folder: Path, account: QueueAccount | None = None, progress: Console | None = None) -> AuditResult:
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
    file = folder.path / SECRET_FILE
    if file.exists():
        secret = file.read_text(encoding="ascii").strip().encode()
        return open_location(section, folder.path, secret)
    raise CheckpointError(f"{folder.path}: no secret in the run folder, and {SECRET_VARIABLE} is not set")


def known_train_steps(folder: RecordedRun, store: CheckpointStore, account: QueueAccount | None) -> dict[int, int]:
    """Return the train step of every policy version in the registry, the manifests, the metrics or a batch file."""
    train = train_series(folder.metrics.records)
    logged = zip(train["policy_version"], train["train_step"], strict=True)
    registry = account.policies if account is not None else ()
    return _batch_file_steps(store) | train_steps_of_versions([*registry, *store.complete_policies()], logged)


def _batch_file_steps(store: CheckpointStore) -> dict[int, int]:
    steps: dict[int, int] = {}
    for step in store.batch_steps():
        # ``read_batches`` reports damaged files.
        with contextlib.suppress(CheckpointError):
            steps |= store.batch_footer(step).version_train_steps
    return steps


def print_audit(result: AuditResult, console: Console) -> None:
    """Print the result as a table, followed by the verdict."""
    from rich.table import Table
    from rich.text import Text

    from rollmesh.report.formats import gap
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
    lines = [Text(f"- {claim}") for claim in audit_claims(result)]
    if result.off_policy_token_share is not None:
        share = 100 * result.off_policy_token_share
        lines.append(Text(f"- {share:.1f}% of the tokens are off-policy, before token masks"))
    lines.extend(Text(f"! {problem}", style="red") for problem in result.problems)
    lines.extend(Text(f"? {reason}", style="yellow") for reason in result.unchecked)
    for line in lines:
        console.print(line, soft_wrap=not console.is_terminal)
    console.print(Text(verdict_line(result), style=_VERDICT_STYLES[result.verdict]), soft_wrap=not console.is_terminal)


def _audit(
    folder: RecordedRun, store: CheckpointStore, account: QueueAccount | None, progress: Console | None
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
        trained, damaged = read_batches(store, committed, rule, train_steps, advance, replay_rule)
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
    )
    result = _with_queue(_with_counts(result, trained), account, trained)
    failed = tuple(problems(result, folder, {} if copies is None else copies.damaged))
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
