"""Rows of the user: a JSONL file, a Parquet file, or the rows that a function returns."""

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from rollmesh.config.data import JsonlSource, ParquetSource, PythonSource
from rollmesh.errors import ConfigError, DataError
from rollmesh.tasks.sources.rows import Row, RowFormat, RowPrompts, RowReader
from rollmesh.tasks.sources.source_protocol import SourceSettings
from rollmesh.user_code import call_target, load_target, own_code

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_PARQUET = b"PAR1"
_OTHER_FORMATS = {
    b"\x1f\x8b": "compressed with gzip; unpack it",
    b"BZh": "compressed with bzip2; unpack it",
    b"\xfd7zXZ": "compressed with xz; unpack it",
    b"\x28\xb5\x2f\xfd": "compressed with zstd; unpack it",
    b"PK\x03\x04": "compressed with zip; unpack it",
    _PARQUET: "Parquet; set type: parquet",
    b"ARROW1": "Arrow; save it as Parquet, and set type: parquet",
    b"[": "one JSON array; write each of its objects on a line of its own",
    b"version https://git-lfs": "a pointer of Git LFS; fetch the file itself with git lfs pull",
    b"<": "HTML or XML, such as the page of a failed download; download the file itself",
    b"\xff\xfe": "UTF-16; save it as UTF-8",
    b"\xfe\xff": "UTF-16; save it as UTF-8",
}
"""First bytes of files that are often given instead of JSON lines, with the remedy."""


class JsonlRows:
    """Random access to JSONL rows. Blank lines are skipped; line numbers count from 1, as in editors."""

    def __init__(self, path: str | Path) -> None:
        """Index the lines; only their offsets are kept. Raises DataError if the file is not readable JSON lines."""
        self._path = Path(path)
        self.name = str(path)
        starts: list[int] = []
        lines: list[int] = []
        try:
            with self._path.open("rb") as file:
                self._identity = _identity(file.fileno())
                offset = 0
                begin = file.peek().removeprefix(_BYTE_ORDER_MARK).lstrip()
                if other := next((words for magic, words in _OTHER_FORMATS.items() if begin.startswith(magic)), None):
                    raise DataError(f"{path}: not JSON lines: the file is {other}")
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        starts.append(offset)
                        lines.append(number)
                    offset += len(line)
        except OSError as error:
            raise DataError(f"{path}: cannot be read: {error.strerror}") from error
        self._starts = np.array(starts, np.int64)
        self._lines = np.array(lines, np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, number: int) -> Row:
        line_number = int(self._lines[number])
        where = f"{self._path}:{line_number}"
        fields = _parse(self._line(int(self._starts[number])), where)
        return Row(fields=fields, where=where, prompt_id=self.prompt_id(number))

    def prompt_id(self, number: int) -> str:
        return f"{self._path.name}:{int(self._lines[number])}"

    def _line(self, start: int) -> bytes:
        try:
            with self._path.open("rb") as file:
                if _identity(file.fileno()) != self._identity:
                    raise DataError(f"{self._path}: the file changed while the run was reading it; restart the run")
                file.seek(start)
                return file.readline()
        except OSError as error:
            raise DataError(f"{self._path}: cannot be read: {error.strerror}") from error


def open_file(path: str | Path) -> RowReader:
    """Open the rows of a Parquet file, or of any other as JSON lines. Raises DataError and ConfigError as they do."""
    with suppress(OSError), Path(path).open("rb") as file:
        if file.read(len(_PARQUET)) == _PARQUET:
            return ParquetRows(path)
    return JsonlRows(path)


def open_table(source: JsonlSource, settings: SourceSettings) -> RowPrompts:
    """Open the file of a run; the rows are checked here."""
    rows = ParquetRows(source.path) if isinstance(source, ParquetSource) else JsonlRows(source.path)
    form = RowFormat(
        prompt_field=source.prompt_field,
        answer_field=source.answer_field,
        verifier_field=source.verifier_field,
        chat=source.chat,
    )
    return RowPrompts(rows, form, settings)


def _identity(descriptor: int) -> tuple[int, int, int]:
    status = os.fstat(descriptor)
    return status.st_ino, status.st_size, status.st_mtime_ns


def _parse(line: bytes, where: str) -> dict[str, Any]:
    try:
        text = line.removeprefix(_BYTE_ORDER_MARK).decode("utf-8")
        value = json.loads(text, parse_constant=_reject_constant, object_pairs_hook=_unique_fields)
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: not UTF-8: {error.reason} at byte {error.start}") from error
    except RecursionError as error:
        raise DataError(f"{where}: nested too deeply") from error
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value


def _unique_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"field {next(n for n, count in counts.items() if count > 1)!r} is set more than once")
    return fields


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


class ParquetRows:
    """Random access to Parquet rows. Messages count rows from 1; the table is kept in Arrow memory."""

    def __init__(self, path: str | Path) -> None:
        """Read the table. Raises DataError if that fails, and ConfigError without the extra."""
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise ConfigError(f"{path}: Parquet needs pyarrow: pip install 'rollmesh[datasets]'") from error
        self._path = Path(path)
        self.name = str(path)
        try:
            self._table = parquet.read_table(self._path)
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{path}: not a readable Parquet file: {error}") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, number: int) -> Row:
        fields = self._table.slice(number, 1).to_pylist()[0]
        where = f"{self._path}: row {number + 1}"
        return Row(fields=fields, where=where, prompt_id=self.prompt_id(number))

    def prompt_id(self, number: int) -> str:
        return f"{self._path.name}:{number + 1}"


class PythonRows:
    """Rows that ``module:function`` returns.

    A result with a length and integer indices (for example a ``datasets.Dataset``) is used in place. Any other iterable
    is read into a list.
    """

    def __init__(self, target: str, options: Mapping[str, Any]) -> None:
        """Call the target. Raises ConfigError if it does not exist or rejects the options."""
        self.name = target
        function = load_target(target, "data.source.target")
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
    form = RowFormat(verifier_field="verifier", required=False, chat=source.chat)
    return RowPrompts(PythonRows(source.target, source.options), form, settings)
