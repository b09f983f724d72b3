"""``rollmesh config``: validate, show, schema, and the methods and schedules that a run file can name."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

import typer

from rollmesh.cli.common import PlainGroup, RunFileArgument, SetOption, clear_errors, load_run, run_of
from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.curriculum import CURRICULUM_POINTS
from rollmesh.config.methods import Method, Point
from rollmesh.config.sft_config import SftConfig
from rollmesh.config.trainer import TRAINER_POINTS
from rollmesh.config.yaml_text import dump_yaml
from rollmesh.errors import ConfigError
from rollmesh.preflight.run_checks import check_run
from rollmesh.report.console import output_console, print_line
from rollmesh.runtime.capacity import check_configured, this_machine
from rollmesh.scheduling.axes import AdmissionRule, CutOrder, Harvest, StartOrder
from rollmesh.scheduling.presets import PRESETS, Preset

Simulate = Annotated[bool, typer.Option("--simulate", help="Simulate the first train steps on assumed devices.")]
With = Annotated[
    list[str] | None, typer.Option("--with", help="Simulation setting, repeatable: --with gpu=H200; docs/simulator.md")
]
app = typer.Typer(
    help="Validate, show or describe run files, and what they can name.", no_args_is_help=True, cls=PlainGroup
)
POINTS: Mapping[str, Point[Any]] = MappingProxyType({**CURRICULUM_POINTS, **TRAINER_POINTS})
"""Points by the field of ``curriculum`` or ``trainer.algorithm`` that names a method; budget is its two budgets, and
replay is ``trainer.replay``."""


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
        if simulate:
            from rollmesh.sim.arms import prediction
            from rollmesh.sim.simulation_setup import SimulationSetup, parse_items

            notes.append(prediction(config, parse_items("--with", SimulationSetup, with_ or [])))
    console = output_console()
    console.print(f"{run}: valid", highlight=False, markup=False)
    console.print(checks.estimate.table())
    for note in notes:
        print_line(console, note)


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
def schema(
    sft: Annotated[bool, typer.Option("--sft", help="Schema of the run files of rollmesh sft.")] = False,
) -> None:
    """Print the JSON Schema of run files, for editors.

    Example: `rollmesh config schema`
    """
    typer.echo(json.dumps((SftConfig if sft else RunConfig).model_json_schema(), indent=2))


@app.command()
def methods() -> None:
    """Print the methods of `curriculum`, `trainer.algorithm` and `trainer.replay`: options, source, deviation.

    Those of `curriculum`, advantage, loss and masks may also be `module:function` of your code.

    Example: `rollmesh config methods`
    """
    for point, found in POINTS.items():
        for name, method in found.methods.items():
            typer.secho(f"{point}: {name}", bold=True)
            if options := option_defaults(method):
                typer.echo(f"  options: {', '.join(options)}")
            typer.echo(f"  source: {method.source}")
            if method.deviation:
                typer.echo(f"  differs: {method.deviation}")


@app.command()
def schedules() -> None:
    """Print the schedules that `schedule.preset` names: numbers, source, deviations, use, cost, companion settings.

    B is `schedule.groups_per_batch`, n is `schedule.group_size`, the trajectories of a prompt. Every number can be
    overridden in the run file.

    Example: `rollmesh config schedules`
    """
    for name, preset in PRESETS.items():
        typer.secho(name, bold=True)
        typer.echo(f"  {', '.join(numbers(preset))}")
        typer.echo(f"  source: {preset.source}")
        if preset.deviation:
            typer.echo(f"  differs: {preset.deviation}")
        typer.echo(f"  use: {preset.use}")
        typer.echo(f"  cost: {preset.cost}")
        if preset.goes_with:
            typer.echo(f"  goes with: {preset.goes_with}")


def option_defaults(method: Method) -> list[str]:
    """Return the options of a method, each with its default or ``required``."""
    return [
        f"{name} ({'required' if field.is_required() else json.dumps(field.get_default(call_default_factory=True))})"
        for name, field in method.options.model_fields.items()
    ]


def method_settings() -> dict[str, list[str]]:
    """Return the ``a.b=c`` overrides with which the demo trains each method, by ``point/method``."""
    return {
        f"{point.field.removesuffix('.by').rpartition('.')[2]}/{name}": [
            f"{field}={json.dumps(value)}" for field, value in point.example(name).items()
        ]
        for point in POINTS.values()
        for name in point.methods
    }


def numbers(preset: Preset) -> list[str]:
    """Return the fields of the run file that a preset sets, with their values in B and n."""
    window = preset.max_staleness + 1 if preset.window_batches is None else preset.window_batches
    size = "n" if preset.harvest is Harvest.GROUP else "1"
    members = size if not preset.spare_member_share else f"{1 + preset.spare_member_share:g} {size}"
    pool = window if preset.pool_batches is None else preset.pool_batches
    optional = {
        f"harvest {preset.harvest}": preset.harvest is not Harvest.GROUP,
        f"wave_batches {preset.wave_batches}": preset.admission is AdmissionRule.WAVE,
        f"spare_groups {preset.spare_batches:g} B": preset.spare_batches,
        f"spare_members {preset.spare_member_share:g} n": preset.spare_member_share,
        f"segment_tokens max_new_tokens / {preset.segments}": preset.segments,
        f"part_groups B / {preset.parts}": preset.parts,
        f"start_order {preset.start_order}": preset.start_order is not StartOrder.ADMISSION,
        f"cut_order {preset.cut_order}": preset.cut_order is not CutOrder.ADMISSION,
        "barrier": preset.barrier,
    }
    return [
        f"admission {preset.admission}",
        f"max_staleness {preset.max_staleness}",
        f"window_groups {window:g} B",
        f"pool_size {'auto, at most ' if preset.auto_pool else ''}{pool:g} B * {members}",
        f"on_stale {preset.on_stale}",
        *(text for text, shown in optional.items() if shown),
    ]
