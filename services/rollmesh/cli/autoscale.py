"""``rollmesh autoscale``: the chart's autoscaling rules on one machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import httpx
import typer

from rollmesh.cli.common import RunFolderArgument, run_async, shutdown_event, store_of
from rollmesh.config.autoscaling_rule import AutoscalingRule, load_rule
from rollmesh.config.replica_bounds import check_scale
from rollmesh.errors import ConfigError
from rollmesh.launcher.autoscaler import Autoscaler, Prometheus


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("autoscale", rich_help_panel="Runs")(autoscale)


def autoscale(
    run: RunFolderArgument,
    prometheus: Annotated[str, typer.Option("--prometheus", help="URL of the Prometheus server that scrapes the run.")],
    rule: Annotated[
        list[Path], typer.Option("--rule", help="Rule file of one service, as in helm/rollmesh/files/autoscaling.")
    ],
    selector: Annotated[
        str | None, typer.Option("--selector", help='Label matchers of the run\'s series; default run="NAME".')
    ] = None,
    minimum: Annotated[int | None, typer.Option("--min", help="Minimum replicas; overrides the rule.", min=1)] = None,
    maximum: Annotated[int | None, typer.Option("--max", help="Maximum replicas; overrides the rule.", min=1)] = None,
    speed_up: Annotated[
        float, typer.Option("--speed-up", help="Divide all times of the rule by this factor, for short runs.", min=1.0)
    ] = 1.0,
) -> None:
    """Scale the services of a running run by its Prometheus metrics, as Kubernetes does with the chart's rules.

    Runs next to `rollmesh up` until Ctrl-C; the launcher starts and stops the replicas.
    """

    async def main() -> None:
        rules = [_bounded(load_rule(file), file, minimum, maximum) for file in rule]
        services = [r.service for r in rules]
        if len(set(services)) < len(services):
            raise ConfigError(f"--rule: expected one rule per service, got {', '.join(services)}")
        async with store_of(run) as (config, folder, store), httpx.AsyncClient() as client:
            for bounded in rules:
                check_scale(config, bounded.service, bounded.maxReplicas)
            matchers = f'run="{config.name}"' if selector is None else selector
            source = Prometheus(prometheus, client)
            scaler = Autoscaler(config, folder, store, source, rules, _note, selector=matchers, speed_up=speed_up)
            await scaler.run(shutdown_event())

    run_async(main)


def _bounded(rule: AutoscalingRule, file: Path, minimum: int | None, maximum: int | None) -> AutoscalingRule:
    fewest, most = minimum or rule.minReplicas, maximum or rule.maxReplicas
    if fewest > most:
        raise ConfigError(f"{file}: the minimum of {fewest} replicas (--min) exceeds the maximum of {most} (--max)")
    return rule.model_copy(update={"minReplicas": fewest, "maxReplicas": most})


def _note(text: str) -> None:
    typer.echo(f"{time.strftime('%H:%M:%S')} {text}")
