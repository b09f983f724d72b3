"""``rollmesh top``: the command; ``top_terminal`` draws."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.common import JsonOption, run_async

RunOption = Annotated[Path | None, typer.Argument(help="Run folder (or a run file).", metavar="[RUN_FOLDER]")]
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

    q quits, p pauses and resumes the run (with the token of the run folder, or ROLLMESH_GATEWAY__TOKEN).
    """
    # The models of the gateway's responses take a tenth of a second to import, which no service needs.
    from rollmesh.cli.top_terminal import show

    async def main() -> None:
        await show(run, url, once=once, as_json=as_json, interval=interval)

    run_async(main)
