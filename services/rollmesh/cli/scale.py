"""``rollmesh scale``: replicas of a running run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.table import Table

from rollmesh.cli.common import JsonOption, RunFolderArgument, run_async, store_of
from rollmesh.config import RunConfig
from rollmesh.config.replica_bounds import SCALABLE, check_scale, configured_replicas
from rollmesh.errors import ConfigError
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.report.console import output_console
from rollmesh.runtime.capacity import check_capacity
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.store import TrajectoryStore

_DEFAULT = "default"


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("scale", rich_help_panel="Runs")(scale)


def scale(
    run: RunFolderArgument,
    replicas: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SERVICE=N]...",
            help="generator=3 reward=2 rollout=1; SERVICE=default goes back to the run file's number.",
        ),
    ] = None,
    as_json: JsonOption = False,
    force: Annotated[
        bool, typer.Option("--force", help="Ask even for more processes than this machine's cores and memory can take.")
    ] = False,
) -> None:
    """Change how many generators, reward services or rollout workers a run has while it trains.

    The launcher of the run starts what is missing and drains what is too much, highest index first; nothing is lost.
    The numbers survive a restart of the run. Without SERVICE=N, show them. On Kubernetes, scale the workloads instead.
    """

    async def main() -> None:
        async with store_of(run) as (config, folder, store):
            wishes = parse_replicas(config, replicas or ())
            asked = dict(await store.scale_requests())
            for service, number in wishes.items():
                if number is not None and not force:
                    check_capacity(config, asked, service, number)
                    asked[service] = number
            heard = [await store.request_scale(service, number) for service, number in wishes.items()]
            rows = await _rows(config, folder, store)
        if as_json:
            typer.echo(json.dumps(rows))
        else:
            _print(rows)
            if heard and not all(heard):
                typer.echo("no launcher runs this run now: it will start with these numbers", err=True)

    run_async(main)


def parse_replicas(config: RunConfig, words: Sequence[str]) -> dict[str, int | None]:
    """``service=number`` words; None for ``default``. ConfigError names the word that cannot be met."""
    wishes: dict[str, int | None] = {}
    for word in words:
        service, separator, number = word.partition("=")
        if not separator or not (number == _DEFAULT or number.isdecimal()):
            raise ConfigError(f"{word}: expected SERVICE=N or SERVICE={_DEFAULT}, for example generator=3")
        wishes[service] = None if number == _DEFAULT else int(number)
        check_scale(config, service, configured_replicas(config).get(service, 1) if number == _DEFAULT else int(number))
    return wishes


async def _rows(config: RunConfig, folder: RunFolder, store: TrajectoryStore) -> dict[str, Mapping[str, int]]:
    configured, asked = configured_replicas(config), await store.scale_requests()
    running = Counter(endpoint.service for endpoint in read_endpoints(folder.path))
    return {
        service: {
            "run_file": configured[service],
            "wanted": asked.get(service, configured[service]),
            "running": running[service],
        }
        for service in SCALABLE
    }


def _print(rows: Mapping[str, Mapping[str, int]]) -> None:
    table = Table("service", "run file", "wanted", "running")
    for service, row in rows.items():
        table.add_row(service, *map(str, (row["run_file"], row["wanted"], row["running"])))
    output_console().print(table)
