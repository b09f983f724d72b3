"""Where commands print: on a terminal as wide as it is, in a pipe as wide as the tables need."""

from __future__ import annotations

import os

from rich.console import Console

_PIPE_COLUMNS = 200


class OutputConsole(Console):
    """A console whose reader may go away: ``rollmesh up RUN.yaml | head`` trains on in silence."""

    def on_broken_pipe(self) -> None:
        """Print nothing from now on, instead of ending the process."""
        self.quiet = True


def output_console(*, stderr: bool = False) -> OutputConsole:
    """A console for tables and sentences; a pipe has no columns, and 80 assumed ones would break them.

    COLUMNS decides where it is set. Sentences are printed unwrapped (``soft_wrap``) anyway.
    """
    console = OutputConsole(stderr=stderr)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return OutputConsole(stderr=stderr, width=_PIPE_COLUMNS)
