"""Trainer state in safetensors, through torch.distributed.checkpoint: every rank writes its shards.

No pickle is written or read. The safetensors storage keeps the sharding in the file headers, and all other values are
JSON in ``COMMITTED``. A state that N ranks saved can be loaded by M ranks.
"""

import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from rollmesh.checkpoints import committed
from rollmesh.checkpoints.committed import CommittedState, StateRecord
from rollmesh.checkpoints.durable import (
    disk_full_error,
    full_disk,
    make_folder,
    remove_tree,
    sha256_of,
    sync_file,
    sync_folder,
    write_new_file,
)
from rollmesh.checkpoints.manifest import ManifestFile
from rollmesh.checkpoints.policies import folder_name
from rollmesh.errors import CheckpointError, Reason

_RANK_FILES = TypeAdapter(list[ManifestFile])
_FILTERS = threading.Lock()


def save_state(
    root: Path,
    secret: bytes,
    session: str,
    train_step: int,
    rollback_count: int,
    tensors: Mapping[str, torch.Tensor],
    extra: Mapping[str, Any],
) -> CommittedState:
    """Save and commit a trainer state. Every rank of the process group must call this with its shards.

    ``tensors`` may contain DTensors. ``extra`` (JSON values) is taken from rank 0. If the disk is full on any rank,
    every rank raises CheckpointError (disk_full) with the folder and the number of free bytes. The folder is then
    deleted, and all ranks may retry.
    """
    rank, world = _rank_and_world()
    folder = root / committed.FOLDER / folder_name(train_step, session)
    try:
        with _together(folder):
            if rank == 0:
                remove_tree(folder, first=[committed.COMMITTED_FILE])
                make_folder(folder)
        with _no_single_process_warning():
            writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
            dcp_save(dict(tensors), storage_writer=writer, no_dist=world == 1)
        with _together(folder):
            _write_rank_file(folder, rank)
        with _together(folder):
            if rank == 0:
                files = [_RANK_FILES.validate_json(_rank_file(folder, r).read_bytes()) for r in range(world)]
                record = StateRecord(
                    train_step=train_step,
                    rollback_count=rollback_count,
                    session=session,
                    world_size=world,
                    files=[file for rank_files in files for file in rank_files],
                    extra=dict(extra),
                    create_time=datetime.now(UTC),
                )
                write_new_file(folder / committed.COMMITTED_FILE, record.sealed_bytes(secret))
    except (Exception, CheckpointException) as error:
        if full_disk(error) or (isinstance(error, CheckpointError) and error.reason == Reason.DISK_FULL):
            failure = disk_full_error(folder, "a trainer state", error)
            if rank == 0:
                remove_tree(folder, first=[committed.COMMITTED_FILE])
            raise failure from error
        if isinstance(error, CheckpointException):  # a BaseException in torch
            if (failed := _os_error(error)) is not None:
                raise failed from error
            raise CheckpointError(f"{folder}: the trainer state cannot be saved: {error}") from error
        raise
    for state in committed.judge_states(root, secret).sound:
        if state.folder == folder:
            return state
    raise CheckpointError(
        f"{folder}: deleted right after the commit: another trainer prunes this store", reason=Reason.TORN
    )


def load_state(state: CommittedState, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Fill ``tensors`` in place from a committed state, resharded if necessary; return ``extra``.

    Every rank must call this. Digests are verified first. Raises CheckpointError with the reason.
    """
    rank, world = _rank_and_world()
    with _together(state.folder):
        committed.verify_files(state, rank=rank, world_size=world)
    load_weights(state.folder, tensors)
    return dict(state.record.extra)


def load_weights(folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill (possibly sharded) tensors in place from a verified Hugging Face or state folder. Every rank must call this.

    Raises CheckpointError if the folder does not have these tensors.
    """
    _, world = _rank_and_world()
    try:
        with _no_single_process_warning():
            dcp_load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=world == 1)
    except CheckpointException as error:
        # A BaseException in torch. Unless a read failed, the requested tensors differ from the saved ones.
        if (failed := _os_error(error)) is not None:
            raise CheckpointError(f"{folder}: cannot be read: {failed}") from error
        first = next((cause for cause, _ in error.failures.values()), error)
        raise CheckpointError(
            f"{folder}: does not match this model and optimizer: {first}",
            reason=Reason.FOREIGN_ARCHITECTURE,
        ) from error


def _os_error(error: CheckpointException) -> OSError | None:
    """Return the error of the operating system among those of the ranks, if there is one."""
    return next((cause for cause, _ in error.failures.values() if isinstance(cause, OSError)), None)


def _rank_and_world() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


@contextmanager
def _together(folder: Path) -> Iterator[None]:
    """Run a block on each rank alone; then all ranks continue, or all raise if one of them failed.

    A rank that raises alone would block its peers in their next collective call until it times out.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    _, world = _rank_and_world()
    if world > 1:
        outcome = torch.tensor([0 if failure is None else 2 if full_disk(failure) else 1])
        dist.all_reduce(outcome, dist.ReduceOp.MAX)
        if failure is None and int(outcome):
            reason = Reason.DISK_FULL if int(outcome) == 2 else Reason.INVALID
            raise CheckpointError(f"{folder}: another rank failed ({reason})", reason=reason)
    if failure is not None:
        raise failure


def _rank_file(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}.json"


def _write_rank_file(folder: Path, rank: int) -> None:
    """Flush the shards of this rank and write their sizes and digests for rank 0."""
    shards = sorted(folder.glob(f"shard-{rank + 1:05d}-*.safetensors"))
    for path in shards:
        sync_file(path)
    sync_folder(folder)
    files = [ManifestFile(path=p.name, size_bytes=p.stat().st_size, sha256=sha256_of(p)) for p in shards]
    write_new_file(_rank_file(folder, rank), _RANK_FILES.dump_json(files))


@contextmanager
def _no_single_process_warning() -> Iterator[None]:
    # The filters are those of the process: a thread that leaves would restore them under another one.
    with _FILTERS, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
