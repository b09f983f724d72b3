"""``rollmesh demo-schedules``: short runs of the demo under every preset."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from rollmesh.cli.common import EXIT_STOPPED, SetOption, clear_errors
from rollmesh.cli.up import InlineOption, run_to_report
from rollmesh.config import load_run_config
from rollmesh.errors import ConfigError, RollmeshError
from rollmesh.launcher.inline_services import INLINE_OVERRIDES
from rollmesh.report.console import output_console
from rollmesh.scheduling.companions import companion_settings
from rollmesh.scheduling.presets import PRESETS

if TYPE_CHECKING:
    from rollmesh.report.preset_results import PresetResult

_WITHOUT_OVERRIDES = ("schedule.pool_size=null", "schedule.max_staleness=null", "evaluation.before_and_after=false")
_ONE_REPLICA = ("generator.replicas=1",)


def demo_schedules(
    preset: Annotated[list[str] | None, typer.Option("--preset", help="Presets to run; all by default.")] = None,
    updates: Annotated[int, typer.Option(help="Train steps of each run.", min=2)] = 6,
    folder: Annotated[Path | None, typer.Option("--folder", help="Parent of the run folders.")] = None,
    set_: SetOption = None,
    inline: InlineOption = False,
) -> None:
    """Run the demo's task under every preset of `rollmesh schedules`, with the settings that go with it.

    Prints one row per preset. Exits with status 1 unless every run makes all its updates and its audit is green.
    """
    from rollmesh.config.recipes import recipe_file
    from rollmesh.report.preset_results import preset_table

    root = folder or Path("runs/demo-schedules")
    console, results = output_console(), []
    with clear_errors():
        for name in _known(preset or list(PRESETS)):
            overrides = [*_WITHOUT_OVERRIDES, *(INLINE_OVERRIDES + _ONE_REPLICA if inline else ())]
            overrides += [*companion_settings(PRESETS[name]), *(set_ or ()), f"schedule.preset={name}"]
            overrides += [f"trainer.train_steps={updates}", f"name=demo-{name.replace('_', '-')}"]
            console.print(name, style="bold", highlight=False)
            path = root / name
            continued = (path / "metrics.jsonl").exists()
            accepted = _run(
                recipe_file("countdown", "demo.yaml"), [*overrides, f"folder={path}"], console, inline=inline
            )
            results.append(_result(path, name, updates, accepted=accepted, continued=continued))
        console.print(preset_table(results))
        for result in results:
            for sentence in result.waste:
                console.print(f"{result.preset}: {sentence}", highlight=False, soft_wrap=True)
        passed = sum(result.passed for result in results)
        style = "bold green" if passed == len(results) else "bold red"
        console.print(f"{passed} of {len(results)} schedules: all updates, audit green", style=style, highlight=False)
    raise typer.Exit(0 if passed == len(results) else 1)


def _known(names: list[str]) -> list[str]:
    if unknown := [name for name in names if name not in PRESETS]:
        raise ConfigError(f"--preset {unknown[0]}: not a preset; known: {', '.join(PRESETS)}")
    return names


def _result(path: Path, preset: str, updates: int, *, accepted: bool, continued: bool) -> PresetResult:
    """Read a run's row: failed if the run was refused, and without a rate if it has steps of an earlier command."""
    from rollmesh.report.preset_results import preset_result

    path.mkdir(parents=True, exist_ok=True)
    result = preset_result(path, preset, updates)
    result = replace(result, updates_per_second=None) if continued else result
    return result if accepted else replace(result, audit="refused")


def _run(file: Path, overrides: list[str], console: Console, *, inline: bool) -> bool:
    """Run one preset and print why it failed; False for a run whose folder or settings are refused."""
    config = load_run_config(file, overrides)
    try:
        status = run_to_report(config, console, inline=inline)
    except RollmeshError as error:
        console.print(f"[red]error[/red] {escape(str(error))}", highlight=False, soft_wrap=True)
        return not isinstance(error, ConfigError)
    if status == EXIT_STOPPED:
        raise typer.Exit(status)
    return True
