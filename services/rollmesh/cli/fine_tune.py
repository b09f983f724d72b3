"""``rollmesh sft``: supervised fine-tuning on this machine, without queue and services."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from rollmesh.cli.common import (
    EXIT_ERROR,
    EXIT_STOPPED,
    RunFileArgument,
    SetOption,
    clear_errors,
    heavy_module,
)
from rollmesh.config import text_override
from rollmesh.config.load import load_config
from rollmesh.config.sft_config import SftConfig
from rollmesh.errors import ConfigError, RollmeshError
from rollmesh.launcher.fine_tuning_ranks import StopRequest, run_ranks
from rollmesh.launcher.run_folder import made_folder
from rollmesh.runtime.lifecycle import EXIT_CONFIG, EXIT_UNFINISHED, die_with_parent
from rollmesh.runtime.locks import locked_folder


def sft(
    run: RunFileArgument,
    set_: SetOption = None,
    folder: Annotated[Path | None, typer.Option("--folder", help="Run folder (default: the run file's).")] = None,
    supervised_by: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Fine-tune a model on rows of prompt and response, or of chats, without queue and services.

    The run file has `name`, `folder`, `model.path`, and `data.train`, a list of JSONL or Parquet files. A row has the
    texts `prompt` and `response`, or `messages`, a chat; the loss is that of the response, or of the assistant.
    Often set: `data.evaluation` (files of held-out rows, whose loss is shown), `trainer.epochs` or
    `trainer.train_steps`, `trainer.batch_rows`, `trainer.learning_rate`, `trainer.lr_schedule`, `model.adapter`,
    `launcher.trainer_processes`. All fields: docs/reference/sft-file.md.

    The run folder gets the trained model in `model`, for `model.path` of a run or for transformers, and a line for
    each step in `metrics.jsonl`. Ctrl-C ends after the current step; the same command continues, also after a kill, to
    the same weights.

    Example: `rollmesh sft warm-start.yaml --set trainer.epochs=3`
    """
    with clear_errors():
        overrides = [*(set_ or ()), *([text_override("folder", folder)] if folder else [])]
        config = load_config(SftConfig, run, overrides, {})
        if supervised_by is not None:
            raise typer.Exit(_be_a_rank(config, supervised_by))
        path = made_folder(config.folder, "checkpoints")
        if (path / "config.yaml").exists():
            raise ConfigError(f"folder={path}: holds a run of rollmesh up (config.yaml); name another folder")
        config = config.model_copy(update={"folder": str(path)})
        with locked_folder(path, "stop it first, or name another folder") as lock:
            if config.launcher.trainer_processes > 1:
                status, stopped = run_ranks(config, lock)
            else:
                stop = StopRequest()
                with stop.watched():
                    status, stopped = (0, False) if _train(config, stop, shown=True) else (EXIT_UNFINISHED, True)
    if stopped and status != 0:
        typer.echo("stopped; the same command continues this run")
        raise typer.Exit(EXIT_STOPPED)
    if status != 0:  # the ranks have said why
        raise typer.Exit(EXIT_ERROR)
    typer.echo(f"trained model: {path / 'model'}")
    typer.echo("to train it further: model.path in a run file; to load it: transformers.AutoModelForCausalLM")


def _be_a_rank(config: SftConfig, launcher: int) -> int:
    """Train as one rank below torchrun, and return its exit status."""
    die_with_parent(launcher)
    leads = os.environ["RANK"] == "0"
    stop = StopRequest()
    try:
        with stop.watched():
            return 0 if _train(config, stop, shown=leads) else EXIT_UNFINISHED
    except RollmeshError as error:
        if leads or not error.final:  # a final error, as of the run file, is that of every rank
            typer.echo(f"error {error}", err=True)
        return EXIT_CONFIG if error.final else 1


def _train(config: SftConfig, stop: StopRequest, *, shown: bool) -> bool:
    """Train; return False if a stop came first."""
    module: Any = heavy_module("rollmesh.sft.fine_tuning", "rollmesh sft")
    return module.fine_tune(config, stop, sys.stdout if shown else None) is not None
