"""Entry point of the ``rollmesh`` command, with one module per family of commands."""

from collections.abc import Callable
from typing import Annotated

from rollmesh.runtime.lifecycle import many_imports, own_process

with many_imports():
    import typer

    import rollmesh
    from rollmesh.cli import configuration, operations, run_inspection, serving, sim, status, up
    from rollmesh.cli.common import PlainGroup

app = typer.Typer(
    name="rollmesh",
    cls=PlainGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Asynchronous RL post-training of language models, as a mesh of services.\n\n"
    "Start with `rollmesh demo`, or write a run file and `rollmesh up RUN.yaml`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"rollmesh {rollmesh.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Print the version if asked; the commands do the rest."""


def _add(panel: str, *commands: Callable[..., None]) -> None:
    for command in commands:
        app.command(command.__name__.rstrip("_").replace("_", "-"), rich_help_panel=panel)(command)


_add("Runs", up.up, up.demo, up.init, up.sft)
serving.register(app)
_add(
    "Inspection", status.status, run_inspection.eval_, run_inspection.explain, run_inspection.audit, run_inspection.view
)
_add("Inspection", run_inspection.compare, run_inspection.report, operations.pin, operations.rollback)
app.command(cls=sim.SimCommand, rich_help_panel="Inspection")(sim.sim)
_add("Runs", operations.export, operations.scale, operations.backup)
app.add_typer(configuration.app, name="config", rich_help_panel="Runs")
app.add_typer(operations.dead_letters, name="dead-letters", rich_help_panel="Inspection")


def main() -> None:
    """Run the console script."""
    own_process()
    app()


if __name__ == "__main__":
    main()
