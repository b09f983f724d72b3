"""``report.html``: the report of a run as one file that opens offline.

Plots and styles are inline; the page fetches nothing. The template engine escapes all text from the run (completions,
configuration, messages); only the plots are inserted as markup.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

import rollmesh
from rollmesh.report.audit_result import AuditResult
from rollmesh.report.plots import PlotSpec, plot_specs, style
from rollmesh.report.recorded_run import Record, RecordedRun
from rollmesh.report.sentences import count, duration, facts, gap, moment, percent, sentences
from rollmesh.report.series import EvaluationPoint, TrainSeries, number, train_series
from rollmesh.report.summary import RunSummary, summarise

REPORT_FILE = "report.html"
TEMPLATE = "report.html.j2"
MAX_SAMPLES = 12
MAX_TEXT = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Plot with its SVG markup."""

    name: str
    caption: str
    wide: bool
    svg: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Formatted sample completion."""

    train_step: str
    trajectory_id: str
    reward: str
    versions: str
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRow:
    """Table row of one policy version: its training batch, evaluation and re-scoring."""

    policy_version: int
    train_step: str
    reward: str
    tokens: str
    off_policy: str
    evaluated: str
    rescored: str


def write_report(run_folder: Path) -> Path:
    """Write plots and ``report.html`` into a complete or partial run folder; return the path of the page.

    Raises DataError for a missing folder, ConfigError when matplotlib is not installed.
    """
    folder = RecordedRun(run_folder)
    summary = summarise(folder)
    text = render(folder, summary, _draw(folder, plot_specs(folder)))
    file = folder.path / REPORT_FILE
    temporary = file.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, file)
    return file


def render(folder: RecordedRun, summary: RunSummary, plots: Sequence[Plot]) -> str:
    """Render the page as text."""
    return str(
        _environment()
        .get_template(TEMPLATE)
        .render(
            summary=summary,
            failure=folder.failure,
            sentences=sentences(summary),
            facts=facts(summary),
            headline=_headline(summary),
            plots=plots,
            versions=_version_rows(summary, train_series(folder.metrics.records)),
            evaluations=[_evaluation_row(e, summary) for e in summary.evaluations],
            rescoring=summary.audit.rescoring if summary.audit is not None else None,
            samples=_samples(folder.samples.records),
            config_text=folder.config_text,
            logs=[(log.name, log.relative_to(folder.path).as_posix(), log.stat().st_size) for log in folder.logs()],
            written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            release=rollmesh.__version__,
        )
    )


def _draw(folder: RecordedRun, specs: Sequence[PlotSpec]) -> list[Plot]:
    """Draw every plot once, for the page and as files in ``plots/``."""
    plots: list[Plot] = []
    target = folder.path / "plots"
    target.mkdir(exist_ok=True)
    with style.style():
        for spec in specs:
            file, _ = style.save(spec.draw(), target, spec.name)
            svg = style.for_page(file.read_text(encoding="utf-8"), spec.name)
            plots.append(Plot(name=spec.name, caption=spec.caption, wide=spec.wide, svg=svg))
    return plots


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("rollmesh.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    # Only for plots: the plotting library escapes the text in them.
    environment.filters["drawn"] = Markup
    environment.filters.update(count=count, percent=percent, duration=duration, gap=gap)
    return environment


def _headline(summary: RunSummary) -> list[tuple[str, str, str]]:
    """Return (value, label, note) of the numbers at the top of the page that are known."""
    cards: list[tuple[str, str, str]] = []
    if summary.before is not None and summary.after is not None:
        note = f"{summary.before.mean:.3f} before, n={summary.after.n}"
        cards.append((f"{summary.after.mean:.3f}", f"{summary.score_name} after training", note))
    planned = f"of {summary.planned_steps} planned" if summary.planned_steps is not None else ""
    cards.append((str(summary.train_steps), "train steps", planned))
    if summary.off_policy_share is not None:
        staleness = f"staleness mean {summary.mean_staleness:.2f}" if summary.mean_staleness is not None else ""
        cards.append((percent(summary.off_policy_share) or "", "trained tokens off-policy", staleness))
    if summary.generated_per_second is not None:
        note = f"{count(summary.generated_tokens)} generated"
        cards.append((count(summary.generated_per_second) or "", "tokens per second", note))
    if summary.training_seconds is not None:
        cards.append((duration(summary.training_seconds) or "", "training time", "including pauses"))
    cards.append(_audit_card(summary.audit))
    return cards


def _audit_card(audit: AuditResult | None) -> tuple[str, str, str]:
    if audit is None:
        return "none", "audit", "not run on this folder"
    lost = f"lost {len(audit.lost)}" if audit.lost is not None else "lost not checked"
    return audit.verdict.value, "audit", f"{lost}, trained twice {len(audit.trained_twice)}"


def _version_rows(summary: RunSummary, train: TrainSeries) -> list[VersionRow]:
    """Return one row per known policy version, ascending."""
    evaluated = {e.policy_version: e for e in summary.evaluations}
    rescoring = summary.audit.rescoring if summary.audit is not None else None
    gaps = {} if rescoring is None else {v.policy_version: v for v in rescoring.versions}
    steps = {int(v): i for i, v in enumerate(train["policy_version"]) if v == v}
    rows: list[VersionRow] = []
    for version in sorted({*evaluated, *gaps, *steps}):
        i = steps.get(version)
        scored = gaps.get(version)
        point = evaluated.get(version)
        rows.append(
            VersionRow(
                policy_version=version,
                train_step=_number(train["train_step"][i], ".0f") if i is not None else ("0" if version == 0 else ""),
                reward=_number(train["batch.outcome_mean"][i], ".3f") if i is not None else "",
                tokens=(count(train["batch.trained_tokens"][i]) or "") if i is not None else "",
                off_policy=(percent(train["off_policy_token_share"][i]) or "") if i is not None else "",
                evaluated="" if point is None else f"{point.mean:.3f} ± {_number(point.standard_error, '.3f')}",
                rescored="" if scored is None else scored.skipped or f"{scored.tokens:,} ({gap(scored.largest_gap)})",
            )
        )
    return rows


def _evaluation_row(point: EvaluationPoint, summary: RunSummary) -> Mapping[str, str]:
    return {
        "when": moment(point, summary),
        "version": str(point.policy_version),
        "n": f"{point.n:,}",
        "mean": f"{point.mean:.4f}",
        "error": _number(point.standard_error, ".4f"),
        "length": _number(point.mean_length, ".1f"),
        "longest": _number(point.max_length, ".0f"),
        "truncated": percent(point.truncated) or "",
        "seconds": _number(point.seconds, ".1f"),
    }


def _samples(records: Sequence[Record]) -> list[Sample]:
    """Select up to ``MAX_SAMPLES`` completions, evenly spread over the run."""
    step = max(1, -(-len(records) // MAX_SAMPLES))
    chosen = records[::-1][::step][::-1]
    return [
        Sample(
            train_step=_number(number(record, "train_step"), ".0f"),
            trajectory_id=str(record.get("trajectory_id", "")),
            reward=_number(number(record, "reward"), "g"),
            versions=_versions(record.get("policy_versions")),
            prompt=_shortened(record.get("prompt")),
            completion=_shortened(record.get("completion")),
        )
        for record in chosen
    ]


def _versions(value: object) -> str:
    return ", ".join(str(v) for v in value) if isinstance(value, list) else ""


def _shortened(value: object) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} … ({len(text) - MAX_TEXT:,} more characters)"


def _number(value: float, spec: str) -> str:
    return "" if value != value else format(value, spec)
