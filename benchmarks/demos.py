"""Runs of the demo's task under every schedule, with every method, and over several seeds (``make schedules`` etc.)."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rollmesh.cli.common import EXIT_STOPPED, SetOption, clear_errors
from rollmesh.cli.configuration import method_settings
from rollmesh.cli.up import InlineOption, run_to_report
from rollmesh.config import load_run_config, text_override
from rollmesh.config.recipes import recipe_file
from rollmesh.errors import ConfigError, RollmeshError
from rollmesh.launcher.inline_services import INLINE_OVERRIDES
from rollmesh.report.compare import Comparison, Difference, compare, print_comparison
from rollmesh.report.console import count, percent, run_console
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.report_file import write_comparison
from rollmesh.report.sentences import lengths_of_waste
from rollmesh.report.series import newest_per_step
from rollmesh.report.summary import RunSummary, summarise
from rollmesh.scheduling.presets import PRESETS, companion_settings
from rollmesh.step_metrics import number

Updates = Annotated[int, typer.Option(help="Train steps of each run.", min=2)]
Folder = Annotated[Path | None, typer.Option(help="Parent of the run folders; default: in runs/.")]

_OWN_NUMBERS = ("schedule.pool_size=null", "schedule.max_staleness=null", "rollout.partial_save_tokens=64")
"""Overrides with which a preset has its own numbers, not those of the demo."""

EQUAL_POINTS = 5.0
"""Largest difference, in percentage points, between the scores of schedules that count as equal."""

app = typer.Typer(
    help="Run the demo's task under many settings.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.command()
def schedules(
    preset: Annotated[list[str] | None, typer.Option(help="Presets to run; all by default.")] = None,
    updates: Updates = 6,
    folder: Folder = None,
    set_: SetOption = None,
    inline: InlineOption = False,
) -> None:
    """Run the demo's task under every preset of `rollmesh config schedules`, with the settings that go with it.

    Prints one row per preset. Exits with status 1 unless every run makes all its updates and its audit is green.
    """
    root, console = folder or Path("runs/demo-schedules"), run_console()
    settings = {name: [*companion_settings(row), f"schedule.preset={name}"] for name, row in PRESETS.items()}
    results = _short_runs(root, _chosen("--preset", preset, settings), updates, set_ or (), inline, console)
    headings = ("versions", "dropped", "restarted", "set aside", "surplus tokens", "staleness", "off-policy")
    _print_table(
        "schedules in the real mesh", headings, results, [_schedule_cells(r.summary) for r in results], console
    )
    for result in results:
        for sentence in lengths_of_waste(result.summary):
            console.print(f"{result.name}: {sentence}", highlight=False, soft_wrap=True)
    _end(results, "schedules", console)


@app.command()
def methods(
    method: Annotated[list[str] | None, typer.Option(help="Methods to run, as advantage/drpo; all by default.")] = None,
    updates: Updates = 3,
    folder: Folder = None,
    set_: SetOption = None,
    inline: InlineOption = False,
) -> None:
    """Run the demo's task with every method of `rollmesh config methods`, with the settings that go with it.

    Prints one row per method, with what the totals and step reports of its run show of it. Exits with status 1 unless
    every run makes all its updates and its audit is green.
    """
    root, console = folder or Path("runs/demo-methods"), run_console()
    results = _short_runs(root, _chosen("--method", method, method_settings()), updates, set_ or (), inline, console)
    headings = ("dropped", "outcome", "staleness", "effect")
    rows = [
        (
            sum(result.summary.dropped.values()),
            _shown(result.outcome, ".3f"),
            _shown(result.summary.largest_staleness),
            effect_of(result.name, result.summary, RecordedRun(root / result.name).metrics.records),
        )
        for result in results
    ]
    _print_table("methods in the real mesh", headings, results, rows, console)
    _end(results, "methods", console)


@app.command()
def seeds(
    seed: Annotated[list[int] | None, typer.Option(help="Seeds to run; three by default.")] = None,
    folder: Folder = None,
    set_: SetOption = None,
) -> None:
    """Run the demo over several seeds, and compare ``copris`` with ``sync`` at equal updates.

    Exits with status 1 unless every audit is green and the accuracies are within 5 points in the mean over the seeds.
    """
    root, console = folder or Path("runs/demo-seeds"), run_console()
    folders: dict[str, list[Path]] = {"copris": [], "sync": []}
    with clear_errors():
        for number in seed or (0, 1, 2):
            for preset, made in folders.items():
                made.append(root / f"{preset}-{number}")
                own = () if preset == "copris" else _OWN_NUMBERS
                overrides = [*(set_ or ()), f"seed={number}", f"schedule.preset={preset}", *own]
                _demo(f"{preset}-{number}", made[-1], overrides, console)
        comparison = compare(folders)
        print_comparison(comparison, console)
        page = write_comparison({path.name: path for arm in folders.values() for path in arm}, root / "comparison.html")
        console.print(f"curves of all runs: {page}", highlight=False, markup=False, soft_wrap=True)
        is_equal, sentence = equality_verdict(comparison)
    console.print(Text(f"verdict: {sentence}", style="bold green" if is_equal else "bold red"), soft_wrap=True)
    raise typer.Exit(0 if is_equal else 1)


def equality_verdict(comparison: Comparison) -> tuple[bool, str]:
    """Tell whether every difference, paired by seed, is at most ``EQUAL_POINTS`` in either direction; and why.

    A much higher score is not equal either: it shows that the arms did different work. For the same reason, runs that
    are not finished, not evaluated, of unequal updates or without a green audit are not equal.
    """
    if comparison.notes:
        return False, f"equal updates cannot be compared: {'; '.join(comparison.notes)}"
    if not comparison.differences or not all(difference.pairs for difference in comparison.differences):
        return False, "equal updates cannot be compared: the arms have no seed in common"
    equal = all(abs(difference.spread.mean) <= EQUAL_POINTS / 100 for difference in comparison.differences)
    return equal, "; ".join(map(_in_points, comparison.differences))


def _in_points(difference: Difference) -> str:
    mean, error = difference.spread.mean, difference.spread.standard_error
    relation = "within" if abs(mean) <= EQUAL_POINTS / 100 else "NOT within"
    spread = "" if error is None else f" ± {100 * error:.1f}"
    seeds = "seed" if difference.pairs == 1 else "seeds"
    return (
        f"{difference.label} is {relation} {EQUAL_POINTS:g} points of {difference.baseline} at equal updates: "
        f"{100 * mean:+.1f}{spread} points, the mean of {difference.pairs} paired {seeds}"
        + (", without a standard error" if error is None else "")
    )


def _chosen(option: str, names: Sequence[str] | None, known: Mapping[str, list[str]]) -> Mapping[str, list[str]]:
    with clear_errors():
        if unknown := [name for name in names or () if name not in known]:
            raise ConfigError(f"{option} {unknown[0]}: not known; known: {', '.join(known)}")
    return {name: known[name] for name in names or known}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoResult:
    """One run of the demo, and its figures."""

    name: str
    """Preset, or point and method."""
    summary: RunSummary
    planned_updates: int
    audit: str
    """Verdict of the audit; ``none`` without one, ``refused`` if the run was not started."""
    outcome: float | None
    """Mean outcome of the last batch, before shaping."""
    updates_per_second: float | None
    """Rate between the ends of the first and the last train step; None with fewer than two."""

    @property
    def passed(self) -> bool:
        """True after all planned updates and a green audit."""
        return self.audit == "green" and self.summary.train_steps >= self.planned_updates


def demo_result(folder: Path, name: str, updates: int) -> DemoResult:
    """Read the figures of a run that was to make ``updates`` train steps. Raises DataError for a missing folder."""
    run = RecordedRun(folder)
    summary, records = summarise(run), newest_per_step(run.metrics.records)
    seconds = float(records[-1]["time"]) - float(records[0]["time"]) if records else 0.0
    return DemoResult(
        name=name,
        summary=summary,
        planned_updates=updates,
        audit=summary.audit_verdict or "none",
        outcome=number(records[-1], "batch.outcome_mean") if records else None,
        updates_per_second=(len(records) - 1) / seconds if seconds > 0 else None,
    )


def _short_runs(
    root: Path,
    runs: Mapping[str, Sequence[str]],
    updates: int,
    settings: Sequence[str],
    inline: bool,
    console: Console,
) -> list[DemoResult]:
    """Run the demo once per name, with its ``a.b=c`` overrides and the user's ``settings``, which are stronger.

    A failed run is a result too: ``refused`` if its folder or settings were, and without a rate if it has steps of an
    earlier command. A stop by the user ends the command.
    """
    base = [*_OWN_NUMBERS, "evaluation.before_and_after=false", f"trainer.train_steps={updates}"]
    base += [*INLINE_OVERRIDES, "generator.replicas=1"] if inline else []
    results = []
    for name, overrides in runs.items():
        path, refused = root / name, False
        continued = (path / "metrics.jsonl").exists()
        try:
            _demo(name, path, [*base, *overrides, *settings], console, inline=inline)
        except RollmeshError as error:
            console.print(f"[red]error[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
            refused = isinstance(error, ConfigError)
        path.mkdir(parents=True, exist_ok=True)
        result = demo_result(path, name, updates)
        result = replace(result, updates_per_second=None) if continued else result
        results.append(replace(result, audit="refused") if refused else result)
    return results


def _demo(name: str, path: Path, overrides: Sequence[str], console: Console, *, inline: bool = False) -> None:
    console.print(name, style="bold", highlight=False)
    run_name = f"name=demo-{name.replace('_', '-').replace('/', '-')}"
    config = load_run_config(
        recipe_file("countdown", "demo.yaml"), [run_name, text_override("folder", path), *overrides]
    )
    if run_to_report(config, console, inline=inline) == EXIT_STOPPED:
        raise typer.Exit(EXIT_STOPPED)


def effect_of(method: str, summary: RunSummary, records: Sequence[Mapping[str, Any]]) -> str:
    """Return what totals and step reports show of a method, as ``masks/m2po``; empty where they show nothing."""

    def mean(name: str) -> float:
        values = [value for record in records if math.isfinite(value := number(record, name))]
        return statistics.fmean(values) if values else 0.0

    sizes, completed = summary.rollouts_per_group, {d: t["completed"] for d, t in summary.domains.items()}
    match method.partition("/")[0]:
        case "sampler" if total := sum(completed.values()):
            return "completed " + " ".join(f"{domain} {n / total:.1%}" for domain, n in completed.items())
        case "planner" if sizes:
            rounds = f", {summary.rounds_per_group:.2f} rounds" if summary.rounds_per_group else ""
            return f"{min(sizes)} to {max(sizes)} rollouts a group{rounds}"
        case "advantage":
            return f"mean size {mean('batch.advantage_abs_mean'):.3f}, {summary.skipped_trajectories} skipped"
        case "loss":
            return f"mean gradient norm {mean('grad_norm'):.3g}"
        case "masks":
            # The mask "stale" is a rule of the schedule, not a method.
            masked = {name: tokens for name, tokens in summary.masked_tokens.items() if name != "stale"}
            return ", ".join(f"{name} masked {tokens:,} tokens" for name, tokens in masked.items())
        case "old_logprobs":
            return f"mean deviation of the ratio {mean('policy.ratio.std'):.2g}"
        case "update_scale" if summary.mean_rate_factor is not None:
            return f"rate times {summary.mean_rate_factor:.3f}"
        case "replay" if summary.replayed_share is not None:
            return f"{summary.replayed_share:.1%} of the trajectories replayed"
        case _:
            return ""


def _schedule_cells(summary: RunSummary) -> Sequence[object]:
    begun_again = summary.begun_again
    return (
        _shown(summary.policy_versions),
        sum(summary.dropped.values()),
        begun_again.get("restarted", 0),
        begun_again.get("set aside", 0),
        count(summary.surplus_tokens) or "",
        _shown(summary.largest_staleness),
        percent(summary.off_policy_share) or "",
    )


def _print_table(
    title: str,
    headings: Sequence[str],
    results: Sequence[DemoResult],
    rows: Sequence[Sequence[object]],
    console: Console,
) -> None:
    """Print a row per run: name, updates, trained groups, the cells of ``headings``, rate and audit."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2))
    table.add_column("run", no_wrap=True)
    for heading in ("updates", "groups", *headings, "updates/s"):
        table.add_column(heading, justify="right")
    table.add_column("audit")
    for r, cells in zip(results, rows, strict=True):
        groups = "" if r.summary.audit is None else r.summary.audit.groups
        updates, rate = f"{r.summary.train_steps} of {r.planned_updates}", _shown(r.updates_per_second, ".3f")
        style = "" if r.passed else "red"
        table.add_row(r.name, *map(str, (updates, groups, *cells)), rate, r.audit, style=style)
    console.print(table)


def _shown(value: float | None, spec: str = "") -> str:
    return "" if value is None else format(value, spec)


def _end(results: Sequence[DemoResult], things: str, console: Console) -> None:
    """Print the number of runs that passed, and exit with status 1 unless all did."""
    passed = sum(result.passed for result in results)
    style = "bold green" if passed == len(results) else "bold red"
    console.print(f"{passed} of {len(results)} {things}: all updates, audit green", style=style, highlight=False)
    raise typer.Exit(0 if passed == len(results) else 1)


if __name__ == "__main__":
    app()
