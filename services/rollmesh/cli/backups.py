"""``rollmesh backup``: a copy of a run from which a new mesh can continue."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rollmesh.checkpoints.location import open_checkpoints
from rollmesh.cli.common import JsonOption, RunFolderArgument, clear_errors, run_of
from rollmesh.errors import ConfigError
from rollmesh.launcher.backup import back_up


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
