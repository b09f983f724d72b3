"""Console of the commands, with the width of the terminal, or a fixed width for pipes."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TypeVar

from rich.console import Console

_PIPE_COLUMNS = 200


class OutputConsole(Console):
    """Console that ignores a closed pipe: ``rollmesh up RUN.yaml | head`` continues to train."""

    def on_broken_pipe(self) -> None:
        """Suppress further output instead of ending the process."""
        self.quiet = True


class RunConsole(OutputConsole):
    """Console of a run, which goes on when its output cannot be written, for example to a full disk."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print; the first error of the output ends it, with a note on standard error."""
        try:
            super().print(*objects, **options)
        except OSError as error:
            self.quiet = True
            # What is left in the buffer would fail again at the end of the process, and change its status.
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
            with contextlib.suppress(OSError):
                print(f"the output cannot be written: {error.strerror}; the run goes on without it", file=sys.stderr)


Kind = TypeVar("Kind", bound=OutputConsole)


def output_console(*, stderr: bool = False) -> OutputConsole:
    """Return a console for tables and sentences."""
    return _console(OutputConsole, stderr=stderr)


def run_console() -> RunConsole:
    """Return a console for a run."""
    return _console(RunConsole)


def _console(kind: type[Kind], *, stderr: bool = False) -> Kind:
    """Return a console with 200 columns for pipes, whose default of 80 would break tables.

    The variable COLUMNS overrides the width. Sentences are printed unwrapped (``soft_wrap``) in any case.
    """
    console = kind(stderr=stderr, emoji=False)  # messages contain names such as my_task:leaves
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return kind(stderr=stderr, width=_PIPE_COLUMNS, emoji=False)
