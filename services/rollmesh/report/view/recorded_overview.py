"""Overview and result of a run that has ended: facts, sentences, tables, completions, history of the mesh."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rollmesh.gateway.mesh_snapshot import MOST_EVALUATIONS, drop_views, waste_views
from rollmesh.gateway.models.live import Overview, Staleness, StalenessBin, Timeline
from rollmesh.gateway.models.overview import Remark, ResultLine, ResultTable, RunResultView, SampleView
from rollmesh.report.console import count, gap, percent, plus_minus
from rollmesh.report.recorded_run import Record, RecordedRun
from rollmesh.report.sentences import audit_claims, ending, facts, moment, sentences
from rollmesh.report.series import newest_per_step, number, train_series
from rollmesh.report.summary import RunSummary, summarise
from rollmesh.report.versions import version_bytes
from rollmesh.report.view.recorded_curves import (
    RecordedCurves,
    mesh_history,
    record_times,
    recorded_evaluations,
    recorded_policies,
)


def recorded_overview(run: RecordedRun, recorded: RecordedCurves, *, report: bool = False) -> Overview:
    """Return the overview; ``report`` is true if the report of the run is served beside the page."""
    summary, train = summarise(run), train_series(run.metrics.records, run.timeline.records)
    last = newest_per_step(run.metrics.records)[-1:]
    mesh: Mapping[str, Any] = last[0].get("mesh", {}) if last else {}
    newest = next(iter(recorded_policies(run)), None)
    wasted, totals = _counts(mesh.get("wasted_tokens")), _counts(mesh.get("totals"))
    begin_time, end_time = recorded.begin_time, max(record_times(run, slice(-1, None)), default=None)
    elapsed = None if begin_time is None or end_time is None else end_time - begin_time - np.diff(train.pauses).sum()
    trained = [StalenessBin(staleness=steps, count=int(n)) for steps, n in train.staleness_counts.items()]
    bound = summary.max_staleness if summary.max_staleness is not None else summary.largest_staleness or 0
    return Overview(
        run=run.name,
        time=end_time or 0.0,
        state="failed" if run.failure else "complete" if summary.finished else "stopped",
        waiting_for=run.failure,
        train_step=summary.train_steps,
        train_steps=summary.planned_steps or summary.train_steps,
        cut_step=summary.train_steps,
        newest_version=-1 if newest is None else newest.policy_version,
        newest_train_step=0 if newest is None else newest.train_step,
        pool_size=0 if run.schedule is None else run.schedule.pool_size,
        staleness=Staleness(bound=bound, queue=[], trained=trained),
        drops=drop_views(summary.dropped, wasted),
        waste=waste_views(totals, wasted),
        evaluations=recorded_evaluations(run)[-MOST_EVALUATIONS:],
        report=recorded.curves.report,
        totals=totals,
        elapsed_seconds=elapsed,
        result=run_result(run, summary, report=report),
    )


def no_rollouts(overview: Overview) -> Timeline:
    """Return the timeline of a run in which nothing is in progress."""
    return Timeline(time=overview.time, window_seconds=0.0, in_flight=0, left_out=0, rollouts=[])


def _counts(value: object) -> dict[str, int]:
    if not isinstance(value, Mapping):
        return {}
    return {str(name): int(count) for name, count in value.items() if isinstance(count, int | float)}


MOST_SAMPLES = 12
MOST_CHARACTERS = 4000
_SHOWN_ELSEWHERE = ("state", "report")
"""Facts that the page shows in another form: the state in its head, the report as a link."""


def run_result(run: RecordedRun, summary: RunSummary, *, report: bool) -> RunResultView:
    """Return the result; ``report`` is true if the report of the run is served beside the page."""
    lines = dict(facts(summary)) | dict(ending(run, summary))
    step = max(1, -(-len(run.samples.records) // MOST_SAMPLES))
    samples = run.samples.records[::-1][::step][::-1]  # evenly spread, with the newest one
    return RunResultView(
        time=max(record_times(run, slice(-1, None)), default=None),
        lines=[ResultLine(name=name, value=value) for name, value in lines.items() if name not in _SHOWN_ELSEWHERE],
        report=report,
        remarks=tuple(Remark(text=sentence.text, bad=sentence.bad) for sentence in sentences(summary)),
        missing=summary.missing,
        tables=tuple(table for table in _tables(run, summary) if table.rows),
        samples=tuple(map(_sample, samples)),
        history=mesh_history(run),
    )


def _tables(run: RecordedRun, summary: RunSummary) -> Iterator[ResultTable]:
    yield _evaluations(summary)
    if summary.audit is not None:
        rows = [[claim] for claim in audit_claims(summary.audit)]
        yield ResultTable(name="audit", heads=[f"audit {summary.audit_verdict}"], rows=rows)
    yield _versions(run, summary)


def _evaluations(summary: RunSummary) -> ResultTable:
    heads = ["when", "policy version", "n", summary.score_name, "standard error", "mean length, tokens", "longest"]
    rows = [
        [
            moment(point, summary),
            f"{point.policy_version}",
            count(point.n) or "",
            f"{point.mean:.4f}",
            _number(point.standard_error, ".4f") or "unknown",
            _number(point.details.get("mean_length"), ".1f"),
            _number(point.details.get("max_length"), ".0f"),
            percent(point.details.get("truncated_share")) or "",
            _number(point.seconds, ".1f"),
        ]
        for point in summary.evaluations
    ]
    return ResultTable(name="evaluations", heads=[*heads, "truncated", "seconds"], rows=rows)


def _versions(run: RecordedRun, summary: RunSummary) -> ResultTable:
    """Return every known version, the newest first, with its train step, its evaluation and its re-scoring."""
    train, written = train_series(run.metrics.records), version_bytes(run)
    evaluated = {point.policy_version: point for point in summary.evaluations}
    rescoring = None if summary.audit is None else summary.audit.rescoring
    gaps = {} if rescoring is None else {version.policy_version: version for version in rescoring.versions}
    steps = {int(version): at for at, version in enumerate(train["policy_version"]) if version == version}
    rows = []
    for version in sorted({*evaluated, *gaps, *steps}, reverse=True):
        trained = ["0" if version == 0 else "", "", "", ""]
        if (at := steps.get(version)) is not None:
            tokens, off_policy = train["batch.trained_tokens"][at], train["off_policy_token_share"][at]
            trained = [_number(train["train_step"][at], ".0f"), _number(train["batch.outcome_mean"][at], ".3f")]
            trained += [count(tokens) or "", percent(off_policy) or ""]
        score, scored = "", gaps.get(version)
        if (point := evaluated.get(version)) is not None:
            score = f"{point.mean:.3f} {plus_minus(point.standard_error)}"
        text = "" if scored is None else scored.skipped or f"{count(scored.tokens)} ({gap(scored.largest_gap)})"
        rows.append([f"{version}", written.get(version, ""), *trained, score, text])
    heads = ["policy version", "bytes", "train step", "batch reward", "tokens trained", "off-policy"]
    return ResultTable(
        name="versions",
        heads=[*heads, f"{summary.score_name} evaluated", "tokens re-scored (largest gap)"],
        rows=rows,
        note="Bytes are those of the files that the trainer wrote and a generator reads; of a delta, an object store "
        "has fewer. They are known while a version's folder is kept (checkpoints.keep_last). Reward, tokens and "
        "off-policy share refer to the batch that was trained into the version.",
    )


def _sample(record: Record) -> SampleView:
    step, reward, versions = number(record, "train_step"), number(record, "reward"), record.get("policy_versions")
    return SampleView(
        trajectory_id=str(record.get("trajectory_id", "")),
        train_step=int(step) if step == step else None,
        reward=reward if reward == reward else None,
        policy_versions=[int(version) for version in versions] if isinstance(versions, list) else [],
        prompt=_shortened(record.get("prompt")),
        completion=_shortened(record.get("completion")),
    )


def _shortened(value: object) -> str:
    text = "" if value is None else str(value)
    left = len(text) - MOST_CHARACTERS
    return text if left <= 0 else f"{text[:MOST_CHARACTERS]} … ({left:,} more characters)"


def _number(value: float | None, spec: str) -> str:
    return "" if value is None or value != value else format(value, spec)
