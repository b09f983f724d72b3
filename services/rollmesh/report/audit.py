"""``rollmesh audit``: nothing lost, nothing trained twice, staleness bounded, every log-probability reproducible.

The ledger check and the re-scoring read batch files, committed trainer states and published policies, never Redis.
Only the check for lost groups requires the account of the queue.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.location import open_location
from rollmesh.checkpoints.sealing import SECRET_FILE
from rollmesh.config.services import CheckpointConfig
from rollmesh.errors import CheckpointError, DataError
from rollmesh.mesh import Cursor
from rollmesh.report.audit_result import AUDIT_FILE, AuditResult, AuditVerdict
from rollmesh.report.findings import CommittedSteps, Findings, problems, unchecked
from rollmesh.report.ledger_counts import (
    QueueAccount,
    StalenessRule,
    lost_groups,
    read_batches,
    train_steps_of_versions,
)
from rollmesh.report.published import PublishedPolicies
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.rescore import ExactScorer, SegmentScorer, rescore
from rollmesh.report.series import train_series
from rollmesh.runtime.imports import many_imports
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
    temporary = folder.path / f".{AUDIT_FILE}.{os.getpid()}.tmp"
    temporary.write_text(result.to_json(), encoding="utf-8")
    os.replace(temporary, folder.path / AUDIT_FILE)
    return result


def open_checkpoints(folder: RecordedRun) -> CheckpointStore:
    """Open the checkpoint store of a run. Raises DataError without a store, CheckpointError without its secret."""
    section = CheckpointConfig() if folder.config is None else folder.config.checkpoints
    if not section.remote and not folder.checkpoints.is_dir():
        raise DataError(f"{folder.checkpoints}: no checkpoint store; has this run started?")
    override = os.environ.get(SECRET_VARIABLE)
    if override:
        return open_location(section, folder.path, override.encode())
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

    from rollmesh.report.sentences import audit_claims, gap, verdict_line

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
        lines.append(Text(f"- {100 * result.off_policy_token_share:.1f}% of the tokens in the loss are off-policy"))
    lines.extend(Text(f"! {problem}", style="red") for problem in result.problems)
    lines.extend(Text(f"? {reason}", style="yellow") for reason in result.unchecked)
    for line in lines:
        console.print(line, soft_wrap=not console.is_terminal)
    console.print(Text(verdict_line(result), style=_VERDICT_STYLES[result.verdict]), soft_wrap=not console.is_terminal)


def _audit(
    folder: RecordedRun, store: CheckpointStore, account: QueueAccount | None, progress: Console | None
) -> AuditResult:
    registry = None if account is None else account.policies
    steps = _committed_steps(folder, store, registry or ())
    train_steps = known_train_steps(folder, store, account)
    rule = _staleness_rule(folder)
    keep_last = None if folder.config is None else folder.config.checkpoints.keep_last
    with _progress(progress) as stage:
        read = stage("reading batch files", max(steps.committed, 0))
        trained, damaged = read_batches(store, steps.committed, rule, train_steps, read)
        rescoring = rescore(
            store,
            trained,
            PublishedPolicies(store, registry, train_steps, keep_last),
            dtype=_dtype(folder),
            train_steps=train_steps,
            load=_load_scorer,
            load_exact=_load_exact_scorer if _dtype(folder) == "float32" else None,
            advance=stage("re-scoring policy versions", len(trained.pure_segments)),
        )
    findings = Findings(
        steps=steps,
        trained=trained,
        damaged=damaged,
        rule=rule,
        lost=None if account is None else lost_groups(account, trained.steps_of_group),
        rescoring=rescoring,
        config_problem=folder.config_problem,
        on_new_version=None if folder.config is None else folder.config.generator.on_new_version,
        failure=folder.failure,
    )
    return _result(folder, findings, account)


def _committed_steps(folder: RecordedRun, store: CheckpointStore, registry: Sequence[PolicyRecord]) -> CommittedSteps:
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
    config = folder.config
    return CommittedSteps(
        committed=judged.sound[0].train_step if judged.sound else -1,
        announced=max(announced, default=-1),
        state_every_steps=1 if config is None else config.checkpoints.state_every_steps,
        train_steps=None if config is None else config.trainer.train_steps,
        unsound=unsound,
    )


def _result(folder: RecordedRun, findings: Findings, account: QueueAccount | None) -> AuditResult:
    trained = findings.trained
    failed, incomplete = tuple(problems(findings)), tuple(unchecked(findings))
    committed = findings.steps.committed
    counted = trained.staleness.total()
    dropped = {} if account is None else account.dropped
    return AuditResult(
        run=folder.config.name if folder.config is not None else folder.path.resolve().name,
        committed_step=committed,
        announced_step=findings.steps.announced,
        unsound_states=dict(findings.steps.unsound),
        batch_files=max(committed, 0) - sum(step <= committed for step in findings.damaged),
        damaged=dict(findings.damaged),
        groups=trained.groups,
        trajectories=trained.trajectories,
        trained_tokens=trained.loss_tokens,
        policy_versions=tuple(sorted(trained.versions)),
        trained_twice=trained.trained_twice(),
        trajectories_twice={t: tuple(groups) for t, groups in trained.trajectories_twice.items()},
        off_policy_token_share=trained.off_policy_tokens / trained.loss_tokens if trained.loss_tokens else None,
        max_staleness=findings.rule.max_staleness,
        largest_staleness=max(trained.staleness, default=None),
        mean_staleness=sum(s * n for s, n in trained.staleness.items()) / counted if counted else None,
        staleness_counts=dict(sorted(trained.staleness.items())),
        staleness_violations=tuple(trained.violations),
        staleness_unknown=trained.unknown,
        lost=findings.lost,
        lost_note=_lost_note(account, trained.cursor),
        forgotten=_forgotten(account, trained.cursor),
        dropped=dict(sorted(Counter(why for g, why in dropped.items() if g not in trained.steps_of_group).items())),
        dropped_and_trained=tuple(sorted(dropped.keys() & trained.steps_of_group.keys())),
        rescoring=findings.rescoring,
        problems=failed,
        unchecked=incomplete,
        green=not (failed or incomplete),
    )


def _lost_note(account: QueueAccount | None, seen: Cursor) -> str:
    if account is None:
        return "queue unreachable"
    cursor = account.cursor
    note = f"prompt cursor at epoch {cursor.epoch}, index {cursor.index}; {len(account.live)} groups live"
    if account.forgotten_drops:
        note += f"; the ledger no longer lists {account.forgotten_drops} groups that were dropped long ago"
    if _forgotten(account, seen):
        note += (
            f"; a batch file records epoch {seen.epoch}, index {seen.index}: Redis was restored to an earlier state, "
            "and the prompts in between had not been admitted again"
        )
    return note


def _forgotten(account: QueueAccount | None, seen: Cursor) -> bool:
    cursor = None if account is None else account.cursor
    return cursor is not None and (cursor.epoch, cursor.index) < (seen.epoch, seen.index)


def _staleness_rule(folder: RecordedRun) -> StalenessRule:
    masked = folder.config is not None and folder.config.schedule.on_stale == "mask_old_segments"
    return StalenessRule(max_staleness=folder.max_staleness, mask_old_segments=masked)


def _dtype(folder: RecordedRun) -> str:
    return folder.config.model.dtype if folder.config is not None else "float32"


def _load_scorer(policy: Path) -> SegmentScorer:
    with many_imports():
        from rollmesh.trainer.learner.policy_scorer import PolicyScorer

    return PolicyScorer.from_folder(policy)


def _load_exact_scorer(policy: Path) -> ExactScorer:
    import torch

    from rollmesh.trainer.learner.policy_scorer import PolicyScorer

    return PolicyScorer.from_folder(policy, dtype=torch.float64)


@contextmanager
def _progress(console: Console | None) -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """Yield ``stage(name, total) -> advance``; draw bars on a terminal."""
    if console is None or not console.is_terminal:
        yield lambda name, total: lambda: None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bars:

        def stage(name: str, total: int) -> Callable[[], None]:
            task = bars.add_task(name, total=total)
            return lambda: bars.advance(task)

        yield stage
