"""``rollmesh config``: validate, show, schema."""

from __future__ import annotations

import json

import typer
import yaml

from rollmesh.cli.common import RunFileArgument, SetOption, clear_errors
from rollmesh.config import RunConfig, load_run_config
from rollmesh.launcher.preflight import check_run
from rollmesh.report.console import output_console

app = typer.Typer(help="Validate, show or describe run files.", no_args_is_help=True)


@app.command()
def validate(run: RunFileArgument, set_: SetOption = None) -> None:
    """Check a run file and print the estimate of the run: pool, expected staleness, memory of the queue."""
    with clear_errors():
        config = load_run_config(run, set_ or ())
        table = check_run(config).table()
    console = output_console()
    console.print(f"{run}: valid", highlight=False)
    console.print(table)


@app.command()
def show(run: RunFileArgument, set_: SetOption = None) -> None:
    """Print the resolved run file: every field, including defaults and overrides, with secrets masked."""
    with clear_errors():
        config = load_run_config(run, set_ or ())
    typer.echo(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON Schema of run files, for editors."""
    typer.echo(json.dumps(RunConfig.model_json_schema(), indent=2))
