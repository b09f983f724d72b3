"""``rollmesh scale``: replicas of a running run."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated

import typer
from rich.table import Table

from rollmesh.cli.common import JsonOption, RunFolderArgument, check_unless_forced, run_async, store_of
from rollmesh.config import RunConfig
from rollmesh.config.replica_bounds import SCALABLE, check_scale, configured_replicas
from rollmesh.errors import ConfigError
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.report.console import output_console
from rollmesh.runtime.capacity import check_capacity
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.store import TrajectoryStore

_DEFAULT = "default"


def scale(
    run: RunFolderArgument,
    replicas: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SERVICE=N",
            help="generator=3 reward=2 rollout=1; SERVICE=default restores the number in the run file.",
        ),
    ] = None,
    as_json: JsonOption = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Allow more processes than this machine's cores and memory can take, without a question."
        ),
    ] = False,
) -> None:
    """Change the number of generators, reward services or rollout workers of a run while it trains.

    The launcher of the run starts missing replicas and drains surplus replicas, highest index first; no work is lost.
    The numbers survive a restart of the run. Without SERVICE=N, show them. On Kubernetes, scale the workloads instead.

    Example: `rollmesh scale runs/demo generator=3`
    """

    async def main() -> None:
        async with store_of(run) as (config, folder, store):
            changes = parse_replicas(config, replicas or ())
            requested = dict(await store.scaling.requests())
            for service, number in changes.items():
                if number is not None:
                    check = partial(check_capacity, config, dict(requested), service, number)
                    check_unless_forced(check, force=force)
                    requested[service] = number
            has_launcher = [await store.scaling.request(service, number) for service, number in changes.items()]
            rows = await _rows(config, folder, store)
        if as_json:
            typer.echo(json.dumps(rows))
        else:
            _print(rows)
            if has_launcher and not all(has_launcher):
                typer.echo("no launcher runs this run now: it will start with these numbers", err=True)

    run_async(main)


def parse_replicas(config: RunConfig, arguments: Sequence[str]) -> dict[str, int | None]:
    """Parse ``service=number`` arguments; None for ``default``. Raises ConfigError naming an impossible argument."""
    changes: dict[str, int | None] = {}
    for argument in arguments:
        service, separator, number = argument.partition("=")
        if not separator or not (number == _DEFAULT or number.isdecimal()):
            raise ConfigError(f"{argument}: expected SERVICE=N or SERVICE={_DEFAULT}, for example generator=3")
        changes[service] = None if number == _DEFAULT else int(number)
        check_scale(config, service, configured_replicas(config).get(service, 1) if number == _DEFAULT else int(number))
    return changes


async def _rows(config: RunConfig, folder: RunFolder, store: TrajectoryStore) -> dict[str, Mapping[str, int]]:
    configured, requested = configured_replicas(config), await store.scaling.requests()
    running = Counter(endpoint.service for endpoint in read_endpoints(folder.path))
    return {
        service: {
            "run_file": configured[service],
            "wanted": requested.get(service, configured[service]),
            "running": running[service],
        }
        for service in SCALABLE
    }


def _print(rows: Mapping[str, Mapping[str, int]]) -> None:
    table = Table("service", "run file", "wanted", "running")
    for service, row in rows.items():
        table.add_row(service, *map(str, (row["run_file"], row["wanted"], row["running"])))
    output_console().print(table)
