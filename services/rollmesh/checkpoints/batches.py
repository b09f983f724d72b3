"""Batch files: the batch of one train step, complete before the step begins and kept as the ledger.

    RMBATCH1 | frame ... | footer JSON | HMAC of the footer | footer length | RMBATCHE

A frame is one group: a length and a protobuf message, to stay below protobuf's limit of 2 GB. The footer at the end has
the ids, the prompt cursor, and the length and digest of the frames: a torn file has no valid footer. A file gets its
name only when it is complete (by a link on disk, by one put in an object store), and never replaces a sound file.
"""

import hashlib
import io
import os
import re
import secrets
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO, Literal

from google.protobuf.message import DecodeError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rollmesh.checkpoints.durable import link_new, make_folder, naming_full_disk, sync_folder
from rollmesh.checkpoints.sealing import canonical, seal, sealed
from rollmesh.config.trainer import AlgorithmConfig
from rollmesh.errors import CheckpointError, DataError, Reason
from rollmesh.mesh import Cursor
from rollmesh.prompt_history import PromptOutcome
from rollmesh.types import Batch, Group
from rollmesh.v1 import trajectory_pb2 as pb
from rollmesh.wire.codec import batch_from_pb, batch_to_pb

FOLDER = "batches"

_HEAD = b"RMBATCH1"
PAYLOAD_START = len(_HEAD)
"""Offset of the frames in a batch file."""
_TAIL = b"RMBATCHE"
_TAG_BYTES = 64
_END_BYTES = _TAG_BYTES + 4 + len(_TAIL)
_LENGTH = struct.Struct("<I")
_FRAME_LENGTH = struct.Struct("<Q")
_NAME = re.compile(r"^(\d{8,})\.pb$")


class StepRecipe(BaseModel):
    """Settings of the updates that a train step makes from its batch."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    algorithm: AlgorithmConfig
    """Algorithm section with the defaults of the loss filled in."""
    minibatches: int
    max_grad_norm: float
    betas: tuple[float, float]
    weight_decay: float
    max_token_staleness: int | None
    """Largest staleness of unmasked tokens; None masks no token."""


class StepSettings(BaseModel):
    """Settings of a train step. A replay reads them from its batch file instead of the run file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    learning_rate: float
    kl_reference_version: int | None
    """Reference version; None if neither a KL term nor the advantage reads one."""
    recipe: StepRecipe


class ReplayDraw(BaseModel):
    """Groups that a train step trains on beside the fresh ones of its file, and all that the draw depends on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    share: float
    by: Literal["uniform", "reward"]
    batches: int
    """Number of earlier batches that the run file allows."""
    seed: int
    max_staleness: int
    first: int
    """First train step that was allowed: of the last ``batches``, those after the last rollback."""
    sources: dict[int, str]
    """Digest of every batch that was drawn from, by train step: of those allowed, the ones that could be read and that
    no rollback has abandoned."""
    groups: list[tuple[int, str]]
    """Train step of the batch file and id of each drawn group."""


class BatchFooter(BaseModel):
    """Contents of a batch file that the ledger reads without the trajectories."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    train_step: int = Field(ge=1)
    group_ids: list[str]
    """Group ids in training order."""
    trajectory_count: int = Field(ge=0)
    cursor_epoch: int = Field(ge=0)
    cursor_index: int = Field(ge=0)
    payload_bytes: int = Field(ge=0)
    group_bytes: list[int]
    """Length of every group's frame, to read one group without the others."""
    payload_sha256: str
    """Digest of the batch: equal batches have equal digests, for any writer and time."""
    create_time: datetime
    version_train_steps: dict[int, int] = Field(default_factory=dict)
    """Train step of every policy version that wrote tokens of the batch. A replay requires them, although policies are
    pruned and the queue may be lost."""
    settings: StepSettings
    """Settings that the step is trained with."""
    outcomes: list[PromptOutcome] = Field(default_factory=list)
    """Groups that ended since the batch file before, trained or not: the disaster copy of the prompt history."""
    replay: ReplayDraw | None = None
    """Groups of earlier batch files that the step trains on too; None without replay."""

    @property
    def cursor(self) -> Cursor:
        """Prompt cursor at the time of writing, for disaster recovery."""
        return Cursor(epoch=self.cursor_epoch, index=self.cursor_index)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBatch:
    """Content and footer of one batch file, read together: the footer's digest is the digest of the batch."""

    batch: Batch
    footer: BatchFooter


def batch_path(root: Path, train_step: int) -> Path:
    """Return the path of the batch file of a train step."""
    return root / FOLDER / f"{train_step:08d}.pb"


def footer_draft(
    batch: Batch,
    cursor: Cursor,
    train_steps: Mapping[int, int],
    settings: StepSettings,
    outcomes: Sequence[PromptOutcome],
    replay: ReplayDraw | None,
) -> BatchFooter:
    """Return the footer of a batch without the facts of its frames."""
    versions = {version for group in batch.groups for t in group.trajectories for version in t.policy_versions}
    return BatchFooter(
        train_step=batch.train_step,
        group_ids=[g.group_id for g in batch.groups],
        trajectory_count=sum(len(g.trajectories) for g in batch.groups),
        cursor_epoch=cursor.epoch,
        cursor_index=cursor.index,
        payload_bytes=0,
        group_bytes=[],
        payload_sha256="",
        create_time=datetime.now(UTC),
        version_train_steps={v: train_steps[v] for v in sorted(versions) if v in train_steps},
        settings=settings,
        outcomes=list(outcomes),
        replay=replay,
    )


def write_batch(root: Path, secret: bytes, batch: Batch, draft: BatchFooter) -> str:
    """Write and flush the file of ``batch.train_step``; return its digest. Idempotent for the same batch.

    A complete file with other groups is never replaced: it is the batch of this step, and the caller is a superseded
    trainer.
    """
    path = batch_path(root, batch.train_step)
    if (written := _written(root, secret, batch)) is not None:
        return written
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with naming_full_disk(path.parent, f"batch file {path.name}"):
            with temporary.open("xb") as file:
                digest = _write(file, secret, batch, draft)
                file.flush()
                os.fsync(file.fileno())
            if not link_new(temporary, path):
                if (written := _written(root, secret, batch)) is not None:
                    return written
                os.replace(temporary, path)  # a torn file, or a file system without hard links
            sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
    return digest


def _written(root: Path, secret: bytes, batch: Batch) -> str | None:
    """Return the digest of an existing sound file, else None. Raises CheckpointError if it has other groups."""
    path = batch_path(root, batch.train_step)
    try:
        footer = read_batch(root, secret, batch.train_step).footer
    except CheckpointError:
        return None
    if footer.group_ids != [g.group_id for g in batch.groups]:
        raise CheckpointError(
            f"{path}: train step {batch.train_step} already has a batch of other groups", reason=Reason.MISMATCH
        )
    sync_folder(path.parent)  # the writer may have crashed right after the link
    return footer.payload_sha256


def read_footer(root: Path, secret: bytes, train_step: int) -> BatchFooter:
    """Read ids and digest of one batch file. Raises CheckpointError if it is missing, torn or tampered with."""
    path = batch_path(root, train_step)
    with opened(path) as file:
        return footer_of(file, str(path), secret, train_step)


def read_batch(root: Path, secret: bytes, train_step: int) -> StoredBatch:
    """Read and verify one batch file. Raises CheckpointError with the reason."""
    path = batch_path(root, train_step)
    with opened(path) as file:
        footer = footer_of(file, str(path), secret, train_step)
        file.seek(len(_HEAD))
        payload = file.read(footer.payload_bytes)
    if hashlib.sha256(payload).hexdigest() != footer.payload_sha256:
        raise CheckpointError(f"{path}: the trajectories do not match the digest", reason=Reason.TAMPERED)
    try:
        groups = tuple(decode_groups(payload))
    except DataError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if [g.group_id for g in groups] != footer.group_ids:
        raise CheckpointError(f"{path}: the groups do not match the footer", reason=Reason.TAMPERED)
    return StoredBatch(batch=Batch(train_step=train_step, groups=groups), footer=footer)


def groups_of(file: BinaryIO, path: str, secret: bytes, train_step: int, only: str | None = None) -> Iterator[Group]:
    """Read the groups of an open, seekable batch file one by one, in order, or the ``only`` one with this id.

    For display only: the footer is verified, but the trajectories are not compared with its digest. ``path`` is for
    error messages.
    """
    footer, position = footer_of(file, path, secret, train_step), len(_HEAD)
    for group_id, size in zip(footer.group_ids, footer.group_bytes, strict=True):
        if only in (None, group_id):
            file.seek(position)
            try:
                (found,) = decode_groups(file.read(size))
            except ValueError as error:
                raise CheckpointError(f"{path}: {error}") from error
            if found.group_id != group_id:
                raise CheckpointError(f"{path}: the groups do not match the footer", reason=Reason.TAMPERED)
            yield found
        position += size


def steps_of(names: Iterable[str]) -> list[int]:
    """Return the train steps of the batch files among these names, ascending."""
    return sorted(int(match[1]) for name in names if (match := _NAME.match(name)))


def _write(file: BinaryIO, secret: bytes, batch: Batch, draft: BatchFooter) -> str:
    digest = hashlib.sha256()
    sizes: list[int] = []
    file.write(_HEAD)
    for frame in encode_groups(batch):
        file.write(frame)
        digest.update(frame)
        sizes.append(len(frame))
    sha256 = digest.hexdigest()
    footer = draft.model_copy(update={"payload_bytes": sum(sizes), "group_bytes": sizes, "payload_sha256": sha256})
    text = canonical(footer.model_dump(mode="json"))
    file.write(text + seal(secret, text).encode() + _LENGTH.pack(len(text)) + _TAIL)
    return sha256


def opened(path: Path) -> BinaryIO:
    """Open a batch file. Raises CheckpointError if it is missing."""
    try:
        return path.open("rb")
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing", reason=Reason.MISSING) from error


def footer_of(file: BinaryIO, path: str, secret: bytes, train_step: int) -> BatchFooter:
    """Read the footer of an open, seekable batch file; ``path`` is for error messages. Raises CheckpointError."""
    size = file.seek(0, io.SEEK_END)
    torn = CheckpointError(f"{path}: torn: {size} bytes without a complete footer", reason=Reason.TORN)
    if size < len(_HEAD) + _END_BYTES:
        raise torn
    file.seek(size - _END_BYTES)
    end = file.read(_END_BYTES)
    (length,) = _LENGTH.unpack(end[_TAG_BYTES : _TAG_BYTES + 4])
    if end[-len(_TAIL) :] != _TAIL or len(_HEAD) + length + _END_BYTES > size:
        raise torn
    file.seek(size - _END_BYTES - length)
    text = file.read(length)
    if not sealed(secret, text, end[:_TAG_BYTES].decode("latin-1")):
        raise CheckpointError(f"{path}: the footer's HMAC does not match this run's secret", reason=Reason.TAMPERED)
    try:
        footer = BatchFooter.model_validate_json(text)
    except ValidationError as error:
        raise CheckpointError(f"{path}: the footer is malformed: {error}") from error
    file.seek(0)
    if file.read(len(_HEAD)) != _HEAD:
        raise CheckpointError(f"{path}: not a batch file", reason=Reason.TAMPERED)
    if footer.train_step != train_step:
        raise CheckpointError(
            f"{path}: contains train step {footer.train_step}, expected {train_step}", reason=Reason.MISMATCH
        )
    if len(_HEAD) + footer.payload_bytes + length + _END_BYTES != size:
        raise CheckpointError(f"{path}: {size} bytes do not match the footer", reason=Reason.TRUNCATED)
    return footer


def training_batch(stored: StoredBatch, read: Callable[[int], StoredBatch]) -> Batch:
    """Return the batch of a train step: its fresh groups with the replayed ones spread among them.

    ``read`` returns an earlier batch. Raises CheckpointError if the file of a replayed group is missing, damaged or not
    the one that was drawn from: without it the step cannot be trained again with the same result.
    """
    draw = stored.footer.replay
    if draw is None or not draw.groups:
        return stored.batch
    groups: dict[int, Mapping[str, Group]] = {}
    for step in sorted({step for step, _ in draw.groups}):
        groups[step] = _source_groups(stored.batch.train_step, step, draw, read)
    replayed = tuple(groups[step][group_id] for step, group_id in draw.groups)
    return replace(stored.batch, groups=_spread(stored.batch.groups, replayed))


def _source_groups(
    train_step: int, source: int, draw: ReplayDraw, read: Callable[[int], StoredBatch]
) -> Mapping[str, Group]:
    try:
        stored = read(source)
    except CheckpointError as error:
        raise CheckpointError(
            f"train step {train_step} replays groups of batch {source}: {error}", reason=error.reason
        ) from error
    found = {group.group_id: group for group in stored.batch.groups}
    missing = [group_id for step, group_id in draw.groups if step == source and group_id not in found]
    if missing or stored.footer.payload_sha256 != draw.sources.get(source):
        raise CheckpointError(
            f"train step {train_step} replays groups of batch {source}, whose file has other trajectories now",
            reason=Reason.MISMATCH,
        )
    return found


def _spread(fresh: tuple[Group, ...], replayed: tuple[Group, ...]) -> tuple[Group, ...]:
    """Merge two lists evenly and in order, so that every minibatch has its share of both."""
    places = [((i + 0.5) / len(part), part[i]) for part in (fresh, replayed) for i in range(len(part))]
    return tuple(group for _, group in sorted(places, key=lambda place: place[0]))


def encode_groups(batch: Batch) -> Iterator[bytes]:
    """Encode a batch as frames. Equal batches give equal bytes (map fields are ordered)."""
    for group in batch.groups:
        message = batch_to_pb(Batch(train_step=batch.train_step, groups=(group,)))
        data = message.SerializeToString(deterministic=True)
        yield _FRAME_LENGTH.pack(len(data)) + data


def decode_groups(data: bytes) -> Iterator[Group]:
    """Decode the groups of concatenated frames. Raises DataError with the byte offset of a malformed frame."""
    view = memoryview(data)
    position = 0
    while position < len(view):
        start = position
        try:
            (length,) = _FRAME_LENGTH.unpack_from(view, position)
            position += _FRAME_LENGTH.size + length
            if position > len(view):
                raise DataError(f"{position - len(view)} bytes are missing")
            message = pb.Batch.FromString(bytes(view[position - length : position]))
            yield from batch_from_pb(message).groups
        except (struct.error, DecodeError, DataError) as error:
            raise DataError(f"malformed group at byte {start}: {error}") from error
