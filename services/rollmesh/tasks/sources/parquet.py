"""Rows of a Parquet file or a folder of them (extra: datasets)."""

from __future__ import annotations

from pathlib import Path

from rollmesh.config.data import ParquetSource
from rollmesh.errors import ConfigError, DataError
from rollmesh.tasks.sources.row import Row, table_format
from rollmesh.tasks.sources.rows import RowPrompts
from rollmesh.tasks.sources.source_protocol import SourceSettings


class ParquetRows:
    """Random access to Parquet rows. Messages count rows from 1; the table is kept in Arrow memory."""

    def __init__(self, path: str | Path) -> None:
        """Read the table. Raises DataError if that fails, and ConfigError without the extra."""
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise ConfigError("data.source.type=parquet needs pyarrow: pip install 'rollmesh[datasets]'") from error
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


def open_parquet(source: ParquetSource, settings: SourceSettings) -> RowPrompts:
    """Open the table of a run; the rows are checked here."""
    return RowPrompts(ParquetRows(source.path), table_format(source), settings)
