"""Comparison of runs: several seeds of one schedule, or several schedules at equal updates."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING

from rollmesh.report.audit_result import AuditVerdict
from rollmesh.report.console import count, duration, percent, print_sentence
from rollmesh.report.sentences import NOISE_STANDARD_ERRORS
from rollmesh.report.summary import RunSummary, summarise

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Mean over runs, with its standard error over seeds; None for a single run."""

    n: int
    mean: float
    standard_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArm:
    """Runs with one label."""

    label: str
    runs: tuple[RunSummary, ...]

    @property
    def after(self) -> Spread | None:
        """Scores after training."""
        return spread_of([_score(run) for run in self.runs])


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


def compare(folders: Mapping[str, Sequence[Path]]) -> Comparison:
    """Summarise the run folders of each label and compare the first label with each other label."""
    arms = tuple(RunArm(label=label, runs=tuple(map(summarise, paths))) for label, paths in folders.items())
    runs = [run for arm in arms for run in arm.runs]
    names = {run.score_name for run in runs}
    return Comparison(
        score_name=names.pop() if len(names) == 1 else "mean reward",
        arms=arms,
        differences=tuple(d for other in arms[1:] if (d := _difference(arms[0], other)) is not None),
        notes=tuple(_notes(arms)),
    )


def print_comparison(comparison: Comparison, console: "Console") -> None:
    """Print one row per run, one per label, then the differences as sentences."""
    from rich.table import Table

    name = comparison.score_name
    table = Table(title="runs compared (± 1 standard error)", title_justify="left", box=None, padding=(0, 2))
    table.add_column("run")
    for heading in ("seed", *(heading.format(name) for heading, *_ in _COLUMNS)):
        table.add_column(heading, justify="right")
    table.add_column("audit")
    for arm in comparison.arms:
        for run in arm.runs:
            seed, style = "" if run.seed is None else str(run.seed), "dim" if len(arm.runs) > 1 else ""
            table.add_row(arm.label, seed, *_cells([run]), run.audit_verdict or "none", style=style)
        if (runs := len(arm.runs)) > 1:
            green = f"{sum(run.audit_verdict == AuditVerdict.GREEN for run in arm.runs)} of {runs} green"
            table.add_row(arm.label, f"{runs} runs", *_cells(arm.runs), green, style="bold", end_section=True)
    console.print(table)
    for difference in comparison.differences:
        print_sentence(console, f"- {describe_difference(difference, name)}")
    for note in comparison.notes:
        print_sentence(console, f"! {note}", "yellow")


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


def spread_of(values: Sequence[float | None]) -> Spread | None:
    """Compute mean and standard error of the known values; None without any."""
    known = [float(value) for value in values if value is not None and not math.isnan(value)]
    if not known:
        return None
    error = None if len(known) == 1 else stdev(known) / math.sqrt(len(known))
    return Spread(n=len(known), mean=fmean(known), standard_error=error)


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
        "not audited to the last train step": lambda run: bool(run.audited_part),
        "audit NOT green": lambda run: run.audit is not None and run.audit.verdict is AuditVerdict.NOT_GREEN,
        "audit incomplete": lambda run: run.audit is not None and run.audit.verdict is AuditVerdict.INCOMPLETE,
    }
    for kind, applies in kinds.items():
        affected = [f"{label} seed {run.seed}" for label, run in runs if applies(run)]
        if affected:
            notes.append(f"{kind}: {', '.join(affected)}")
    return notes


_COLUMNS: tuple[tuple[str, Callable[[RunSummary], float | None], Callable[[float], str | None], bool], ...] = (
    ("{} before", lambda run: None if run.before is None else run.before.mean, "{:.3f}".format, True),
    ("{} after", _score, "{:.3f}".format, True),
    ("steps", lambda run: run.train_steps, "{:.0f}".format, True),
    ("training", lambda run: run.training_seconds, duration, False),
    ("tokens", lambda run: run.trained_tokens, count, False),
    ("off-policy", lambda run: run.off_policy_share, percent, True),
    ("staleness", lambda run: run.mean_staleness, "{:.2f}".format, True),
)
"""Heading, value of a run, its text, and whether the mean over several runs has its standard error."""


def _cells(runs: Sequence[RunSummary]) -> Iterator[str]:
    """Yield the columns of one run, or their means over several runs."""
    for _, value, show, with_error in _COLUMNS:
        spread = spread_of([value(run) for run in runs])
        text = "" if spread is None else show(spread.mean) or ""
        error = None if spread is None or not with_error else spread.standard_error
        yield text if error is None else f"{text} ± {show(error)}"
