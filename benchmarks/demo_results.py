"""Runs of one task under several settings: the figures of each run, and the tables of schedules and of methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from rollmesh.report.formats import count, percent
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.sentences import lengths_of_waste
from rollmesh.report.series import newest_per_step
from rollmesh.report.summary import summarise
from rollmesh.step_metrics import number


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """Figures of one run; None for unknown values."""

    name: str
    """Preset, or point and method."""
    planned_updates: int
    updates: int
    """Train steps of the run."""
    versions: int | None
    """Published policy versions, with the initial one."""
    trained_groups: int | None
    """Groups in the batch files, from the audit."""
    dropped_groups: int
    restarted_groups: int
    groups_set_aside: int
    surplus_tokens: int
    """Saved tokens of members that were cut off because enough others were scored."""
    largest_staleness: int | None
    """In train steps."""
    off_policy_share: float | None
    """Share of the trained tokens sampled from an older policy, 0..1."""
    outcome_mean: float | None
    """Mean outcome of the last batch, before shaping."""
    updates_per_second: float | None
    """Rate between the ends of the first and the last train step; None with fewer than two."""
    audit: str
    """Verdict of the audit; ``none`` without one, ``refused`` if the run was not started."""
    effect: str = ""
    """Traces of the method in the run; empty for a schedule."""
    waste: tuple[str, ...] = ()
    """Sentences on dropped and repeated groups and on surplus members, by length decile."""

    @property
    def passed(self) -> bool:
        """True after all planned updates and a green audit."""
        return self.audit == "green" and self.updates >= self.planned_updates


def demo_result(folder: Path, name: str, updates: int) -> DemoResult:
    """Read the figures of a run that was to make ``updates`` train steps. Raises DataError for a missing folder."""
    run = RecordedRun(folder)
    summary = summarise(run)
    records = newest_per_step(run.metrics.records)
    return DemoResult(
        name=name,
        planned_updates=updates,
        updates=summary.train_steps,
        versions=summary.policy_versions,
        trained_groups=None if summary.audit is None else summary.audit.groups,
        dropped_groups=sum(summary.dropped.values()),
        restarted_groups=summary.begun_again.get("restarted", 0),
        groups_set_aside=summary.begun_again.get("set aside", 0),
        surplus_tokens=summary.surplus_tokens,
        largest_staleness=summary.largest_staleness,
        off_policy_share=summary.off_policy_share,
        outcome_mean=number(records[-1], "batch.outcome_mean") if records else None,
        updates_per_second=_rate([float(record["time"]) for record in records]),
        audit=summary.audit_verdict or "none",
        waste=tuple(lengths_of_waste(summary)),
    )


def _rate(times: Sequence[float]) -> float | None:
    """Return events per second between the first and the last time."""
    seconds = times[-1] - times[0] if times else 0.0
    return (len(times) - 1) / seconds if seconds > 0 else None


def preset_table(results: Sequence[DemoResult]) -> Table:
    """Return a table of schedules with one row per run."""
    headings = ("versions", "groups", "dropped", "restarted", "set aside", "surplus tokens", "staleness", "off-policy")
    rows = [
        (
            _shown(r.versions),
            _shown(r.trained_groups),
            _shown(r.dropped_groups),
            _shown(r.restarted_groups),
            _shown(r.groups_set_aside),
            count(r.surplus_tokens) or "",
            _shown(r.largest_staleness),
            percent(r.off_policy_share) or "",
        )
        for r in results
    ]
    return _table("schedules in the real mesh", "preset", headings, results, rows)


def methods_table(results: Sequence[DemoResult]) -> Table:
    """Return a table of methods with one row per run."""
    headings = ("groups", "dropped", "outcome", "staleness", "effect")
    rows = [
        (
            _shown(r.trained_groups),
            _shown(r.dropped_groups),
            _shown(r.outcome_mean, ".3f"),
            _shown(r.largest_staleness),
            r.effect,
        )
        for r in results
    ]
    return _table("methods in the real mesh", "method", headings, results, rows)


def _table(
    title: str, subject: str, headings: Sequence[str], results: Sequence[DemoResult], rows: Sequence[Sequence[str]]
) -> Table:
    """Return a table of runs: name, updates, the columns of ``headings``, rate and audit."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    table.add_column(subject, no_wrap=True)
    for heading in ("updates", *headings, "updates/s"):
        table.add_column(heading, justify="right")
    table.add_column("audit")
    for r, cells in zip(results, rows, strict=True):
        updates, rate = f"{r.updates} of {r.planned_updates}", _shown(r.updates_per_second, ".3f")
        table.add_row(r.name, updates, *cells, rate, r.audit, style="" if r.passed else "red")
    return table


def _shown(value: float | None, spec: str = "") -> str:
    return "" if value is None else format(value, spec)
