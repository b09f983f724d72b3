"""``rollmesh sim``: simulate a run file, compare schedules, sweep a field."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from rollmesh.cli.common import JsonOption, SetOption, clear_errors
from rollmesh.errors import ConfigError
from rollmesh.report.console import output_console, print_line

if TYPE_CHECKING:
    from rollmesh.sim.arms import Arm

RunFile = Annotated[Path | None, typer.Argument(help="Run file; default: a 7B model.", metavar="RUN.yaml")]
Compare = Annotated[
    str | None, typer.Option(help="Presets, separated by commas; every preset without a list.", metavar="A,B,...")
]
Sweep = Annotated[str | None, typer.Option(help="Field of the run file and its values: schedule.pool_size=256,512")]
Lengths = Annotated[str | None, typer.Option(help="Lengths of responses: a name, a run folder or a trace file.")]
Export = Annotated[
    Path | None,
    typer.Option(help="Print the length trace of a run folder, and simulate nothing.", metavar="RUN_FOLDER"),
]
PageFile = Annotated[Path | None, typer.Option(help="Write charts of all arms into this file.", metavar="FILE.html")]
With = Annotated[
    list[str] | None, typer.Option("--with", help="Simulation setting, repeatable: --with trainer_devices=16")
]
Fail = Annotated[list[str] | None, typer.Option(help="Failure, repeatable: --fail deaths_per_hour=1")]
Gpu = Annotated[str | None, typer.Option(help="GPU of the table.")]
Model = Annotated[str | None, typer.Option(help="Model of the table, or a Hugging Face folder.")]
Check = Annotated[bool, typer.Option("--check", help="Check every promise of the scheduler; status 2 if one fails.")]
Long = Annotated[bool, typer.Option("--long", help="Allow more than 10^8 events.")]
Scale = Annotated[bool, typer.Option("--scale", help="Simulate 1,000 generators, and print what the simulation costs.")]
Calibrate = Annotated[
    Path | None,
    typer.Option(help="Run whose times and lengths, and run file without RUN.yaml, to take.", metavar="RUN_FOLDER"),
]


class SimCommand(TyperCommand):
    """Command ``sim``, with ``--compare`` alone for all presets: options of typer need a value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Add the missing value of ``--compare``."""
        pairs = pairwise([*args, "-"])
        completed = ([one, "all"] if one == "--compare" and next_.startswith("-") else [one] for one, next_ in pairs)
        return super().parse_args(ctx, list(chain.from_iterable(completed)))


def sim(
    run: RunFile = None,
    compare: Compare = None,
    sweep: Sweep = None,
    gpu: Gpu = None,
    model: Model = None,
    calibrate: Calibrate = None,
    lengths: Lengths = None,
    with_: With = None,
    fail: Fail = None,
    set_: SetOption = None,
    as_json: JsonOption = False,
    check: Check = False,
    long: Long = False,
    scale: Scale = False,
    page: PageFile = None,
    export: Export = None,
) -> None:
    """Simulate a run on a virtual clock: the mesh's scheduler, router and queue with models of everything else.

    All that is assumed is printed below the figures; docs/simulator.md explains it. Equal settings give equal output.

    Example: `rollmesh sim run.yaml --compare copris,sync`
    """
    from rollmesh.sim.arms import arms_of
    from rollmesh.sim.length_trace import trace_of_run

    short = {"gpu": gpu, "model": model, "lengths": lengths}
    others: dict[str, object] = {"RUN.yaml": run, "--compare": compare, "--sweep": sweep, "--fail": fail, "--set": set_}
    others |= {f"--{name}": value for name, value in {**short, "calibrate": calibrate}.items()}
    others |= {"--check": check, "--long": long, "--scale": scale, "--page": page}
    with clear_errors():
        if export is not None:
            _refuse("--export", {**others, "--with": with_, "--json": as_json}, "it simulates nothing; give it alone")
            for trajectory in trace_of_run(export):
                typer.echo(trajectory.line())
            return
        settings = _settings(with_ or [], short)
        arms = arms_of(
            run,
            set_ or [],
            settings,
            fail or [],
            compare=compare,
            sweep=sweep,
            is_long=long,
            is_at_scale=scale,
            calibrate=calibrate,
        )
        _simulate(arms, page, check=check, as_json=as_json, with_cost=scale)


def _refuse(option: str, others: Mapping[str, object], remedy: str) -> None:
    if given := [name for name, value in others.items() if value not in (None, False, [])]:
        raise ConfigError(f"{option} with {', '.join(given)}: {remedy}")


def _settings(with_: Sequence[str], short: Mapping[str, str | None]) -> list[str]:
    """Return the settings of ``--with`` and of its short forms. Raises ConfigError for an empty or a second value."""
    given = {name: value for name, value in short.items() if value is not None}
    for name, value in given.items():
        if not value.strip():
            raise ConfigError(f"--{name}={value!r}: empty; give a value, or leave it out")
        same = [item for item in with_ if item.partition("=")[0] == name]
        _refuse(f"--{name} {value}", {f"--with {item}": True for item in same}, "give one of them")
    return [*with_, *(f"{name}={value}" for name, value in given.items())]


def _simulate(arms: "Sequence[Arm]", page: Path | None, *, check: bool, as_json: bool, with_cost: bool) -> None:
    from rollmesh.sim.arms import simulate_at_cost
    from rollmesh.sim.figures import figures_tables
    from rollmesh.sim.run_timeline import RunTimeline

    if page is not None:  # the models of the page take a tenth of a second to import
        from rollmesh.sim.simulation_page import DrawnArm, check_target, write_simulation_page

        check_target(page)
    results, costs, drawn = [], [], []
    for arm in arms:
        timeline = RunTimeline() if page else None
        found, cost = simulate_at_cost(arm, check=check, timeline=timeline)
        if timeline is not None:
            drawn.append(DrawnArm(arm, found, timeline))
        results.append((arm.name, found))
        costs.append(cost)
        if as_json:
            of_scale = {"cost": asdict(cost)} if with_cost else {}
            typer.echo(json.dumps({"arm": arm.name, **asdict(found), **of_scale, "assumed": arm.assumed}))
    if page is not None:
        write_simulation_page(drawn, page)
    if not as_json:
        console = output_console()
        for table in figures_tables(results, console.width):
            console.print(table)
        console.print(_assumed(arms), markup=False, highlight=False)
        for arm, cost in zip(arms, costs, strict=True) if with_cost else ():
            print_line(console, f"{arm.name}: {cost.sentence()}")


def _assumed(arms: "Sequence[Arm]") -> str:
    """Return what all arms assume, and what single ones do in another way."""
    common = {name: value for name, value in arms[0].assumed.items() if all(a.assumed.get(name) == value for a in arms)}
    hint = "" if "calibrated_on" in common else " (--calibrate RUN_FOLDER takes the times of a run instead)"
    lines = [f"assumed{hint}: " + ", ".join(f"{name}={value}" for name, value in common.items())]
    for arm in arms:
        if own := [f"{name}={value}" for name, value in arm.assumed.items() if name not in common]:
            lines.append(f"assumed for {arm.name}: {', '.join(own)}")
    return "\n".join(lines)
