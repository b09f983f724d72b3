"""Result of a run that has no launcher any more: finished, failed or stopped, with reward, evaluation and audit."""

from __future__ import annotations

import time

from rollmesh.report.formats import duration
from rollmesh.report.recorded_run import REPORT_FILE, RecordedRun
from rollmesh.report.sentences import facts, verdict_line
from rollmesh.report.summary import RunSummary, summarise


def ending(run: RecordedRun, summary: RunSummary | None = None, now: float | None = None) -> list[tuple[str, str]]:
    """Return (name, value) pairs about a run without a launcher; ``now`` is in Unix seconds."""
    summary = summary or summarise(run)
    rows = [("state", _state(run, summary, time.time() if now is None else now))]
    if run.metrics.records and isinstance(reward := run.metrics.records[-1].get("reward_mean"), int | float):
        rows.append(("reward of the last step", f"{reward:.3f}"))
    evaluations = (f"{summary.score_name} before", f"{summary.score_name} after", "training time")
    rows += [(name, value) for name, value in facts(summary) if name in evaluations]
    audit = summary.audit
    rows.append(("audit", "not run" if audit is None else verdict_line(audit, summary.audited_part)))
    if (run.path / REPORT_FILE).exists():
        rows.append(("report", f"{run.path / REPORT_FILE}"))
    return rows


def _state(run: RecordedRun, summary: RunSummary, now: float) -> str:
    planned = "" if summary.planned_steps is None else f" of {summary.planned_steps}"
    times = [t for record in run.metrics.records[-1:] if isinstance(t := record.get("time"), int | float)]
    when = ""
    if times:
        local = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(times[0]))
        when = f" at {local} ({duration(max(0.0, now - times[0]))} ago)"
    if run.failure:
        return f"failed after train step {summary.train_steps}{planned}{when}"
    if summary.finished:
        return f"finished: train step {summary.train_steps}{planned}{when}"
    if not summary.train_steps:
        return "stopped before the first train step; the command that started it continues it"
    return f"stopped after train step {summary.train_steps}{planned}{when}; the command that started it continues it"
