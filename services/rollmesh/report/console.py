"""Numbers and lists as text, and the console of the commands: the terminal's width, or a fixed one for pipes."""

import contextlib
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from rich.console import Console

from rollmesh.store.queue_types import DomainScore

_LISTED = 5


def percent(share: float | None) -> str | None:
    """Format a share as ``12.3%``."""
    return None if share is None or math.isnan(share) else f"{100 * share:.1f}%"


def count(value: float | None) -> str | None:
    """Format a number as ``12,345``."""
    return None if value is None or math.isnan(value) else f"{value:,.0f}"


def duration(seconds: float | None) -> str | None:
    """Format seconds as ``45 s``, ``3 min 20 s`` or ``2 h 05 min``."""
    if seconds is None or math.isnan(seconds):
        return None
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def plus_minus(error: float | None, spec: str = ".3f") -> str:
    """Format a standard error as ``± 0.012``; unknown for fewer than two samples."""
    return "± unknown" if error is None or math.isnan(error) else f"± {error:{spec}}"


def domain_scores(domains: Mapping[str, DomainScore]) -> list[str]:
    """Describe the scores of an evaluation by domain, one line each."""
    return [
        f"{name} {score['mean']:.3f} {plus_minus(score['standard_error'])} (n={score['n']})"
        for name, score in domains.items()
    ]


def fewer_prompts(requested: float, existing: float) -> str:
    """State that an evaluation had fewer prompts than the run file asks for, with the remedies."""
    return (
        f"the evaluation split has {existing:.0f} of evaluation.prompt_count={requested:.0f} prompts: add rows, raise "
        "data.held_out_ratio, or set data.evaluation_source"
    )


def gap(value: float | None) -> str:
    """Format a difference of log-probabilities."""
    return "-" if value is None else f"{value:.2g}"


def listed(items: Sequence[str]) -> str:
    """List the first five items, and count the others."""
    rest = len(items) - _LISTED
    return ", ".join(items[:_LISTED]) + (f" and {rest} more" if rest > 0 else "")


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


def print_line(console: Console, text: str, style: str = "") -> None:
    """Print a text as it is, on one line at any width."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_sentence(console: Console, text: str, style: str = "") -> None:
    """Print a text as it is, broken between words on a terminal only."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=not console.is_terminal)


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
