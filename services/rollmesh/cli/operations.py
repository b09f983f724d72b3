"""Commands that act on a run: pin, rollback, scale, export, backup, dead-letters."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.cli.common import (
    ForceOption,
    JsonOption,
    PlainGroup,
    RunFolderArgument,
    VersionOption,
    ask_store,
    check_unless_forced,
    clear_errors,
    run_async,
    run_of,
    store_of,
)
from rollmesh.config import RunConfig
from rollmesh.config.replica_bounds import check_scale, configured_replicas
from rollmesh.errors import ConfigError, Conflict
from rollmesh.launcher.backup import back_up
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.report.console import output_console
from rollmesh.report.model_export import export_model
from rollmesh.runtime.capacity import check_capacity
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.store import TrajectoryStore

_DEFAULT = "default"
IdArgument = Annotated[str, typer.Argument(help="Trajectory id, as listed.", metavar="TRAJECTORY_ID")]
dead_letters = typer.Typer(help="List, inspect, replay and delete dead letters.", no_args_is_help=True, cls=PlainGroup)


def pin(
    run: RunFolderArgument,
    version: VersionOption = None,
    release: Annotated[
        bool, typer.Option("--release", help="Release the pin: serve the newest version again.")
    ] = False,
) -> None:
    """Pin generators to one policy version, or release the pin.

    Example: `rollmesh pin runs/demo --version 10`
    """

    async def pinned(store: TrajectoryStore) -> int | None:
        if release and version is not None:
            raise ConfigError(f"--version {version} with --release: give one of them")
        chosen = None if release else version
        if not release and version is None:
            latest = await store.policies.latest()
            if latest is None:
                raise ConfigError("the run has published no policy yet; pin one once the trainer has started")
            chosen = latest.policy_version
        await store.policies.pin(chosen)
        return chosen

    chosen = ask_store(run, pinned)
    typer.echo(
        "released"
        if chosen is None
        else f"pinned to policy version {chosen}; rollmesh pin {run} --release serves the newest one again"
    )


def rollback(
    run: RunFolderArgument,
    version: Annotated[int, typer.Option("--version", help="Announced policy version to restore.", min=0)],
) -> None:
    """Roll back to an older policy: publish its weights again as the next version and continue training from it.

    The trainer performs the rollback between two train steps or, if it has ended, at the next start of the run, also of
    a finished run. The optimizer state is reset, groups of the abandoned branch are dropped with the reason
    rolled_back, and trained groups stay in the ledger. Afterwards no rollout starts on an older version: a pin on one
    blocks all new work until it is released.

    Example: `rollmesh rollback runs/demo --version 10`
    """
    request = ask_store(run, lambda store: store.rollbacks.request(version))
    typer.echo(
        f"rollback to policy version {version} requested ({request.request_id}): the trainer performs it before "
        "its next step, or at its next start if it has ended"
    )


def export(
    run: RunFolderArgument,
    out: Annotated[Path, typer.Argument(help="New folder for the model.", metavar="OUT")],
    version: VersionOption = None,
) -> None:
    """Write a policy of a run as a plain Hugging Face folder, with tokenizer and model card.

    Works on running, stopped and finished runs, without Redis; policies in an object store are downloaded. An adapter
    is merged into its base.

    Example: `rollmesh export runs/demo my-model`
    """
    with clear_errors():
        _, folder = run_of(run)
        exported = export_model(folder.path, out, version)
    typer.echo(f"policy version {exported.policy_version}, train step {exported.train_step}: {out}")
    typer.echo(f'to load it: transformers.AutoModelForCausalLM.from_pretrained("{out}")')


def backup(
    run: RunFolderArgument,
    destination: Annotated[
        Path, typer.Argument(help="Folder of the backup; updated if it exists.", metavar="DESTINATION")
    ],
    as_json: JsonOption = False,
) -> None:
    """Copy the files of a run that a restore requires: checkpoints, batch files, records, and the key that seals them.

    Safe while the run trains, and incremental: a later backup copies only new files. The queue is not copied, because
    the trainer rebuilds it from the batch files; rollouts in progress are repeated. To restore, start the copy:
    rollmesh up RUN.yaml --set folder=DESTINATION, and --set checkpoints.folder=null if the run sets checkpoints.folder.

    Example: `rollmesh backup runs/demo /backups/demo`
    """
    with clear_errors():
        config, folder = run_of(run)
        try:
            report = back_up(folder, open_checkpoints(config), destination)
        except OSError as error:
            raise ConfigError(f"destination {destination}: {error}") from error
    if as_json:
        typer.echo(json.dumps(asdict(report)))
        return
    elsewhere = "" if config.checkpoints.folder is None else " --set checkpoints.folder=null"
    typer.echo(
        f"{report.files} files, {report.bytes / 2**20:.1f} MiB copied to {destination}, {report.removed} pruned; "
        f"a restored run continues from train step {report.train_step}: "
        f"rollmesh up RUN.yaml --set folder={destination}{elsewhere}"
    )


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
    force: ForceOption = False,
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
            _print_replicas(rows)
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
        for service in configured
    }


def _print_replicas(rows: Mapping[str, Mapping[str, int]]) -> None:
    table = Table("service", "run file", "wanted", "running")
    for service, row in rows.items():
        table.add_row(service, *map(str, (row["run_file"], row["wanted"], row["running"])))
    output_console().print(table)


@dead_letters.command("list")
def list_letters(run: RunFolderArgument, as_json: JsonOption = False) -> None:
    """List dead letters with their reasons.

    Example: `rollmesh dead-letters list runs/demo`
    """
    # The newest is last, so that it stays visible in a terminal.
    letters = ask_store(run, lambda store: store.dead_letters.newest())[::-1]
    if as_json:
        typer.echo(json.dumps([asdict(letter) for letter in letters]))
        return
    table = Table("trajectory", "group", "reason", "attempts", "tokens", title=f"{len(letters)} dead letters")
    for letter in letters:
        row = (letter.trajectory_id, letter.group_id, letter.reason, letter.attempts, letter.token_count)
        table.add_row(*map(str, row))
    output_console().print(table)


@dead_letters.command()
def inspect(run: RunFolderArgument, trajectory_id: IdArgument) -> None:
    """Print all fields of one dead letter as JSON.

    Example: `rollmesh dead-letters inspect runs/demo e0-12.3`
    """
    letter = ask_store(run, lambda store: store.dead_letters.get(trajectory_id))
    typer.echo(json.dumps(asdict(letter), indent=2, default=str))


@dead_letters.command()
def replay(run: RunFolderArgument, trajectory_id: IdArgument) -> None:
    """Return the prompt of a dead letter to the run, as a new group that records its origin.

    Example: `rollmesh dead-letters replay runs/demo e0-12.3`
    """
    group_id = ask_store(run, lambda store: store.dead_letters.replay(trajectory_id))
    typer.echo(f"{trajectory_id} replayed as group {group_id}, when the run has capacity for it")


@dead_letters.command()
def delete(run: RunFolderArgument, trajectory_id: IdArgument) -> None:
    """Delete a dead letter and its payload, which occupies memory in Redis.

    Example: `rollmesh dead-letters delete runs/demo e0-12.3`
    """

    async def delete_letter(store: TrajectoryStore) -> None:
        if not await store.dead_letters.delete(trajectory_id):
            raise Conflict(f"no dead letter {trajectory_id}")

    ask_store(run, delete_letter)
    typer.echo(f"{trajectory_id} deleted")
