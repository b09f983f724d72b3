"""One command per service, used by containers and by the launcher."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from rollmesh.cli.common import RunFileArgument, SetOption, clear_errors, heavy_module, load_run
from rollmesh.config import RunConfig, write_run_config
from rollmesh.config.teachers import teacher_service
from rollmesh.errors import ConfigError
from rollmesh.launcher.inline_services import Serve
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.preflight.run_checks import check_service
from rollmesh.runtime.addresses import instance_name
from rollmesh.runtime.lifecycle import EXIT_CONFIG, Shutdown, die_with_parent, run_service
from rollmesh.runtime.logging import capture_foreign_logs, configure_logging
from rollmesh.runtime.tracing import recorded_traces
from rollmesh.user_code import record_code_folder

IndexOption = Annotated[int, typer.Option(help="Index of this replica, for its log and endpoint file names.", min=0)]
SuperviseOption = Annotated[
    int, typer.Option("--supervised-by", hidden=True, help="Exit when this parent process exits.")
]

_DRAIN_MARGIN_SECONDS = 5.0
_SERVICES = {
    "rollout": "Run a rollout worker; one of the workers is also the leader of the mesh.",
    "generator": "Run a generator; it loads the newest policy by itself and may join or leave at any time.",
    "reward": "Run a reward service: verifiers in a process pool that kills them on time-out.",
    "trainer": "Run the trainer (one process, or a rank under torchrun); a newer trainer fences an older one.",
    "agents": "Serve the OpenAI-compatible API and the sessions of agents; any number may run.",
    "gateway": "Serve the page and the REST API of a run; any number may run; they only read unless a user acts.",
}


def register(app: typer.Typer) -> None:
    """Add one command per service."""
    for service, text in _SERVICES.items():
        text = f"{text}\n\nExample: `rollmesh {service} run.yaml --set store.url=redis://10.0.0.5:6379`"
        app.command(service, help=text, rich_help_panel="Services")(_command(service))
    app.command(rich_help_panel="Services")(teacher)


def _command(service: str) -> Callable[..., None]:
    def command(
        run: RunFileArgument, index: IndexOption = 0, set_: SetOption = None, supervised_by: SuperviseOption = 0
    ) -> None:
        if supervised_by:
            die_with_parent(supervised_by)
        raise typer.Exit(_serve(service, run, index, set_, lambda: _main_module(service).serve))

    return command


def teacher(
    run: RunFileArgument,
    name: Annotated[str, typer.Argument(help="Name of the teacher in the run file.", metavar="NAME")],
    index: IndexOption = 0,
    set_: SetOption = None,
    supervised_by: SuperviseOption = 0,
) -> None:
    """Serve a teacher: log-probabilities of given tokens under the frozen weights of `teachers.NAME.model`.

    Example: `rollmesh teacher run.yaml math --set network.grpc_port=7000`
    """
    if supervised_by:
        die_with_parent(supervised_by)
    raise typer.Exit(_serve(teacher_service(name), run, index, set_, lambda: _teacher_serve(name)))


def _serve(service: str, run: Path, index: int, overrides: list[str] | None, found: Callable[[], Serve]) -> int:
    with clear_errors(EXIT_CONFIG):
        config = load_run(run, overrides or ())
        check_service(config, service)
        configure_logging(config.telemetry, service=instance_name(config, service, index), run=config.name)
        capture_foreign_logs()
        serve = found()
        if not config.network.shared_folder:
            _prepare_folder(config)

    async def main(shutdown: Shutdown) -> None:
        name = instance_name(config, service, index)
        async with recorded_traces(config.telemetry, service=service, instance=name, run=config.name):
            await serve(config, index, shutdown)

    return run_service(main, grace_seconds=config.generator.drain_timeout_seconds + _DRAIN_MARGIN_SECONDS)


def inline_services(config: RunConfig) -> dict[str, Serve]:
    """Import every service of a run, to run in this process."""
    serve: dict[str, Serve] = {service: _main_module(service).serve for service in _SERVICES}
    serve |= {teacher_service(name): _teacher_serve(name) for name in config.teachers}
    return {**serve, "reward": partial(_main_module("reward").serve, inline=True)}


def _teacher_serve(name: str) -> Serve:
    return partial(_main_module("teacher").serve, name=name)


def _main_module(service: str) -> ModuleType:
    return heavy_module(f"rollmesh.{service}.main", f"the {service} service")


def _prepare_folder(config: RunConfig) -> None:
    """Create the run folder as a launcher does, so that commands such as ``rollmesh status`` work inside a pod."""
    folder = RunFolder(Path(config.folder))
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        write_run_config(config, folder.config_file)
        record_code_folder(folder.path)
    except OSError as error:
        raise ConfigError(f"folder={config.folder} cannot be written: {error}") from error
