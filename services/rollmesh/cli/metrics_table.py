"""``rollmesh metrics-table``: generator of docs/metrics.md, for developers who change a metric."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Add the hidden command."""
    app.command("metrics-table", hidden=True)(metrics_table)


def metrics_table() -> None:
    """Print docs/metrics.md."""
    from rollmesh.report.metrics_document import metrics_document

    typer.echo(metrics_document(), nl=False)
