"""``rollmesh init``: the files of a first run of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated

import typer

from rollmesh.cli.common import clear_errors
from rollmesh.config.recipes import recipe_file
from rollmesh.errors import ConfigError
from rollmesh.file_writes import write_text
from rollmesh.recipes.countdown.starter_rows import starter_rows

_ROWS: Mapping[str, Callable[[], str]] = {"countdown": starter_rows}
"""Functions that return the data file, by task."""
DATA_FILE = "data.jsonl"


def init(
    task: Annotated[str, typer.Argument(help=f"Task: {', '.join(_ROWS)}.", metavar="TASK")] = "countdown",
    folder: Annotated[
        Path | None, typer.Argument(help="Folder to write into (default: the task's name).", metavar="FOLDER")
    ] = None,
) -> None:
    """Write a commented run file, data and a verifier that train within two minutes on two CPU cores.

    Change the files step by step into those of your own task.

    Example: `rollmesh init countdown mine`, then `cd mine` and `rollmesh up run.yaml`
    """
    with clear_errors():
        target = folder or Path(task)
        files = {target / name: text for name, text in starter_files(task).items()}
        if existing := [file for file in files if file.exists()]:
            raise ConfigError(f"{existing[0]} exists; give another FOLDER: rollmesh init TASK FOLDER")
        target.mkdir(parents=True, exist_ok=True)
        try:
            for file, text in files.items():
                write_text(file, text)
        except OSError:  # such as a full disk: the same command works again once there is room
            for file in files:
                file.unlink(missing_ok=True)
            raise
        for file in files:
            typer.echo(f"wrote {file}")
    typer.echo(f"next: cd {target} && rollmesh up run.yaml")


def starter_files(task: str) -> dict[str, str]:
    """Return the texts of the files by name. Raises ConfigError for an unknown task."""
    if task not in _ROWS:
        raise ConfigError(f"TASK={task}: expected {', '.join(_ROWS)}; for a folder of another name: init TASK FOLDER")
    starter = recipe_file(task, "starter")
    texts = {file.name: file.read_text(encoding="utf-8") for file in sorted(starter.iterdir()) if file.is_file()}
    return {**texts, DATA_FILE: _ROWS[task]()}
