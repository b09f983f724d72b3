"""Frame of every bench: figures beside their baselines, the bars that they must reach, and the command around them."""

import inspect
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollmesh.cli.common import clear_errors
from rollmesh.report.console import output_console

Figure = Literal["ratio", "value"]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer repetitions, to check that it runs.")]
_Json = Annotated[bool, typer.Option("--json", help="Print an object of JSON a measure instead of the table.")]
_Check = Annotated[bool, typer.Option("--check", help="Exit with status 1 when a bar is missed.")]


@dataclass(frozen=True, slots=True)
class Bar:
    """Requirement for a figure of a measure."""

    figure: Figure
    direction: Literal[">=", "<="]
    limit: float

    def __str__(self) -> str:
        """Return text like ``ratio >= 2.5``."""
        return f"{self.figure} {self.direction} {self.limit:,g}"

    def reached_by(self, measure: "Measure") -> bool:
        """Return True if the figure is known and on the required side."""
        found = getattr(measure, self.figure)
        if found is None:
            return False
        return bool(found >= self.limit if self.direction == ">=" else found <= self.limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Figure and, optionally, its baseline from the same run."""

    name: str
    value: float
    unit: str
    baseline: str | None = None
    """Name of the baseline."""
    baseline_value: float | None = None
    ratio: float | None = None
    """Quotient value / baseline_value: above 1 is better for a rate, below 1 for a cost."""
    bars: tuple[Bar, ...] = ()

    def figures(self) -> dict[str, str | float | None]:
        """Return the fields that ``--json`` prints: all but the bars."""
        return {name: value for name, value in asdict(self).items() if name != "bars"}


def compared(
    name: str, value: float, unit: str, baseline: str, baseline_value: float, bars: tuple[Bar, ...] = ()
) -> Measure:
    """Return a measure with its baseline and their ratio."""
    ratio = value / baseline_value if baseline_value else None
    return Measure(
        name=name, value=value, unit=unit, baseline=baseline, baseline_value=baseline_value, ratio=ratio, bars=bars
    )


def at_least(figure: Figure, limit: float) -> Bar:
    """Return a lower bound, for a rate."""
    return Bar(figure, ">=", limit)


def at_most(figure: Figure, limit: float) -> Bar:
    """Return an upper bound, for a cost or a count."""
    return Bar(figure, "<=", limit)


NONE = (at_most("value", 0.0),)
"""Bars of a count that must be 0."""


def missed(measures: Iterable[Measure]) -> list[str]:
    """Return a line for each bar that a measure misses, with the measured value."""

    def shown(value: float | None) -> str:
        return "unknown" if value is None else f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.4g}"

    return [
        f"{measure.name}: {bar.figure} {shown(getattr(measure, bar.figure))}, the bar is {bar.direction} {bar.limit:,g}"
        for measure in measures
        for bar in measure.bars
        if not bar.reached_by(measure)
    ]


def interleaved(work: Mapping[str, Callable[[], object]], repetitions: int, *, warm_up: int = 1) -> dict[str, float]:
    """Return the median process CPU seconds of each function; all run in turn, so that a busy machine slows all.

    The first ``warm_up`` rounds are not measured.
    """
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(warm_up + repetitions):
        for name, function in work.items():
            start = time.process_time()
            function()
            taken[name].append(time.process_time() - start)
    return {name: statistics.median(values[warm_up:]) for name, values in taken.items()}


def run_command(run: Callable[..., list[Measure]], title: str, text: str | None) -> None:
    """Run a bench as the command of this process; its options are the parameters of ``run``, ``text`` is its help."""

    def command(as_json: bool, check: bool, **options: object) -> None:
        with clear_errors():
            measures = run(**options)
        if as_json:
            for measure in measures:
                typer.echo(json.dumps(measure.figures()))
        else:
            output_console().print(_table(measures, title))
        if check and (lines := missed(measures)):
            console = Console(stderr=True, soft_wrap=True)
            for line in lines:
                console.print(Text(f"missed: {line}", style="red"))
            raise typer.Exit(1)

    signature = inspect.signature(run, eval_str=True)
    common = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
        for name, kind in (("as_json", _Json), ("check", _Check))
    ]
    command.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), *common], return_annotation=None
    )
    command.__annotations__ = {}
    app = typer.Typer(
        context_settings={"help_option_names": ["-h", "--help"]},
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
    )
    app.command(help=text)(command)
    app(prog_name=title)


def _table(measures: Sequence[Measure], title: str) -> Table:
    table = Table("measure", "value", "unit", "baseline", "baseline value", "ratio", "bar", title=title)
    for m in measures:
        ratio = "" if m.ratio is None else f"{m.ratio:.2f}"
        base = "" if m.baseline_value is None else f"{m.baseline_value:,.3f}"
        bars = Text(", ").join(Text(str(bar), style="" if bar.reached_by(m) else "red") for bar in m.bars)
        if missed([m]):
            bars.append(": MISSED", style="red")
        table.add_row(m.name, f"{m.value:,.3f}", m.unit, m.baseline or "", base, ratio, bars)
    return table
