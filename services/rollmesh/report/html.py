"""``report.html``: the report of a run as one file that opens offline.

Plots and styles are inline; the page fetches nothing. The template engine escapes all text from the run (completions,
configuration, messages); only the plots are inserted as markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import rollmesh
from rollmesh.report.audit_result import VersionGap
from rollmesh.report.formats import count, duration, gap, percent
from rollmesh.report.plots import PlotSpec, style, write_plots
from rollmesh.report.recorded_run import Record, RecordedRun
from rollmesh.report.sentences import facts, moment, sentences
from rollmesh.report.series import EvaluationPoint, TrainSeries, number, train_series
from rollmesh.report.summary import RunSummary, summarise
from rollmesh.report.version_bytes import version_bytes

REPORT_FILE = "report.html"
TEMPLATE = "report.html.j2"
MAX_SAMPLES = 12
MAX_TEXT = 4000


def write_report(run_folder: Path) -> Path:
    """Write plots and ``report.html`` into a complete or partial run folder; return the path of the page.

    Raises DataError for a missing folder, ConfigError when matplotlib is not installed.
    """
    folder = RecordedRun(run_folder)
    summary = summarise(folder)
    plots = [(spec, style.for_page(svg.read_text(encoding="utf-8"), spec.name)) for spec, svg in write_plots(folder)]
    return folder.replace_file(REPORT_FILE, _render(folder, summary, plots))


def _render(folder: RecordedRun, summary: RunSummary, plots: Sequence[tuple[PlotSpec, str]]) -> str:
    train, audit = train_series(folder.metrics.records), summary.audit
    return str(
        _environment()
        .get_template(TEMPLATE)
        .render(
            summary=summary,
            failure=folder.failure,
            sentences=sentences(summary),
            facts=facts(summary),
            plots=plots,
            train=train,
            versions=_versions(summary, train),
            version_bytes=version_bytes(folder),
            rescoring=None if audit is None else audit.rescoring,
            samples=_samples(folder.samples.records),
            config_text=folder.config_text,
            logs=[(log.name, log.relative_to(folder.path).as_posix(), log.stat().st_size) for log in folder.logs()],
            written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            release=rollmesh.__version__,
        )
    )


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("rollmesh.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: "" if value is None else value,
    )
    # Only for plots: the plotting library escapes the text in them.
    environment.filters["drawn"] = Markup
    environment.filters.update(count=count, duration=duration, field=_field, gap=gap, moment=moment, number=_number)
    environment.filters.update(percent=percent, shortened=_shortened)
    return environment


def _versions(
    summary: RunSummary, train: TrainSeries
) -> list[tuple[int, int | None, EvaluationPoint | None, VersionGap | None]]:
    """Return every known version, ascending, with the index of its train step, its evaluation and its re-scoring."""
    evaluated = {point.policy_version: point for point in summary.evaluations}
    rescoring = None if summary.audit is None else summary.audit.rescoring
    gaps = {} if rescoring is None else {version.policy_version: version for version in rescoring.versions}
    steps = {int(version): at for at, version in enumerate(train["policy_version"]) if version == version}
    versions = sorted({*evaluated, *gaps, *steps})
    return [(version, steps.get(version), evaluated.get(version), gaps.get(version)) for version in versions]


def _samples(records: Sequence[Record]) -> Sequence[Record]:
    """Select up to ``MAX_SAMPLES`` completions, evenly spread over the run."""
    step = max(1, -(-len(records) // MAX_SAMPLES))
    return records[::-1][::step][::-1]


def _field(record: Record, name: str, spec: str) -> str:
    return _number(number(record, name), spec)


def _shortened(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT:,} more characters)"


def _number(value: float, spec: str) -> str:
    return "" if value != value else format(value, spec)
