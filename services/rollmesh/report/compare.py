"""Comparison of runs: several seeds of one schedule, or several schedules at equal updates."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rollmesh.report.audit_result import AuditVerdict
from rollmesh.report.plots import style
from rollmesh.report.plots.comparison import comparison_plot
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.sentences import NOISE_STANDARD_ERRORS, count, duration, percent
from rollmesh.report.series import evaluation_points, train_series
from rollmesh.report.summary import RunSummary, summarise

if TYPE_CHECKING:
    from rich.console import Console


EQUAL_POINTS = 5.0
"""Largest difference, in percentage points, between the scores of schedules that count as equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean over runs, with its standard error over seeds; None for a single run."""

    n: int
    mean: float
    standard_error: float | None

    def text(self, show: Callable[[float], str | None]) -> str:
        """Format the spread as ``0.79 ± 0.02``."""
        error = "" if self.standard_error is None else f" ± {show(self.standard_error)}"
        return f"{show(self.mean)}{error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArm:
    """Runs with one label."""

    label: str
    runs: tuple[RunSummary, ...]
    before: Spread | None
    after: Spread | None
    train_steps: Spread | None
    training_seconds: Spread | None
    trained_tokens: Spread | None
    generated_tokens: Spread | None
    off_policy_share: Spread | None
    mean_staleness: Spread | None
    green: int
    """Number of runs with a green audit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Score after training of the first label minus that of another one, paired by common seeds."""

    label: str
    baseline: str
    pairs: int
    """Number of common seeds; 0 compares the means of unpaired runs."""
    spread: Spread


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Arms, differences, and caveats."""

    score_name: str
    arms: tuple[RunArm, ...]
    differences: tuple[Difference, ...]
    notes: tuple[str, ...]
    """Caveats that limit the meaning of the differences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EqualityVerdict:
    """Result of the test for equal scores of the first label and each other label at equal updates."""

    equal: bool
    text: str


def compare(folders: Mapping[str, Sequence[Path]]) -> Comparison:
    """Summarise the run folders of each label and compare the first label with each other label."""
    arms = tuple(_arm(label, tuple(summarise(f) for f in paths)) for label, paths in folders.items())
    runs = [run for arm in arms for run in arm.runs]
    names = {run.score_name for run in runs}
    return Comparison(
        score_name=names.pop() if len(names) == 1 else "mean reward",
        arms=arms,
        differences=tuple(d for other in arms[1:] if (d := _difference(arms[0], other)) is not None),
        notes=tuple(_notes(arms)),
    )


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Print one row per run, one per label, then the differences as sentences."""
    from rich.table import Table
    from rich.text import Text

    name = comparison.score_name
    table = Table(title="runs compared (± 1 standard error)", title_justify="left", box=None, padding=(0, 2))
    table.add_column("schedule")
    for column in ("seed", f"{name} before", f"{name} after", "steps", "training", "tokens", "off-policy", "staleness"):
        table.add_column(column, justify="right")
    table.add_column("audit")
    for arm in comparison.arms:
        for run in arm.runs:
            table.add_row(arm.label, *_run_cells(run), style="dim")
        table.add_row(arm.label, *_arm_cells(arm), style="bold", end_section=True)
    console.print(table)
    for difference in comparison.differences:
        console.print(Text(f"- {describe_difference(difference, name)}"), soft_wrap=not console.is_terminal)
    for note in comparison.notes:
        console.print(Text(f"! {note}", style="yellow"), soft_wrap=not console.is_terminal)


def describe_difference(difference: Difference, score_name: str) -> str:
    """Describe a difference, and tell whether it exceeds the noise."""
    seeds = "seed" if difference.pairs == 1 else "seeds"
    basis = f"over {difference.pairs} paired {seeds}" if difference.pairs else "of unpaired means"
    mean, error = difference.spread.mean, difference.spread.standard_error
    text = f"{score_name} after training, {difference.label} minus {difference.baseline}, {basis}: {mean:+.3f}"
    if error is None:
        return f"{text}; the noise of a single pair is unknown"
    within = "within" if abs(mean) < NOISE_STANDARD_ERRORS * error else "beyond"
    return f"{text} ± {error:.3f}, {within} {NOISE_STANDARD_ERRORS:g} standard errors"


def equality_verdict(comparison: Comparison, points: float = EQUAL_POINTS) -> EqualityVerdict:
    """Tell whether every difference, paired by seed, is at most ``points`` of 100, in either direction.

    A much higher score is not equal either: it shows that the arms did different work. For the same reason, runs that
    are not finished, not evaluated, of unequal updates or without a green audit are not equal.
    """
    if comparison.notes:
        return EqualityVerdict(equal=False, text=f"equal updates cannot be compared: {'; '.join(comparison.notes)}")
    if not comparison.differences or not all(difference.pairs for difference in comparison.differences):
        return EqualityVerdict(equal=False, text="equal updates cannot be compared: the arms have no seed in common")
    equal = all(abs(difference.spread.mean) <= points / 100 for difference in comparison.differences)
    shown = [_in_points(difference, points) for difference in comparison.differences]
    return EqualityVerdict(equal=equal, text="; ".join(shown))


def _in_points(difference: Difference, points: float) -> str:
    mean, error = difference.spread.mean, difference.spread.standard_error
    relation = "within" if abs(mean) <= points / 100 else "NOT within"
    spread = "" if error is None else f" ± {100 * error:.1f}"
    seeds = "seed" if difference.pairs == 1 else "seeds"
    return (
        f"{difference.label} is {relation} {points:g} points of {difference.baseline} at equal updates: "
        f"{100 * mean:+.1f}{spread} points, the mean of {difference.pairs} paired {seeds}"
        + (", without a standard error" if error is None else "")
    )


def write_comparison_plot(folders: Mapping[str, Sequence[Path]], target: Path, name: str = "comparison") -> Path:
    """Plot the reward of every run by updates, by trained tokens and by seconds; return the SVG file.

    A PNG with the same name is written next to it. Raises ConfigError when matplotlib is not installed.
    """
    arms = {
        label: [
            (train_series(folder.metrics.records), evaluation_points(folder.evaluations.records))
            for folder in map(RecordedRun, paths)
        ]
        for label, paths in folders.items()
    }
    target.mkdir(parents=True, exist_ok=True)
    with style.style():
        return style.save(comparison_plot(arms), target, name)[0]


def spread_of(values: Sequence[float | None]) -> Spread | None:
    """Compute mean and standard error of the known values; None without any."""
    known = [float(value) for value in values if value is not None and not math.isnan(value)]
    if not known:
        return None
    mean = sum(known) / len(known)
    if len(known) == 1:
        return Spread(n=1, mean=mean, standard_error=None)
    variance = sum((value - mean) ** 2 for value in known) / (len(known) - 1)
    return Spread(n=len(known), mean=mean, standard_error=math.sqrt(variance / len(known)))


def _arm(label: str, runs: tuple[RunSummary, ...]) -> RunArm:
    return RunArm(
        label=label,
        runs=runs,
        before=spread_of([r.before.mean if r.before is not None else None for r in runs]),
        after=spread_of([_score(r) for r in runs]),
        train_steps=spread_of([r.train_steps for r in runs]),
        training_seconds=spread_of([r.training_seconds for r in runs]),
        trained_tokens=spread_of([r.trained_tokens for r in runs]),
        generated_tokens=spread_of([r.generated_tokens for r in runs]),
        off_policy_share=spread_of([r.off_policy_share for r in runs]),
        mean_staleness=spread_of([r.mean_staleness for r in runs]),
        green=sum(r.audit is not None and r.audit.green for r in runs),
    )


def _score(run: RunSummary) -> float | None:
    """Return the score of the newest version; None without an evaluation of an older one to compare with."""
    return run.after.mean if run.after is not None and run.before is not None else None


def _difference(first: RunArm, other: RunArm) -> Difference | None:
    scores = [
        {run.seed: score for run in arm.runs if run.seed is not None and (score := _score(run)) is not None}
        for arm in (first, other)
    ]
    seeds = sorted(scores[0].keys() & scores[1].keys())
    if seeds:
        spread = spread_of([scores[0][seed] - scores[1][seed] for seed in seeds])
        assert spread is not None
        return Difference(label=first.label, baseline=other.label, pairs=len(seeds), spread=spread)
    if first.after is None or other.after is None:
        return None
    errors = (first.after.standard_error, other.after.standard_error)
    error = None if errors[0] is None or errors[1] is None else math.hypot(errors[0], errors[1])
    n = min(first.after.n, other.after.n)
    spread = Spread(n=n, mean=first.after.mean - other.after.mean, standard_error=error)
    return Difference(label=first.label, baseline=other.label, pairs=0, spread=spread)


def _notes(arms: Sequence[RunArm]) -> list[str]:
    notes: list[str] = []
    runs = [(arm.label, run) for arm in arms for run in arm.runs]
    steps = {run.train_steps for _, run in runs}
    if len(steps) > 1:
        notes.append(f"the runs made different numbers of updates ({', '.join(map(str, sorted(steps)))})")
    kinds: dict[str, Callable[[RunSummary], bool]] = {
        "not finished": lambda run: not run.finished,
        "not evaluated before and after training": lambda run: _score(run) is None,
        "not audited": lambda run: run.audit is None,
        "audit NOT green": lambda run: run.audit is not None and run.audit.verdict is AuditVerdict.NOT_GREEN,
        "audit incomplete": lambda run: run.audit is not None and run.audit.verdict is AuditVerdict.INCOMPLETE,
    }
    for kind, applies in kinds.items():
        affected = [f"{label} seed {run.seed}" for label, run in runs if applies(run)]
        if affected:
            notes.append(f"{kind}: {', '.join(affected)}")
    return notes


def _run_cells(run: RunSummary) -> list[str]:
    return [
        "" if run.seed is None else str(run.seed),
        "" if run.before is None else f"{run.before.mean:.3f}",
        "" if (score := _score(run)) is None else f"{score:.3f}",
        str(run.train_steps),
        duration(run.training_seconds) or "",
        count(run.trained_tokens) or "",
        percent(run.off_policy_share) or "",
        "" if run.mean_staleness is None else f"{run.mean_staleness:.2f}",
        "none" if run.audit is None else run.audit.verdict.value,
    ]


def _arm_cells(arm: RunArm) -> list[str]:
    def cell(spread: Spread | None, show: Callable[[float], str | None]) -> str:
        return "" if spread is None else spread.text(show)

    return [
        f"{len(arm.runs)} runs",
        cell(arm.before, lambda v: f"{v:.3f}"),
        cell(arm.after, lambda v: f"{v:.3f}"),
        cell(arm.train_steps, lambda v: f"{v:.0f}"),
        "" if arm.training_seconds is None else duration(arm.training_seconds.mean) or "",
        "" if arm.trained_tokens is None else count(arm.trained_tokens.mean) or "",
        cell(arm.off_policy_share, percent),
        cell(arm.mean_staleness, lambda v: f"{v:.2f}"),
        f"{arm.green} of {len(arm.runs)} green",
    ]
