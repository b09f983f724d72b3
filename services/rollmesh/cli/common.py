"""Arguments, error output and store access that the commands share."""

from __future__ import annotations

import asyncio
import importlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape

from rollmesh.config import RunConfig, load_run_config
from rollmesh.errors import ConfigError, RollmeshError
from rollmesh.launcher.local_mesh import Interrupted
from rollmesh.launcher.redis import running_store
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.report.console import output_console
from rollmesh.runtime.imports import many_imports
from rollmesh.store import TrajectoryStore

T = TypeVar("T")

EXIT_ERROR = 2
EXIT_STOPPED = 130
"""A person stopped the command: what shells report for Ctrl-C."""

RunFileArgument = Annotated[Path, typer.Argument(help="Run file (YAML).", metavar="RUN.yaml")]
RunFolderArgument = Annotated[
    Path, typer.Argument(help="Run folder (or a run file, whose folder is taken).", metavar="RUN_FOLDER")
]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Override a field: --set trainer.train_steps=10")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]


@contextmanager
def clear_errors(status: int = EXIT_ERROR) -> Iterator[None]:
    """Turn errors of rollmesh, failed reads and writes, and Ctrl-C into one clear message and an exit status.

    ``status`` is for errors of rollmesh: an error of the disk may be gone at the next start.
    """
    try:
        yield
    except RollmeshError as error:
        _print_error(str(error))
        raise typer.Exit(status) from error
    except OSError as error:
        if error.errno is None:  # not of the operating system: a time-out that no code expected
            raise
        _print_error(str(error))
        raise typer.Exit(EXIT_ERROR) from error
    except KeyboardInterrupt as stopped:
        raise typer.Exit(EXIT_STOPPED) from stopped


def _print_error(message: str) -> None:
    # Escaped and unwrapped: messages carry paths, brackets and log lines that people copy.
    Console(stderr=True, soft_wrap=True).print(f"[red]error[/red] {escape(message)}", highlight=False)


def heavy_module(name: str, what: str) -> ModuleType:
    """Import a module of rollmesh that needs an extra; ConfigError when a package that it needs is not installed."""
    try:
        with many_imports():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "rollmesh":
            raise
        raise ConfigError(
            f"{what} needs the package {error.name}: install torch for your CPU or CUDA, then "
            "pip install 'rollmesh[local]'"
        ) from error


def run_of(folder_or_file: Path) -> tuple[RunConfig, RunFolder]:
    """The resolved config and the folder of an existing run."""
    path = folder_or_file
    if path.is_file():
        path = Path(load_run_config(path).folder)
    folder = RunFolder(path.resolve())
    if not folder.config_file.exists():
        raise ConfigError(f"{folder.path}: no config.yaml there; is this a run folder?")
    return load_run_config(folder.config_file, [f"folder={folder.path}"]), folder


@asynccontextmanager
async def store_of(folder_or_file: Path) -> AsyncIterator[tuple[RunConfig, RunFolder, TrajectoryStore]]:
    """Config, folder and store of an existing run; an embedded server that is down is started for the while."""
    config, folder = run_of(folder_or_file)
    async with running_store(config, folder) as running:
        yield config, folder, running.store


def run_async(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run one coroutine of a command, with clear errors; a person who stops it gets ``EXIT_STOPPED``."""
    with clear_errors():
        try:
            return asyncio.run(main())
        except (Interrupted, asyncio.CancelledError, KeyboardInterrupt) as stopped:
            raise typer.Exit(EXIT_STOPPED) from stopped


def shutdown_event() -> asyncio.Event:
    """An event that Ctrl-C, SIGTERM and a terminal that closes set; a second one cancels the calling task.

    Call inside the running loop. Under nohup a terminal may close.
    """
    shutdown = asyncio.Event()
    loop, task = asyncio.get_running_loop(), asyncio.current_task()

    def on_signal() -> None:
        if shutdown.is_set() and task is not None:
            task.cancel()
        shutdown.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, on_signal)
    return shutdown


def progress_console(json: bool) -> Console:
    """Console for progress: standard error when standard output carries JSON."""
    return output_console(stderr=json)
