"""Shared arguments, help pages, error output and store access of the commands."""

import asyncio
import errno
import importlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from rollmesh.config import RunConfig, load_run_config, text_override
from rollmesh.errors import ConfigError, RollmeshError
from rollmesh.launcher.local_mesh import Interrupted
from rollmesh.launcher.redis import running_store
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.runtime.lifecycle import many_imports
from rollmesh.store import TrajectoryStore
from rollmesh.user_code import search_beside

T = TypeVar("T")

EXIT_ERROR = 2
EXIT_STOPPED = 130
"""Exit status of a command that the user stopped, as shells report Ctrl-C."""

RunFileArgument = Annotated[Path, typer.Argument(help="Run file (YAML).", metavar="RUN.yaml")]
RunFolderArgument = Annotated[
    Path, typer.Argument(help="Run folder, or a run file that names it.", metavar="RUN_FOLDER")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a field: --set trainer.train_steps=10", metavar="FIELD=VALUE"),
]
VersionOption = Annotated[int | None, typer.Option("--version", help="Policy version; the newest by default.", min=0)]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
FolderOption = Annotated[Path | None, typer.Option("--folder", help="Run folder (default: the run file's).")]
ForceOption = Annotated[
    bool,
    typer.Option(
        "--force", help="Start more processes than this machine's cores and memory can serve, without a question."
    ),
]


def overrides_of(set_: Sequence[str] | None, folder: Path | None) -> list[str]:
    """Return the overrides of ``--set`` and ``--folder``."""
    return [*(set_ or ()), *([text_override("folder", folder)] if folder else [])]


@contextmanager
def clear_errors(status: int = EXIT_ERROR) -> Iterator[None]:
    """Convert errors of rollmesh, failed reads and writes, and Ctrl-C into an exit status, errors with a message.

    ``status`` applies to errors of rollmesh only: an error of the disk may be temporary.
    """
    try:
        yield
    except RollmeshError as error:
        _print_error(str(error))
        raise typer.Exit(status) from error
    except OSError as error:
        if error.errno is None:  # not from the operating system: an unexpected time-out
            raise
        # Files are named by their writers (``file_writes``).
        full = error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        _print_error(f"standard output or error: {error}" if full else str(error))
        if full:
            # Python would try to write the rest at its exit, and fail with a status of its own.
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_ERROR) from error
    except KeyboardInterrupt as stopped:
        raise typer.Exit(EXIT_STOPPED) from stopped


def check_unless_forced(check: Callable[[], None], *, force: bool) -> None:
    """Check the capacity of this machine. On a terminal the user may go on; elsewhere its ConfigError is raised."""
    if force:
        return
    try:
        check()
    except ConfigError as error:
        if not sys.stdin.isatty():
            raise
        if not typer.confirm(f"{error}\nStart them anyway?", err=True):
            raise typer.Exit(EXIT_ERROR) from error


def _print_error(message: str) -> None:
    # Escaped and unwrapped: messages contain paths, brackets and log lines that users copy.
    Console(stderr=True, soft_wrap=True, emoji=False).print(f"[red]error[/red] {escape(message)}", highlight=False)


def heavy_module(name: str, purpose: str) -> ModuleType:
    """Import a module of rollmesh that requires an extra. Raises ConfigError when a package is not installed."""
    try:
        with many_imports():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] == "rollmesh":
            raise
        raise ConfigError(
            f"{purpose} needs the package {error.name}: install torch for your CPU or CUDA, then "
            "pip install 'rollmesh[local]'"
        ) from error


def load_run(run: Path, overrides: Sequence[str]) -> RunConfig:
    """Load a run file, and let this process and those that it starts find modules beside it."""
    search_beside(run)
    return load_run_config(run, overrides)


def run_of(folder_or_file: Path) -> tuple[RunConfig, RunFolder]:
    """Return the resolved config and the folder of an existing run, and let this process find the run's own modules.

    Raises ConfigError for any other folder.
    """
    path = folder_or_file
    if path.is_file():
        path = Path(load_run_config(path).folder)
    folder = RunFolder(path.resolve())
    if not folder.config_file.exists():
        raise ConfigError(f"{folder.path}: no config.yaml there; is this a run folder?")
    return load_run(folder.config_file, [text_override("folder", folder.path)]), folder


@asynccontextmanager
async def store_of(
    folder_or_file: Path, retry_seconds: float = 20.0
) -> AsyncIterator[tuple[RunConfig, RunFolder, TrajectoryStore]]:
    """Open config, folder and store of an existing run; start a stopped embedded server for the duration.

    A call of the store fails after ``retry_seconds`` without an answer.
    """
    config, folder = run_of(folder_or_file)
    async with running_store(config, folder, retry_seconds=retry_seconds) as running:
        yield config, folder, running.store


def ask_store(run: Path, question: Callable[[TrajectoryStore], Awaitable[T]]) -> T:
    """Return what a call of the store of an existing run returns; errors and stops as in ``run_async``."""

    async def main() -> T:
        async with store_of(run) as (_, _, store):
            return await question(store)

    return run_async(main)


def run_async(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the coroutine of a command with ``clear_errors``; exit with ``EXIT_STOPPED`` when the user stops it."""
    with clear_errors():
        try:
            return asyncio.run(main())
        except (Interrupted, asyncio.CancelledError, KeyboardInterrupt) as stopped:
            raise typer.Exit(EXIT_STOPPED) from stopped


def shutdown_event() -> asyncio.Event:
    """Return an event that Ctrl-C, SIGTERM and a closed terminal set; a second signal cancels the calling task.

    Call it inside the running loop. Under nohup a closed terminal is ignored.
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


_TYPES = {"int": "N", "float": "N", "path": "PATH", "str": "TEXT"}


class PlainGroup(TyperGroup):
    """Group whose commands print plain help pages."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command by name, its parameters with plain types."""
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            for param in command.get_params(ctx):
                _make_plain(param)
        return command

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the parameters of the group with plain types."""
        params = super().get_params(ctx)
        for param in params:
            _make_plain(param)
        return params


def _make_plain(param: Any) -> None:
    # Attributes of the instance: typer offers no setting, and a version that does not read them ignores them.
    vars(param)["display_type_rich"] = partial(_display_type, param)
    if param.param_type_name == "argument":
        vars(param)["get_usage_pieces"] = partial(_usage_pieces, param)


def _display_type(param: Any, ctx: Any) -> str | None:
    """Return the placeholder of an option's value; None for flags, and for arguments, whose name says it."""
    if param.param_type_name == "argument" or getattr(param, "is_flag", False):
        return None
    if param.metavar is not None:
        return str(param.metavar)
    kind = str(param.display_type(ctx)).strip("<>").removeprefix("list[").removesuffix("]")
    return _TYPES.get(kind.split(" ")[0], kind.upper())


def _usage_pieces(param: Any, ctx: Any) -> list[str]:
    name = str(param.metavar or param.name.upper())
    many = "" if param.nargs == 1 else "..."
    return [f"{name}{many}" if param.required else f"[{name}{many}]"]
