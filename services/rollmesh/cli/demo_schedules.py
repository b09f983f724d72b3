"""``rollmesh demo-schedules``: short runs of the demo under every preset."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.common import SetOption, clear_errors
from rollmesh.cli.demo_runs import DemoRuns, print_count
from rollmesh.cli.up import InlineOption
from rollmesh.errors import ConfigError
from rollmesh.report.console import run_console
from rollmesh.scheduling.companions import companion_settings
from rollmesh.scheduling.presets import PRESETS


def demo_schedules(
    preset: Annotated[list[str] | None, typer.Option("--preset", help="Presets to run; all by default.")] = None,
    updates: Annotated[int, typer.Option(help="Train steps of each run.", min=2)] = 6,
    folder: Annotated[Path | None, typer.Option("--folder", help="Parent of the run folders.")] = None,
    set_: SetOption = None,
    inline: InlineOption = False,
) -> None:
    """Run the demo's task under every preset of `rollmesh schedules`, with the settings that go with it.

    Prints one row per preset. Exits with status 1 unless every run makes all its updates and its audit is green.

    Example: `rollmesh demo-schedules --preset sync --preset copris`
    """
    from rollmesh.report.demo_results import preset_table

    console = run_console()
    demos = DemoRuns(root=folder or Path("runs/demo-schedules"), updates=updates, settings=set_ or (), inline=inline)
    with clear_errors():
        results = demos.results({name: _settings(name) for name in preset or PRESETS}, console)
    console.print(preset_table(results))
    for result in results:
        for sentence in result.waste:
            console.print(f"{result.name}: {sentence}", highlight=False, soft_wrap=True)
    print_count(results, "schedules", console)


def _settings(name: str) -> list[str]:
    if name not in PRESETS:
        raise ConfigError(f"--preset {name}: not a preset; known: {', '.join(PRESETS)}")
    return [*companion_settings(PRESETS[name]), f"schedule.preset={name}"]
