"""Entry point of the ``rollmesh`` command, with one module per family of commands."""

from __future__ import annotations

from rollmesh.runtime.imports import many_imports, own_process

with many_imports():
    import typer

    from rollmesh.cli import (
        backups,
        benches,
        configuration,
        dead_letters,
        replicas,
        run_commands,
        serving,
        top,
        up,
    )

app = typer.Typer(
    name="rollmesh",
    help="Asynchronous RL post-training of language models, as a mesh of services.\n\n"
    "Start with `rollmesh demo`, or write a run file and `rollmesh up RUN.yaml`.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
up.register(app)
serving.register(app)
run_commands.register(app)
top.register(app)
replicas.register(app)
backups.register(app)
app.add_typer(dead_letters.app, name="dead-letters")
app.add_typer(configuration.app, name="config")
app.add_typer(benches.app, name="bench", rich_help_panel="Inspection")


@app.command(hidden=True)
def metrics_table() -> None:
    """Print docs/metrics.md, for developers who change a metric."""
    from rollmesh.report.metrics_document import metrics_document

    typer.echo(metrics_document(), nl=False)


def main() -> None:
    """Run the console script."""
    own_process()
    app()


if __name__ == "__main__":
    main()
