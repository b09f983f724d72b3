"""Console of the commands, with the width of the terminal, or a fixed width for pipes."""

from __future__ import annotations

import os

from rich.console import Console

_PIPE_COLUMNS = 200


class OutputConsole(Console):
    """Console that ignores a closed pipe: ``rollmesh up RUN.yaml | head`` continues to train."""

    def on_broken_pipe(self) -> None:
        """Suppress further output instead of ending the process."""
        self.quiet = True


def output_console(*, stderr: bool = False) -> OutputConsole:
    """Return a console for tables and sentences; 200 columns for pipes, whose default of 80 would break tables.

    The variable COLUMNS overrides the width. Sentences are printed unwrapped (``soft_wrap``) in any case.
    """
    console = OutputConsole(stderr=stderr, emoji=False)  # messages contain names such as my_task:leaves
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return OutputConsole(stderr=stderr, width=_PIPE_COLUMNS, emoji=False)
