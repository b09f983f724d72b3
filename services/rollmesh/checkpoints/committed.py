"""Committed trainer states in the file system, listed and checked without torch.

A state folder ``states/<step>-<session>/`` contains one safetensors file per rank, one ``rank-<r>.json`` with its
digest, and ``COMMITTED``, which is written last. A folder without it is not a state.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from rollmesh.checkpoints.durable import confined, regular_files, session_folders
from rollmesh.checkpoints.manifest import ManifestFile, check_files
from rollmesh.checkpoints.sealing import canonical, seal, sealed
from rollmesh.errors import CheckpointError, Reason

FOLDER = "states"
COMMITTED_FILE = "COMMITTED"


class StateRecord(BaseModel):
    """Content of ``COMMITTED``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    train_step: int = Field(ge=0)
    """Number of batches trained; all batches up to this step are consumed."""
    rollback_count: int = Field(ge=0)
    """Number of rollbacks. A state with more rollbacks takes precedence over every state with fewer."""
    session: str
    world_size: int = Field(ge=1)
    files: list[ManifestFile]
    extra: dict[str, JsonValue]
    """State other than tensors: train step, progress, generated tokens and stage layout."""
    create_time: datetime
    hmac: str = ""

    def signed_bytes(self) -> bytes:
        """Return the bytes that the HMAC covers."""
        return canonical(self.model_dump(mode="json", exclude={"hmac"}))

    def sealed_bytes(self, secret: bytes) -> bytes:
        """Return the content of the file, with the HMAC filled in."""
        tag = seal(secret, self.signed_bytes())
        return canonical(self.model_copy(update={"hmac": tag}).model_dump(mode="json"))


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedState:
    """A trainer state that may be loaded."""

    folder: Path
    record: StateRecord

    @property
    def train_step(self) -> int:
        """Number of batches trained."""
        return self.record.train_step


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedStates:
    """Committed trainer states, sound and unsound."""

    sound: list[CommittedState]
    """States that may be loaded, newest first."""
    unsound: dict[str, str]
    """Reason by folder name, for states with a torn or forged COMMITTED, a missing file, or a file of wrong size."""


def judge_states(root: Path, secret: bytes) -> JudgedStates:
    """Separate sound states from unsound ones. A folder without COMMITTED is not a state."""
    sound: list[CommittedState] = []
    unsound: dict[str, str] = {}
    for folder in session_folders(root / FOLDER):
        try:
            path = folder / COMMITTED_FILE
            record = parse_record(path.read_bytes(), str(path), secret)
            for file in record.files:
                size = confined(folder, file.path).lstat().st_size
                if size != file.size_bytes:
                    raise CheckpointError(f"{folder / file.path}: {size} bytes", reason=Reason.TRUNCATED)
        except (CheckpointError, OSError) as error:
            if (folder / COMMITTED_FILE).exists():
                unsound[folder.name] = str(error)
            continue
        sound.append(CommittedState(folder=folder, record=record))
    return JudgedStates(sound=newest_first(sound), unsound=unsound)


def newest_first(states: Iterable[CommittedState]) -> list[CommittedState]:
    """Sort states by rollbacks, then train step, then time, newest first."""
    return sorted(
        states, key=lambda s: (s.record.rollback_count, s.record.train_step, s.record.create_time), reverse=True
    )


def verify_files(state: CommittedState, *, rank: int = 0, world_size: int = 1) -> None:
    """Compare the digests of this rank's share of the files. Raises CheckpointError with the reason."""
    listed = {file.path for file in state.record.files}
    unlisted = [name for name in regular_files(state.folder) if name.endswith(".safetensors") and name not in listed]
    if unlisted:
        raise CheckpointError(f"{state.folder}: files that COMMITTED does not list: {unlisted}", reason=Reason.TAMPERED)
    check_files(state.folder, state.record.files[rank::world_size])


def prunable(
    folders: Mapping[str, bool], states: Sequence[CommittedState], *, keep_last: int, session: str
) -> list[str]:
    """Return the state folders that are deleted; ``folders`` maps a name to True if it has COMMITTED.

    The newest state of ``session`` stays: states that rank before it may be damaged.
    """
    own = [s for s in states if s.record.session == session]
    kept = {s.folder.name for s in (*states[:keep_last], *own[:1])}
    newest = states[0].train_step if states else -1
    removed: list[str] = []
    for name, finished in folders.items():
        step, _, owner = name.partition("-")
        if name not in kept and int(step) <= newest and (finished or owner != session):
            removed.append(name)
    return removed


def parse_record(data: bytes, path: str, secret: bytes) -> StateRecord:
    """Parse a COMMITTED file. Raises CheckpointError if it is torn or belongs to another run."""
    try:
        record = StateRecord.model_validate_json(data)
    except ValidationError as error:
        raise CheckpointError(f"{path}: incomplete", reason=Reason.TORN) from error
    if not sealed(secret, record.signed_bytes(), record.hmac):
        raise CheckpointError(f"{path}: the HMAC does not match this run's secret", reason=Reason.TAMPERED)
    return record
