"""Rows from a user's callable."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rollmesh.config.data import PythonSource
from rollmesh.errors import ConfigError, DataError
from rollmesh.tasks.sources.row import Row, RowFormat
from rollmesh.tasks.sources.rows import RowPrompts
from rollmesh.tasks.sources.source_protocol import SourceSettings
from rollmesh.user_code import call_target, load_target, own_code


class PythonRows:
    """Rows that ``module:function`` returns.

    A result with a length and integer indices (for example a ``datasets.Dataset``) is used in place. Any other iterable
    is read into a list.
    """

    def __init__(self, target: str, options: Mapping[str, Any]) -> None:
        """Call the target. Raises ConfigError if it does not exist or rejects the options."""
        self.name = target
        function = load_target(target, "data.source.target")
        if not callable(function):
            raise ConfigError(f"data.source.target: {target!r} is not callable")
        rows = call_target(function, target, "data.source.target", options, "data.source.options")
        if not (hasattr(rows, "__len__") and hasattr(rows, "__getitem__")) or isinstance(rows, Mapping):
            if not isinstance(rows, Iterable) or isinstance(rows, str | bytes | Mapping):
                raise ConfigError(f"data.source.target: {target} must return rows, got {type(rows).__name__}")
            with own_code(f"data.source.target={target}", ConfigError):
                rows = list(rows)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, number: int) -> Row:
        """Return one row. Raises DataError if it is not a mapping from text."""
        where = self.prompt_id(number)
        with own_code(f"data.source.target={where}"):
            fields = self._rows[number]
        if not isinstance(fields, Mapping):
            raise DataError(f"{where}: expected a mapping with a prompt, got {type(fields).__name__}")
        for name in fields:
            if not isinstance(name, str):
                raise DataError(f"{where}: the name {name!r} of a field is {type(name).__name__}, expected text")
        return Row(fields=fields, where=where, prompt_id=where)

    def prompt_id(self, number: int) -> str:
        return f"{self.name}[{number}]"


def open_python(source: PythonSource, settings: SourceSettings) -> RowPrompts:
    """Call the function of a run; its rows are checked here."""
    form = RowFormat(answer_required=False, verifier_field="verifier", verifier_required=False, chat=source.chat)
    return RowPrompts(PythonRows(source.target, source.options), form, settings)
