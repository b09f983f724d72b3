"""Console summary of one run."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rollmesh.report.sentences import facts, sentences
from rollmesh.report.summary import RunSummary


def print_summary(summary: RunSummary, console: Console) -> None:
    """Print the summary as a short table and sentences."""
    table = Table(title=f"run {summary.name}", title_justify="left", show_header=False, box=None, padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in facts(summary):
        table.add_row(name, value)
    console.print(table)
    for sentence in sentences(summary):
        console.print(
            Text(f"- {sentence.text}", style="red" if sentence.bad else ""), soft_wrap=not console.is_terminal
        )
