"""Step reports and sample completions as JSON lines in the run folder, with each train step once after any crash."""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rollmesh.checkpoints.durable import disk_full_error, full_disk

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class StepRecords:
    """The two log files of a run. Only the trainer that holds the session writes them.

    ``tidy`` drops the lines of steps that will be replayed, and duplicates of a fenced trainer or a retried write, so
    every step has one line at the end. Writes raise CheckpointError (disk_full) on a full disk and may be retried.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = folder / METRICS_FILE
        self._samples = folder / SAMPLES_FILE

    def tidy(self, train_step: int) -> None:
        """Drop the lines of later steps, duplicates, and an incomplete last line."""
        for file in (self._metrics, self._samples):
            keep_lines_up_to(file, train_step)

    def append(self, record: Mapping[str, Any], samples: Iterable[Mapping[str, Any]]) -> None:
        """Append the line of one step and its samples, and fsync them."""
        append_lines(self._samples, samples)
        append_lines(self._metrics, [record])

    def newest(self, most: int, train_step: int) -> list[dict[str, Any]]:
        """Return the reports up to ``train_step`` among the last ``most`` lines, ascending; none without the file."""
        if not self._metrics.exists():
            return []
        with self._metrics.open("rb") as stream:
            lines = deque(stream, maxlen=most)
        found = {step[0]: line for line in lines if (step := _identity(line)) is not None and step[0] <= train_step}
        return [json.loads(found[step]) for step in sorted(found)]


def append_lines(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON objects, one per line, all or none; NaN and infinities become null."""
    text = "".join(json.dumps(finite(record), separators=(",", ":"), allow_nan=False) + "\n" for record in records)
    with _convert_disk_full(file), file.open("ab", buffering=0) as stream:
        before, rest = stream.seek(0, os.SEEK_END), text.encode()
        try:
            while rest:
                rest = rest[stream.write(rest) :]
            os.fsync(stream.fileno())
        except OSError:
            # A partial line would corrupt the next one.
            with suppress(OSError):
                stream.truncate(before)
            raise


def keep_lines_up_to(file: Path, train_step: int) -> None:
    """Rewrite a file without the lines of steps above ``train_step``, unreadable lines and duplicates."""
    if not file.exists():
        return
    before = file.read_bytes()
    kept: dict[tuple[int, str], bytes] = {}
    for line in before.splitlines(keepends=True):
        identity = _identity(line)
        if identity is not None and identity[0] <= train_step:
            kept[identity] = line
    after = b"".join(kept.values())
    if after == before:
        return
    temporary = file.with_name(f".{file.name}.tmp")
    with _convert_disk_full(file):
        with temporary.open("wb") as stream:
            stream.write(after)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)


@contextmanager
def _convert_disk_full(file: Path) -> Iterator[None]:
    """Convert the OSError of a full disk to CheckpointError (disk_full), which is retried."""
    try:
        yield
    except OSError as error:
        if full_disk(error):
            raise disk_full_error(file.parent, file.name, error) from error
        raise


def _identity(line: bytes) -> tuple[int, str] | None:
    """Return train step and trajectory id (empty for a report) of a line; None if it is incomplete."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(step := record.get("train_step"), int):
        return None
    return step, str(record.get("trajectory_id", ""))


def finite(value: Any) -> Any:
    """Copy a JSON value with None in place of NaN and infinities."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
