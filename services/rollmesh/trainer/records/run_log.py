"""Step reports and sample completions as JSON lines in the run folder, each train step once whatever dies."""

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
    """The two files of one run; only the trainer that holds the session writes them.

    ``tidy`` drops the lines of steps that will be replayed, and what a fenced trainer or an attempt that found no room
    may have repeated, so every step has one line in the end. Writing raises CheckpointError (disk_full) without room;
    it may be repeated.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._metrics = folder / METRICS_FILE
        self._samples = folder / SAMPLES_FILE

    def tidy(self, train_step: int) -> None:
        """Forget lines of later steps, repeated ones, and a last line that a kill has cut off."""
        for file in (self._metrics, self._samples):
            keep_lines_up_to(file, train_step)

    def append(self, record: Mapping[str, Any], samples: Iterable[Mapping[str, Any]]) -> None:
        """Add the line of one step and its samples; they are on the device when this returns."""
        append_lines(self._samples, samples)
        append_lines(self._metrics, [record])

    def newest(self, most: int, train_step: int) -> list[dict[str, Any]]:
        """The reports of ``train_step`` and before among the last ``most`` lines, ascending; none without the file."""
        if not self._metrics.exists():
            return []
        with self._metrics.open("rb") as stream:
            lines = deque(stream, maxlen=most)
        found = {step[0]: line for line in lines if (step := _identity(line)) is not None and step[0] <= train_step}
        return [json.loads(found[step]) for step in sorted(found)]


def append_lines(file: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON objects, one a line, or nothing; not-a-number and infinities become null."""
    text = "".join(json.dumps(finite(record), separators=(",", ":"), allow_nan=False) + "\n" for record in records)
    with _room_for(file), file.open("ab", buffering=0) as stream:
        before, rest = stream.seek(0, os.SEEK_END), text.encode()
        try:
            while rest:
                rest = rest[stream.write(rest) :]
            os.fsync(stream.fileno())
        except OSError:
            # Part of a line would spoil the next one.
            with suppress(OSError):
                stream.truncate(before)
            raise


def keep_lines_up_to(file: Path, train_step: int) -> None:
    """Rewrite a file without lines of steps above ``train_step``, without unreadable and without repeated ones."""
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
    with _room_for(file):
        with temporary.open("wb") as stream:
            stream.write(after)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, file)


@contextmanager
def _room_for(file: Path) -> Iterator[None]:
    """Turn the error of a full disk into the one that is waited out."""
    try:
        yield
    except OSError as error:
        if full_disk(error):
            raise disk_full_error(file.parent, file.name, error) from error
        raise


def _identity(line: bytes) -> tuple[int, str] | None:
    """Train step (and trajectory, for a sample) of a complete line."""
    try:
        record = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(record, dict) or not isinstance(step := record.get("train_step"), int):
        return None
    return step, str(record.get("trajectory_id", ""))


def finite(value: Any) -> Any:
    """The same JSON value with null for not-a-number and infinities."""
    if isinstance(value, float):
        return value if value - value == 0.0 else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
