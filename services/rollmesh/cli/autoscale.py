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
    prometheus: Annotated[str, typer.Option("--prometheus", help="Address of the Prometheus that scrapes the run.")],
    rule: Annotated[
        list[Path], typer.Option("--rule", help="Rule of one service, as in helm/rollmesh/files/autoscaling.")
    ],
    selector: Annotated[
        str | None, typer.Option("--selector", help='Label matchers of the run\'s series; default run="NAME".')
    ] = None,
    minimum: Annotated[
        int | None, typer.Option("--min", help="Fewest replicas, in place of the rule's.", min=1)
    ] = None,
    maximum: Annotated[int | None, typer.Option("--max", help="Most replicas, in place of the rule's.", min=1)] = None,
    speed_up: Annotated[
        float, typer.Option("--speed-up", help="Divide all times of the rule, for runs of minutes.", min=1.0)
    ] = 1.0,
) -> None:
    """Scale services of a running run by what Prometheus says, as Kubernetes would with the chart's rules.

    Runs beside `rollmesh up` until Ctrl-C; the launcher carries out what it asks for.
    """

    async def main() -> None:
        rules = [_bounded(load_rule(file), file, minimum, maximum) for file in rule]
        services = [r.service for r in rules]
        if len(set(services)) < len(services):
            raise ConfigError(f"--rule: one rule a service, got {', '.join(services)}")
        async with store_of(run) as (config, folder, store), httpx.AsyncClient() as client:
            for each in rules:
                check_scale(config, each.service, each.maxReplicas)
            matchers = f'run="{config.name}"' if selector is None else selector
            source = Prometheus(prometheus, client)
            scaler = Autoscaler(config, folder, store, source, rules, _note, selector=matchers, speed_up=speed_up)
            await scaler.run(shutdown_event())

    run_async(main)


def _bounded(rule: AutoscalingRule, file: Path, minimum: int | None, maximum: int | None) -> AutoscalingRule:
    fewest, most = minimum or rule.minReplicas, maximum or rule.maxReplicas
    if fewest > most:
        raise ConfigError(f"{file}: at least {fewest} replicas (--min) is above at most {most} (--max)")
    return rule.model_copy(update={"minReplicas": fewest, "maxReplicas": most})


def _note(text: str) -> None:
    typer.echo(f"{time.strftime('%H:%M:%S')} {text}")
