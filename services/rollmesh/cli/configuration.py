"""``rollmesh config``: validate, show, schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.common import RunFileArgument, SetOption, clear_errors, load_run, run_of
from rollmesh.cli.plain_help import PlainGroup
from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.yaml_text import dump_yaml
from rollmesh.errors import ConfigError
from rollmesh.preflight.run_checks import check_run
from rollmesh.report.console import output_console
from rollmesh.runtime.capacity import check_configured, this_machine

Simulate = Annotated[bool, typer.Option("--simulate", help="Simulate the first train steps on assumed devices.")]
With = Annotated[
    list[str] | None, typer.Option("--with", help="Simulation setting, repeatable: --with gpu=H200; docs/simulator.md")
]
app = typer.Typer(help="Validate, show or describe run files.", no_args_is_help=True, cls=PlainGroup)


@app.command()
def validate(run: RunFileArgument, set_: SetOption = None, simulate: Simulate = False, with_: With = None) -> None:
    """Check a run file and print the estimate of the run: pool, expected staleness, memory of the queue.

    It opens the model, reads the first rows, and scores one answer with the verifier, like the start of `rollmesh up`.
    With `--simulate` also updates per second, staleness and the trainer's wait on a virtual clock.

    Example: `rollmesh config validate run.yaml`
    """
    with clear_errors():
        if with_ and not simulate:
            raise ConfigError(f"--with {with_[0]}: a setting of the simulation; add --simulate")
        config = load_run(run, set_ or ())
        checks = check_run(config, asks_redis=True)
        sentences = (checks.memory.sentence(), checks.memory.adapter_sentence(), checks.memory.largest_models())
        notes = [*filter(None, sentences), *checks.notes, *_capacity_hint(config)]
        predicted = _prediction(config, with_ or []) if simulate else None
    console = output_console()
    console.print(f"{run}: valid", highlight=False, markup=False)
    console.print(checks.estimate.table())
    for note in notes:
        console.print(note, markup=False, highlight=False, soft_wrap=True)
    if predicted is not None:
        console.print(predicted, markup=False, highlight=False, soft_wrap=True)


def _capacity_hint(config: RunConfig) -> list[str]:
    """Return what `rollmesh up` would refuse without `--force` on this machine; the run may be for another one."""
    try:
        if config.network.shared_folder:
            check_configured(config, this_machine())
    except ConfigError as error:
        return [f"hint: on this machine rollmesh up refuses {error}"]
    return []


@app.command()
def show(
    run: Annotated[Path, typer.Argument(help="Run file (YAML), or a run folder.", metavar="RUN")],
    set_: SetOption = None,
) -> None:
    """Print the resolved run file: every field, including defaults and overrides, with secrets masked.

    Example: `rollmesh config show runs/demo`
    """
    with clear_errors():
        config = load_run_config(run_of(run)[1].config_file if run.is_dir() else run, set_ or ())
    typer.echo(dump_yaml(config.model_dump(mode="json")), nl=False)


@app.command()
def schema() -> None:
    """Print the JSON Schema of run files, for editors.

    Example: `rollmesh config schema`
    """
    typer.echo(json.dumps(RunConfig.model_json_schema(), indent=2))


def _prediction(config: RunConfig, settings: list[str]) -> str:
    from rollmesh.sim.arms import parse_setup, prediction

    return prediction(config, parse_setup(settings))
