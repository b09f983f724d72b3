"""``rollmesh dead-letters``: trajectories that could not be finished, with the reasons."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer
from rich.table import Table

from rollmesh.cli.common import JsonOption, RunFolderArgument, run_async, store_of
from rollmesh.cli.plain_help import PlainGroup
from rollmesh.errors import Conflict
from rollmesh.report.console import output_console

app = typer.Typer(help="List, inspect, replay and delete dead letters.", no_args_is_help=True, cls=PlainGroup)

IdArgument = Annotated[str, typer.Argument(help="Trajectory id, as listed.", metavar="TRAJECTORY_ID")]


@app.command("list")
def list_letters(run: RunFolderArgument, as_json: JsonOption = False) -> None:
    """List dead letters with their reasons.

    Example: `rollmesh dead-letters list runs/demo`
    """

    async def main() -> None:
        async with store_of(run) as (_, _, store):
            # The newest is last, so that it stays visible in a terminal.
            letters = (await store.dead_letters.newest())[::-1]
        if as_json:
            typer.echo(json.dumps([asdict(letter) for letter in letters]))
            return
        table = Table("trajectory", "group", "reason", "attempts", "tokens", title=f"{len(letters)} dead letters")
        for letter in letters:
            row = (letter.trajectory_id, letter.group_id, letter.reason, letter.attempts, letter.token_count)
            table.add_row(*map(str, row))
        output_console().print(table)

    run_async(main)


@app.command()
def inspect(run: RunFolderArgument, trajectory_id: IdArgument) -> None:
    """Print all fields of one dead letter as JSON.

    Example: `rollmesh dead-letters inspect runs/demo e0-12.3`
    """

    async def main() -> None:
        async with store_of(run) as (_, _, store):
            letter = await store.dead_letters.get(trajectory_id)
        typer.echo(json.dumps(asdict(letter), indent=2, default=str))

    run_async(main)


@app.command()
def replay(run: RunFolderArgument, trajectory_id: IdArgument) -> None:
    """Return the prompt of a dead letter to the run, as a new group that records its origin.

    Example: `rollmesh dead-letters replay runs/demo e0-12.3`
    """

    async def main() -> None:
        async with store_of(run) as (_, _, store):
            group_id = await store.dead_letters.replay(trajectory_id)
        typer.echo(f"{trajectory_id} replayed as group {group_id}, when the run has capacity for it")

    run_async(main)


@app.command()
def delete(run: RunFolderArgument, trajectory_id: IdArgument) -> None:
    """Delete a dead letter and its payload, which occupies memory in Redis.

    Example: `rollmesh dead-letters delete runs/demo e0-12.3`
    """

    async def main() -> None:
        async with store_of(run) as (_, _, store):
            if not await store.dead_letters.delete(trajectory_id):
                raise Conflict(f"no dead letter {trajectory_id}")
        typer.echo(f"{trajectory_id} deleted")

    run_async(main)
