"""The objects of a bucket with their recorded digests: newest state, policies, batch files."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

from rollmesh.checkpoints import batches, committed
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.committed import COMMITTED_FILE
from rollmesh.checkpoints.copy_check import ObjectPart, StoredCopy
from rollmesh.checkpoints.manifest import MANIFEST_FILE, Manifest, ManifestFile
from rollmesh.errors import CheckpointError
from rollmesh.types import PolicyRecord


def batch_key(train_step: int) -> str:
    """Return the key of a batch file."""
    return f"{batches.FOLDER}/{train_step:08d}.pb"


def stored_copies(store: CheckpointStore, manifest_of: Callable[[PolicyRecord], Manifest]) -> Iterator[StoredCopy]:
    """Yield the copies in a bucket, newest first; ``manifest_of`` reads a manifest there.

    Raises CheckpointError if the bucket is unreachable.
    """
    state = store.latest_committed()
    if state is not None:
        yield _copy(f"{committed.FOLDER}/{state.folder.name}", COMMITTED_FILE, state.record.files)
    for record in reversed(store.complete_policies()):
        with _unless_unreachable():  # pruned in between
            yield policy_copy(record.path, manifest_of(record))
    for train_step in reversed(store.batch_steps()):
        with _unless_unreachable():  # a reader of the file reports a damaged footer
            footer, key = store.batch_footer(train_step), batch_key(train_step)
            part = ObjectPart(
                key=key,
                start=batches.PAYLOAD_START,
                size_bytes=footer.payload_bytes,
                sha256=footer.payload_sha256,
            )
            yield StoredCopy(name=key, marker=key, parts=(part,))


def policy_copy(path: str, manifest: Manifest) -> StoredCopy:
    """Return the copy of a policy: its weights, or the difference to those of another one."""
    return _copy(path, MANIFEST_FILE, manifest.stored_files)


@contextlib.contextmanager
def _unless_unreachable() -> Iterator[None]:
    """Ignore a copy that is pruned or damaged; raise CheckpointError if the bucket is unreachable."""
    try:
        yield
    except CheckpointError as error:
        if error.outside:
            raise


def _copy(path: str, marker: str, files: Iterable[ManifestFile]) -> StoredCopy:
    parts = [ObjectPart(key=f"{path}/{f.path}", size_bytes=f.size_bytes, sha256=f.sha256) for f in files]
    return StoredCopy(name=path, marker=f"{path}/{marker}", parts=tuple(parts))
