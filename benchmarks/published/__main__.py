"""Command of this package: ``python -m benchmarks.published speed-ups``, or ``pools docs``."""

import json
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.published.pools import write_recommendation_document
from benchmarks.published.predictions import predictions, times_of
from benchmarks.published.section import documents, fidelity_section, with_section
from benchmarks.published.speed_ups import published_speed_ups
from rollmesh.cli.common import JsonOption, clear_errors
from rollmesh.file_writes import write_text

app = typer.Typer()
With = Annotated[list[str] | None, typer.Option("--with", help="Time in all rows: --with switch_seconds=30")]
Write = Annotated[Path | None, typer.Option(help="Write the section into this document: docs/simulator-published.md")]


@app.command()
def speed_ups(with_: With = None, as_json: JsonOption = False, write: Write = None) -> None:
    """Simulate the set-up of every published speed-up, method and baseline; about three minutes of one core."""
    with clear_errors():
        rows = published_speed_ups()
        found = predictions(rows, times_of(with_ or []), on_arm=lambda name: typer.echo(name, err=True))
        if as_json:
            for document in documents(found):
                typer.echo(json.dumps(document))
        elif write is not None:
            write_text(write, with_section(write.read_text(encoding="utf-8"), fidelity_section(rows, found)))
        else:
            typer.echo(fidelity_section(rows, found), nl=False)


@app.command()
def pools(folder: Path) -> None:
    """Simulate pools and switches of copris on all cores, and write simulated-pools.md into the folder docs."""
    write_recommendation_document(folder)


if __name__ == "__main__":
    app()
