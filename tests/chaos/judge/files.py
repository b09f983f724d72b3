"""Readers of the files of a run folder, without code of the mesh: batch files, trainer states, policies.

docs/architecture.md and proto/ describe the layouts. The decoder of the protobuf wire format is in this file.
"""

import hashlib
import hmac
import json
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .full_weights import write_full_weights

_HEAD, _TAIL = b"RMBATCH1", b"RMBATCHE"
_HMAC_BYTES = 64
_POLICY, _INT32, _FLOAT32 = 1, 1, 2
"""Values of ``SEGMENT_SOURCE_POLICY`` and of two members of ``Dtype``."""


class Damaged(Exception):
    """The content of a file differs from the written content."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSegment:
    """Tokens of one policy version, or of the environment."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    """Log-probabilities; empty in a segment of the environment."""
    policy_version: int
    kv_min_version: int
    by_policy: bool
    temperature: float
    kept: tuple[npt.NDArray[np.int64], ...]
    """Set that each token was drawn from, empty for the full vocabulary; none at all without truncated sampling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedColumn:
    """Scores of a trajectory under a teacher."""

    teacher: str
    digest: str
    logprobs: npt.NDArray[np.float32]
    top_logprobs: npt.NDArray[np.float32]
    """Of the most likely tokens, those of the first response token first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTrajectory:
    """One trajectory of a batch file."""

    trajectory_id: str
    group_id: str
    member: int
    prompt_id: str
    prompt_ids: npt.NDArray[np.int32]
    segments: tuple[RecordedSegment, ...]
    scored: bool
    reward: float
    columns: tuple[RecordedColumn, ...] = ()
    """Columns of teachers: one, or none in a run without teachers."""

    @property
    def written(self) -> tuple[RecordedSegment, ...]:
        """Non-empty segments of a policy."""
        return tuple(s for s in self.segments if s.by_policy and len(s.token_ids))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchFile:
    """Groups of one train step, with their ids, and the footer."""

    train_step: int
    groups: tuple[tuple[str, tuple[RecordedTrajectory, ...]], ...]
    footer: Mapping[str, Any]

    @property
    def trajectories(self) -> Iterator[RecordedTrajectory]:
        """All members of all groups, in training order."""
        return (trajectory for _, members in self.groups for trajectory in members)


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedFolder:
    """Trainer state or policy: its signed record, and the damage found."""

    folder: Path
    record: Mapping[str, Any]
    """Content of the record; empty if it cannot be read."""
    damage: str
    """Reason why the folder is invalid; empty if it is sound."""

    @property
    def train_step(self) -> int:
        """Train step in the folder's name."""
        return int(self.folder.name.split("-")[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """Content of a run folder that the judge reads."""

    config: Mapping[str, Any]
    batches: Mapping[int, BatchFile]
    damaged: Mapping[str, str]
    """Reasons by name of the batch files and metrics that cannot be read."""
    states: tuple[SealedFolder, ...]
    policies: tuple[SealedFolder, ...]
    metrics: tuple[Mapping[str, Any], ...]
    """Metrics records, one per train step."""


def read_run(folder: Path, checkpoints: Path | None = None) -> RunFiles:
    """Read and verify the files of a run folder. Raises OSError without configuration, secret or checkpoints.

    ``checkpoints`` is a copy of the bucket of a run with an object store; full weights are written beside its deltas.
    """
    import yaml

    secret = (folder / "secret").read_text(encoding="ascii").strip().encode()
    root = checkpoints or folder / "checkpoints"
    write_full_weights(root)
    batches: dict[int, BatchFile] = {}
    damaged: dict[str, str] = {}
    for file in sorted((root / "batches").glob("[0-9]*.pb")):
        try:
            batches[int(file.stem)] = read_batch(file, secret)
        except (Damaged, ValueError, LookupError, struct.error) as error:
            damaged[f"batches/{file.name}"] = f"{type(error).__name__}: {error}"
    try:
        metrics = _json_lines(folder / "metrics.jsonl")
    except ValueError as error:
        metrics, damaged["metrics.jsonl"] = (), str(error)
    return RunFiles(
        config=yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8")),
        batches=batches,
        damaged=damaged,
        states=tuple(_sealed_folders(root / "states", "COMMITTED", secret)),
        policies=tuple(_sealed_folders(root / "policies", "manifest.json", secret)),
        metrics=metrics,
    )


def read_batch(file: Path, secret: bytes) -> BatchFile:
    """Read one batch file. Raises Damaged, ValueError, LookupError or struct.error if it is invalid."""
    content = file.read_bytes()
    if not (content.startswith(_HEAD) and content.endswith(_TAIL)):
        raise Damaged("not a complete batch file")
    end = len(content) - len(_TAIL) - 4
    (length,) = struct.unpack_from("<I", content, end)
    text, tag = content[end - _HMAC_BYTES - length : end - _HMAC_BYTES], content[end - _HMAC_BYTES : end]
    if not hmac.compare_digest(_tag(secret, text), tag):
        raise Damaged("the footer's HMAC does not match the run's secret")
    footer = json.loads(text)
    payload = content[len(_HEAD) : end - _HMAC_BYTES - length]
    if hashlib.sha256(payload).hexdigest() != footer["payload_sha256"]:
        raise Damaged("the digest of the groups differs from the footer")
    if footer["train_step"] != int(file.stem):
        raise Damaged(f"the file is of train step {footer['train_step']}")
    groups = [group for frame in _frames(payload) for group in _groups(frame)]
    if [name for name, _ in groups] != footer["group_ids"]:
        raise Damaged("the groups differ from the group ids in the footer")
    return BatchFile(train_step=footer["train_step"], groups=tuple(groups), footer=footer)


def _json_lines(file: Path) -> tuple[Mapping[str, Any], ...]:
    """Read the records of a file; return none if it is missing, as in a run without a train step."""
    return tuple(map(json.loads, file.read_text(encoding="utf-8").splitlines())) if file.exists() else ()


def _tag(secret: bytes, text: bytes) -> bytes:
    return hmac.new(secret, text, hashlib.sha256).hexdigest().encode()


def _frames(payload: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(payload):
        (length,) = struct.unpack_from("<Q", payload, at)
        at += 8 + length
        if at > len(payload):
            raise Damaged("the last group is cut off")
        yield payload[at - length : at]


def _groups(frame: bytes) -> Iterator[tuple[str, tuple[RecordedTrajectory, ...]]]:
    for group in fields(frame).get(2, ()):
        values = fields(group)
        yield _text(values, 1), tuple(_trajectory(fields(member)) for member in values.get(2, ()))


def _trajectory(values: Mapping[int, list[Any]]) -> RecordedTrajectory:
    prompt = fields(values[4][0])
    return RecordedTrajectory(
        trajectory_id=_text(values, 1),
        group_id=_text(values, 2),
        member=_int(values, 3),
        prompt_id=_text(prompt, 4),
        prompt_ids=_array(prompt, 1, _INT32, np.int32),
        segments=tuple(_segment(fields(segment)) for segment in values.get(5, ())),
        scored=7 in values,
        reward=_float(values, 8),
        columns=tuple(_column(fields(column)) for column in values.get(12, ())),
    )


def _column(values: Mapping[int, list[Any]]) -> RecordedColumn:
    return RecordedColumn(
        teacher=_text(values, 1),
        digest=_text(values, 2),
        logprobs=_array(values, 3, _FLOAT32, np.float32),
        top_logprobs=_array(values, 6, _FLOAT32, np.float32),
    )


def _segment(values: Mapping[int, list[Any]]) -> RecordedSegment:
    token_ids = _array(values, 1, _INT32, np.int32)
    return RecordedSegment(
        token_ids=token_ids,
        logprobs=_array(values, 2, _FLOAT32, np.float32),
        policy_version=_int(values, 3),
        kv_min_version=_int(values, 4),
        by_policy=_int(values, 5) == _POLICY,
        temperature=_float(values, 6),
        kept=_kept(values[7][-1], len(token_ids)) if 7 in values else (),
    )


def _kept(data: bytes, tokens: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Decode the kept sets of tokens: the four bytes of the values apart, sizes first, then steps between ids."""
    planes = np.frombuffer(zlib.decompress(data), np.uint8).reshape(4, -1)
    values = planes.T.astype(np.int64) @ (1 << 8 * np.arange(4))
    sizes, steps = values[:tokens], values[tokens:]
    return tuple(np.cumsum(part) for part in np.split(steps, np.cumsum(sizes)[:-1]))


def fields(message: bytes) -> dict[int, list[Any]]:
    """Return the values of a protobuf message by field number: ints for varints, bytes for all other types."""
    found: dict[int, list[Any]] = {}
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            found.setdefault(key >> 3, []).append(value)
            continue
        size = {1: 8, 5: 4}.get(kind)
        if kind == 2:
            size, at = _varint(message, at)
        if size is None or at + size > len(message):
            raise Damaged(f"malformed protobuf at byte {at}")
        found.setdefault(key >> 3, []).append(message[at : at + size])
        at += size
    return found


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def _int(values: Mapping[int, list[Any]], number: int) -> int:
    value: int = values.get(number, [0])[-1]
    return value - (1 << 64) if value >> 63 else value


def _float(values: Mapping[int, list[Any]], number: int) -> float:
    value: float = struct.unpack("<d", values[number][-1])[0] if number in values else 0.0
    return value


def _text(values: Mapping[int, list[Any]], number: int) -> str:
    value: bytes = values.get(number, [b""])[-1]
    return value.decode()


def _array(values: Mapping[int, list[Any]], number: int, dtype: int, kind: type[Any]) -> npt.NDArray[Any]:
    if number not in values:
        return np.empty(0, kind)
    tensor = fields(values[number][-1])
    if _int(tensor, 1) != dtype:
        raise Damaged(f"a tensor has dtype {_int(tensor, 1)}, expected {dtype}")
    return np.frombuffer(tensor.get(2, [b""])[-1], np.dtype(kind).newbyteorder("<")).astype(kind)


def _sealed_folders(parent: Path, record_name: str, secret: bytes) -> Iterator[SealedFolder]:
    for folder in sorted(parent.glob("[0-9]*-*")):
        if (folder / record_name).exists():
            yield _sealed_folder(folder, record_name, secret)


def _sealed_folder(folder: Path, record_name: str, secret: bytes) -> SealedFolder:
    try:
        record: dict[str, Any] = json.loads((folder / record_name).read_bytes())
        unsealed = {name: value for name, value in record.items() if name != "hmac"}
        text = json.dumps(unsealed, sort_keys=True, separators=(",", ":")).encode()
        sound = hmac.compare_digest(_tag(secret, text), str(record.get("hmac")).encode())
    except (ValueError, AttributeError) as error:
        return SealedFolder(folder=folder, record={}, damage=f"{record_name} cannot be read: {error}")
    if not sound:
        return SealedFolder(folder=folder, record=record, damage=f"the HMAC of {record_name} does not match")
    for file in record["files"]:
        path = folder / file["path"]
        if not path.is_file() or hashlib.sha256(path.read_bytes()).hexdigest() != file["sha256"]:
            return SealedFolder(folder=folder, record=record, damage=f"{file['path']} is missing or has another digest")
    return SealedFolder(folder=folder, record=record, damage="")
