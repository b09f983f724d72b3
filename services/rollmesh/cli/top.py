"""``rollmesh top``: the command; ``top_terminal`` draws."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from rollmesh.cli.common import JsonOption, run_async, run_of
from rollmesh.launcher.run_folder import has_launcher
from rollmesh.report.console import output_console
from rollmesh.report.run_ending import ending
from rollmesh.runtime.endpoints import read_endpoints

RunOption = Annotated[Path | None, typer.Argument(help="Run folder (or a run file).", metavar="RUN_FOLDER")]
UrlOption = Annotated[str | None, typer.Option(help="Address of the gateway, instead of a run folder.")]
OnceOption = Annotated[bool, typer.Option("--once", help="Print one screen and exit.")]
IntervalOption = Annotated[float, typer.Option(help="Seconds between two updates.", min=0.2, max=60.0)]


def top(
    run: RunOption = None,
    url: UrlOption = None,
    once: OnceOption = False,
    as_json: JsonOption = False,
    interval: IntervalOption = 1.0,
) -> None:
    """Watch a run in the terminal: queue, staleness, generators, curves, the oldest rollouts in flight.

    For a run that is not in progress, show its result.

    q quits, p pauses and resumes the run (with the token of the run folder, or ROLLMESH_GATEWAY__TOKEN).

    Example: `rollmesh top runs/demo`
    """
    # The models of the gateway's responses take a tenth of a second to import, which no service needs.
    from rollmesh.cli.top_terminal import show

    async def main() -> None:
        if run is not None and url is None and not as_json and (ended := _ended(run)):
            output_console().print(ended)
            return
        await show(run, url, once=once, as_json=as_json, interval=interval)

    run_async(main)


def _ended(run: Path) -> Table | None:
    """Return the result of a run that is not in progress on this machine; None for any other run."""
    config, folder = run_of(run)
    if not config.network.shared_folder or has_launcher(folder.path) or read_endpoints(folder.path, "gateway"):
        return None
    table = Table(title=f"run {config.name}", title_justify="left", show_header=False, box=None)
    for name, value in ending(folder.path):
        table.add_row(Text(name, style="dim"), Text(value))
    return table
