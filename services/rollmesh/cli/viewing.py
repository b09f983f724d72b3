"""``rollmesh view``: the page of a run that has ended; ``rollmesh compare``: a table of several."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.common import RunFolderArgument, clear_errors, run_async, run_of, shutdown_event
from rollmesh.errors import ConfigError
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.report.console import output_console
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.runtime.locks import has_launcher


def view(
    run: RunFolderArgument,
    port: Annotated[
        int, typer.Option(help="Port of the page on this machine; 0 picks a free one.", min=0, max=65535)
    ] = 0,
    beside: Annotated[
        Path | None,
        typer.Option(
            help="Run folder of a second run, whose curves are drawn beside; those of a run in progress end at the "
            "start of this command.",
            metavar="RUN_FOLDER",
        ),
    ] = None,
    open_: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Open the page of a run that has ended, read-only: curves, versions, trained trajectories, audit, report.

    Needs the run folder only, no Redis and no service.

    Example: `rollmesh view runs/demo --open`
    """
    from rollmesh.report.view.view_server import serve_view

    def ready(link: str) -> None:
        typer.echo(f"the run as a page: {link}\nCtrl-C ends it")
        if open_:
            webbrowser.open(link)

    async def main() -> None:
        other = None if beside is None else RecordedRun(run_of(beside)[1].path)
        config, folder = run_of(run)  # last: modules of this run are found, not those of the other one
        _refuse_live(folder)
        await serve_view(RecordedRun(folder.path), config, port, shutdown_event(), ready, other)

    run_async(main)


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, two or more.", metavar="RUN_FOLDER RUN_FOLDER...")],
) -> None:
    """Print a table of runs: score before and after, train steps, time, tokens, staleness, audit, and their difference.

    The difference is that of the first run to each other one, after training. A run in progress counts as it is now.

    Example: `rollmesh compare runs/copris runs/sync`
    """
    from rollmesh.report.compare import compare as compared
    from rollmesh.report.compare import print_comparison

    with clear_errors():
        folders = [run_of(run)[1].path for run in runs]
        if len(set(folders)) < 2 or len(set(folders)) < len(folders):
            raise ConfigError(f"compare {' '.join(map(str, runs))}: give two or more runs, each of them once")
        names = [folder.name for folder in folders]
        labels = names if len(set(names)) == len(names) else list(map(str, folders))
        print_comparison(
            compared({label: [path] for label, path in zip(labels, folders, strict=True)}), output_console()
        )


def _refuse_live(folder: RunFolder) -> None:
    """Raise ConfigError for a run in progress, with the address of its own page."""
    if not has_launcher(folder.path):
        return
    pages = [page.url for page in read_endpoints(folder.path, "gateway")]
    where = f"its page: {pages[0]}" if pages else "it has no page (gateway.enabled)"
    raise ConfigError(f"{folder.path}: the run is in progress; {where}; rollmesh status {folder.path} shows its state")
