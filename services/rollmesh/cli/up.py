"""``rollmesh up``, ``demo``, ``init`` and ``sft``: training on this machine, and the files of a first run."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, TextIO, cast

import typer
from rich.console import Console

from rollmesh.cli.common import (
    EXIT_ERROR,
    EXIT_STOPPED,
    FolderOption,
    ForceOption,
    RunFileArgument,
    SetOption,
    check_unless_forced,
    clear_errors,
    heavy_module,
    load_run,
    overrides_of,
    shutdown_event,
)
from rollmesh.cli.serving import inline_services
from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.load import load_config
from rollmesh.config.recipes import recipe_file
from rollmesh.config.sft_config import SftConfig
from rollmesh.errors import CheckpointError, ConfigError, PoliciesRefused, RollmeshError
from rollmesh.file_writes import write_text
from rollmesh.launcher.fine_tuning_ranks import StopRequest, run_ranks
from rollmesh.launcher.inline_services import INLINE_OVERRIDES, Serve, ServiceLogs
from rollmesh.launcher.local_mesh import Interrupted
from rollmesh.launcher.run_folder import made_folder, make_run_folder
from rollmesh.launcher.run_up import close_run, run_up
from rollmesh.launcher.supervisor import ServiceFailed
from rollmesh.preflight.run_checks import check_inline, check_run
from rollmesh.recipes.countdown.demonstrations import starter_rows
from rollmesh.report.console import print_line, run_console
from rollmesh.report.ledger_check import QueueAccount
from rollmesh.runtime.capacity import check_configured, this_machine
from rollmesh.runtime.lifecycle import EXIT_CONFIG, EXIT_UNFINISHED, die_with_parent
from rollmesh.runtime.locks import locked_folder
from rollmesh.runtime.logging import configure_logging
from rollmesh.runtime.tracing import recorded_traces

InlineOption = Annotated[
    bool,
    typer.Option(
        "--inline",
        help="Run all services in this process, so that a debugger stops in your loss, verifier or environment; one "
        "replica of each, engine torch.",
    ),
]


def up(
    run: RunFileArgument,
    set_: SetOption = None,
    folder: FolderOption = None,
    inline: InlineOption = False,
    force: ForceOption = False,
) -> None:
    """Start every service of a run on this machine, train, evaluate before and after, audit, report.

    Ctrl-C drains the services without loss; the same command continues the run.

    Example: `rollmesh up run.yaml --set trainer.train_steps=10`
    """
    with clear_errors():
        overrides = overrides_of(set_, folder)
        config = load_run(run, [*INLINE_OVERRIDES, *overrides] if inline else overrides)
        check_unless_forced(lambda: check_configured(config, this_machine()), force=force)
        raise typer.Exit(run_to_report(config, run_console(), inline=inline))


_ADAPTER_DEMO = (
    *("name=demo-adapter", "folder=runs/demo-adapter"),
    # Five times the rate of the demo: at ten times the reward turns after 20 updates (docs/weights.md).
    *("model.adapter={rank: 16, alpha: 32}", "trainer.learning_rate=2.0e-3"),
)


def demo(
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Train a low-rank adapter (rank 16) instead of all weights.")
    ] = False,
    set_: SetOption = None,
    folder: FolderOption = None,
) -> None:
    """Train a small model on a real task with the whole mesh, on two CPU cores, in minutes.

    The task is countdown search: the model tries pairs of numbers until their sum or difference is the target.

    Example: `rollmesh demo`
    """
    with clear_errors():
        overrides = [*(_ADAPTER_DEMO if adapter else ()), *overrides_of(set_, folder)]
        config = load_run_config(recipe_file("countdown", "demo.yaml"), overrides)
        raise typer.Exit(run_to_report(config, run_console()))


def run_to_report(config: RunConfig, console: Console, *, inline: bool = False) -> int:
    """Run, audit and report; with ``inline`` all services run in this process.

    Returns the exit status: 0 finished, with an audit that is green or only pruned too far; 1 with another audit, or if
    audit and report could not be written; 130 stopped.
    """
    from rollmesh.report.model_export import trained_model_lines
    from rollmesh.report.sentences import print_summary
    from rollmesh.report.summary import summarise

    if inline:
        check_inline(config)
    # A breakpoint in the user's code is to stop in this process, not in the trial's.
    for note in check_run(config, tries_inputs=not inline).notes:
        print_line(console, note)
    folder = make_run_folder(config).path
    try:
        account = _run(config, folder, console, inline_services(config) if inline else None)
        try:
            accepted = close_run(folder, account, console)
        except OSError as error:
            text = f"the report cannot be written: {error}; to retry: rollmesh audit {folder}; rollmesh report {folder}"
            print_line(console, text)
            return EXIT_STOPPED if account is None else 1
    except (PoliciesRefused, ServiceFailed):
        try:
            close_run(folder, None, console)
        except Exception as error:  # whatever is wrong with the report: people must see why the run failed
            print_line(console, f"the report cannot be written: {error!r}")
        raise
    except asyncio.CancelledError:
        console.print("killed without draining; the same command continues from what is saved", highlight=False)
        return EXIT_STOPPED
    except (Interrupted, KeyboardInterrupt):
        console.print("stopped; the same command continues this run", highlight=False)
        return EXIT_STOPPED
    if account is None:
        return EXIT_STOPPED
    print_summary(summarise(folder), console)
    print_line(console, f"report: {folder / 'report.html'}")
    try:
        for line in trained_model_lines(folder):
            print_line(console, line)
    except CheckpointError as error:
        print_line(console, f"the trained model: {error}")
    return 0 if accepted else 1


def _run(config: RunConfig, folder: Path, console: Console, serve: Mapping[str, Serve] | None) -> QueueAccount | None:
    async def main() -> QueueAccount | None:
        if serve is None:
            return await run_up(config, shutdown_event(), console)
        async with recorded_traces(
            config.telemetry, service="inline", instance=f"{config.name}-inline", run=config.name
        ):
            return await run_up(config, shutdown_event(), console, serve)

    log = (folder / "logs" / "launcher-0.log").open("a", encoding="utf-8")
    try:
        stream = log if serve is None else cast(TextIO, ServiceLogs(log))
        configure_logging(config.telemetry, service="launcher", run=config.name, stream=stream)
        return asyncio.run(main())
    finally:
        with contextlib.suppress(OSError):  # unwritten lines on a full disk
            log.close()


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


def sft(
    run: RunFileArgument,
    set_: SetOption = None,
    folder: FolderOption = None,
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
        config = load_config(SftConfig, run, overrides_of(set_, folder), {})
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
