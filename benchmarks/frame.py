"""Frame of every bench: its ``run`` becomes a command that prints the measures and checks their bars."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.measure import Measure, missed
from rollmesh.cli.common import clear_errors
from rollmesh.report.console import output_console

Quick = Annotated[bool, typer.Option("--quick", help="Fewer repetitions, to check that it runs.")]
_Json = Annotated[bool, typer.Option("--json", help="Print an object of JSON a measure instead of the table.")]
_Check = Annotated[bool, typer.Option("--check", help="Exit with status 1 when a bar is missed.")]


def run_command(run: Callable[..., list[Measure]], title: str, text: str | None) -> None:
    """Run a bench as the command of this process; its options are the parameters of ``run``, ``text`` is its help."""

    def command(as_json: bool, check: bool, **options: object) -> None:
        with clear_errors():
            measures = run(**options)
        _report(measures, title, as_json=as_json, check=check)

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


def _report(measures: Sequence[Measure], title: str, *, as_json: bool, check: bool) -> None:
    if as_json:
        for measure in measures:
            typer.echo(json.dumps(measure.figures()))
    else:
        output_console().print(measures_table(measures, title))
    if check and (lines := missed(measures)):
        console = Console(stderr=True, soft_wrap=True)
        for line in lines:
            console.print(Text(f"missed: {line}", style="red"))
        raise typer.Exit(1)


def measures_table(measures: Sequence[Measure], title: str) -> Table:
    """Return a table with one row per measure and its bars."""
    table = Table("measure", "value", "unit", "baseline", "baseline value", "ratio", "bar", title=title)
    for m in measures:
        ratio = "" if m.ratio is None else f"{m.ratio:.2f}"
        base = "" if m.baseline_value is None else f"{m.baseline_value:,.3f}"
        bars = Text(", ").join(Text(str(bar), style="" if bar.reached_by(m) else "red") for bar in m.bars)
        if missed([m]):
            bars.append(": MISSED", style="red")
        table.add_row(m.name, f"{m.value:,.3f}", m.unit, m.baseline or "", base, ratio, bars)
    return table
