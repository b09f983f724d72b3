"""``rollmesh audit``: nothing lost, nothing trained twice, staleness bounded, every log-probability reproducible.

Ledger and re-scoring read batch files, committed trainer states and published policies, never Redis. The queue's own
account is needed for one question only: whether an admitted group has vanished.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollmesh.checkpoints.sealing import SECRET_FILE
from rollmesh.checkpoints.store import CheckpointStore
from rollmesh.config.services import CheckpointConfig
from rollmesh.errors import CheckpointError, DataError
from rollmesh.mesh import Cursor
from rollmesh.report.ledger import (
    QueueAccount,
    StalenessRule,
    Trained,
    lost_groups,
    read_batches,
    train_steps_of_versions,
)
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.rescore import PRUNED, ExactScorer, Scorer, rescore
from rollmesh.report.series import train_series
from rollmesh.report.verdict import AUDIT_FILE, DECIDING_DTYPES, AuditResult, Rescoring
from rollmesh.runtime.imports import many_imports

if TYPE_CHECKING:
    from rich.console import Console

SECRET_VARIABLE = "ROLLMESH_CHECKPOINTS__SECRET"
_NAMED = 5
"""Ids that a problem spells out; the rest is counted."""


def audit_run(run_folder: Path, account: QueueAccount | None = None, progress: Console | None = None) -> AuditResult:
    """Audit a run, write ``audit.json`` and return the result.

    ``account`` is what the queue knows (None: lost groups are not checked); ``progress`` shows how far the audit is.
    Raises DataError when the folder or its checkpoint store is not there, CheckpointError for an unreadable secret.
    """
    folder = RecordedRun(run_folder)
    result = _audit(folder, open_checkpoints(folder), account, progress)
    temporary = folder.path / f".{AUDIT_FILE}.{os.getpid()}.tmp"
    temporary.write_text(result.to_json(), encoding="utf-8")
    os.replace(temporary, folder.path / AUDIT_FILE)
    return result


def open_checkpoints(folder: RecordedRun) -> CheckpointStore:
    """The run's checkpoint store; DataError when there is none, CheckpointError without the secret that sealed it."""
    section = CheckpointConfig() if folder.config is None else folder.config.checkpoints
    if not section.remote and not folder.checkpoints.is_dir():
        raise DataError(f"{folder.checkpoints}: no checkpoint store; has this run begun?")
    given = os.environ.get(SECRET_VARIABLE)
    if given:
        return CheckpointStore.open_location(section, folder.path, given.encode())
    file = folder.path / SECRET_FILE
    if file.exists():
        secret = file.read_text(encoding="ascii").strip().encode()
        return CheckpointStore.open_location(section, folder.path, secret)
    raise CheckpointError(f"{folder.path}: no secret in the run folder, and {SECRET_VARIABLE} is not set")


def known_train_steps(folder: RecordedRun, store: CheckpointStore, account: QueueAccount | None) -> dict[int, int]:
    """Train step of every policy version that the registry, the manifests, the metrics or a batch file names."""
    train = train_series(folder.metrics.records)
    logged = zip(train.policy_version, train.train_step, strict=True)
    registry = account.policies if account is not None else ()
    return _named_by_batch_files(store) | train_steps_of_versions([*registry, *store.complete_policies()], logged)


def _named_by_batch_files(store: CheckpointStore) -> dict[int, int]:
    named: dict[int, int] = {}
    for step in store.batch_steps():
        # A damaged file is reported where it is read as a whole.
        with contextlib.suppress(CheckpointError):
            named |= store.batch_footer(step).version_train_steps
    return named


def print_audit(result: AuditResult, console: Console) -> None:
    """The result as a table and a verdict."""
    from rich.table import Table
    from rich.text import Text

    from rollmesh.report.words import audit_claims, gap

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
    for line in lines:
        console.print(line, soft_wrap=not console.is_terminal)
    verdict = Text("audit green", style="bold green") if result.green else Text("audit NOT green", style="bold red")
    console.print(verdict)


def _audit(
    folder: RecordedRun, store: CheckpointStore, account: QueueAccount | None, progress: Console | None
) -> AuditResult:
    newest = store.latest_committed()
    committed = newest.train_step if newest is not None else -1
    train_steps = known_train_steps(folder, store, account)
    rule = _staleness_rule(folder)
    with _progress(progress) as stage:
        read = stage("reading batch files", max(committed, 0))
        trained, damaged = read_batches(store, committed, rule, train_steps, read)
        rescoring = rescore(
            store,
            trained,
            dtype=_dtype(folder),
            train_steps=train_steps,
            load=_load_scorer,
            load_exact=_load_exact_scorer if _dtype(folder) in DECIDING_DTYPES else None,
            advance=stage("re-scoring policy versions", len(trained.pure_segments)),
        )
    findings = _Findings(
        committed=committed,
        trained=trained,
        damaged=damaged,
        rule=rule,
        lost=None if account is None else lost_groups(account, trained.steps_of_group),
        rescoring=rescoring,
        config_problem=folder.config_problem,
    )
    return _result(folder, findings, account)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Findings:
    committed: int
    trained: Trained
    damaged: Mapping[int, str]
    rule: StalenessRule
    lost: tuple[str, ...] | None
    rescoring: Rescoring
    config_problem: str | None


def _result(folder: RecordedRun, found: _Findings, account: QueueAccount | None) -> AuditResult:
    trained = found.trained
    problems = tuple(_problems(found))
    counted = trained.staleness.total()
    dropped = {} if account is None else account.dropped
    return AuditResult(
        run=folder.config.name if folder.config is not None else folder.path.resolve().name,
        committed_step=found.committed,
        batch_files=max(found.committed, 0) - sum(step <= found.committed for step in found.damaged),
        damaged=dict(found.damaged),
        groups=trained.groups,
        trajectories=trained.trajectories,
        trained_tokens=trained.loss_tokens,
        policy_versions=tuple(sorted(trained.versions)),
        trained_twice=trained.trained_twice(),
        off_policy_token_share=trained.off_policy_tokens / trained.loss_tokens if trained.loss_tokens else None,
        max_staleness=found.rule.max_staleness,
        largest_staleness=max(trained.staleness, default=None),
        mean_staleness=sum(s * n for s, n in trained.staleness.items()) / counted if counted else None,
        staleness_counts=dict(sorted(trained.staleness.items())),
        staleness_violations=tuple(trained.violations),
        staleness_unknown=trained.unknown,
        lost=found.lost,
        lost_note=_lost_note(account, trained.cursor),
        forgotten=_forgotten(account, trained.cursor),
        dropped=dict(sorted(Counter(why for g, why in dropped.items() if g not in trained.steps_of_group).items())),
        dropped_and_trained=tuple(sorted(dropped.keys() & trained.steps_of_group.keys())),
        rescoring=found.rescoring,
        problems=problems,
        green=not problems,
    )


def _problems(found: _Findings) -> Iterator[str]:
    """Everything that does not hold, in plain words."""
    trained = found.trained
    if found.committed < 1 or not trained.groups:
        yield "nothing has been trained and committed, so there is nothing to vouch for"
    for step, reason in found.damaged.items():
        yield f"train step {step} has no sound batch file: {reason}"
    twice = trained.trained_twice()
    if twice:
        named = ", ".join(f"{g} at steps {' and '.join(map(str, s))}" for g, s in list(twice.items())[:_NAMED])
        yield f"{len(twice)} group(s) were trained more than once: {named}"
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
    yield from _rescoring_problems(found.rescoring)


def _rescoring_problems(rescoring: Rescoring) -> Iterator[str]:
    if rescoring.skipped_segments and not rescoring.segments:
        yield (
            f"none of {rescoring.skipped_segments} segments could be scored again, so no log-probability is vouched "
            "for: their checkpoints are gone (checkpoints.keep_last) or refused"
        )
    for version in rescoring.versions:
        if version.skipped and version.skipped != PRUNED:
            yield f"policy version {version.policy_version}: {version.skipped}"
        elif rescoring.dtype in DECIDING_DTYPES and version.over_bound:
            yield (
                f"policy version {version.policy_version}: {version.over_bound} behavior_logprob(s) are up to "
                f"{version.largest_gap:.3g} nats from its checkpoint (bound {rescoring.bound:g})"
            )


def _lost_note(account: QueueAccount | None, seen: Cursor) -> str:
    if account is None:
        return "queue not reachable"
    cursor = account.cursor
    note = f"prompt cursor at epoch {cursor.epoch}, index {cursor.index}; {len(account.live)} groups live"
    if account.forgotten_drops:
        note += f"; the ledger no longer names {account.forgotten_drops} groups that were dropped long ago"
    if _forgotten(account, seen):
        note += (
            f"; a batch file knows of epoch {seen.epoch}, index {seen.index}: Redis came back as an earlier state, and "
            "the prompts in between had not been admitted again"
        )
    return note


def _forgotten(account: QueueAccount | None, seen: Cursor) -> bool:
    cursor = None if account is None else account.cursor
    return cursor is not None and (cursor.epoch, cursor.index) < (seen.epoch, seen.index)


def _some(ids: tuple[str, ...] | list[str]) -> str:
    rest = len(ids) - _NAMED
    return ", ".join(ids[:_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def _staleness_rule(folder: RecordedRun) -> StalenessRule:
    masked = folder.config is not None and folder.config.schedule.on_stale == "mask_old_segments"
    return StalenessRule(max_staleness=folder.max_staleness, mask_old_segments=masked)


def _dtype(folder: RecordedRun) -> str:
    return folder.config.model.dtype if folder.config is not None else "float32"


def _load_scorer(policy: Path) -> Scorer:
    with many_imports():
        from rollmesh.trainer.scorer import PolicyScorer

    return PolicyScorer.from_folder(policy)


def _load_exact_scorer(policy: Path) -> ExactScorer:
    import torch

    from rollmesh.trainer.scorer import PolicyScorer

    return PolicyScorer.from_folder(policy, dtype=torch.float64)


@contextmanager
def _progress(console: Console | None) -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """Yields ``stage(name, total) -> advance``; draws bars on a terminal."""
    if console is None or not console.is_terminal:
        yield lambda name, total: lambda: None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bars:

        def stage(name: str, total: int) -> Callable[[], None]:
            task = bars.add_task(name, total=total)
            return lambda: bars.advance(task)

        yield stage
