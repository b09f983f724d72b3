"""Comparison of the objects of a bucket with their recorded digests; a reader compares only the copy in its cache."""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from rollmesh.checkpoints import batches, committed
from rollmesh.checkpoints.checkpoint_store import CheckpointStore, CopyCheck
from rollmesh.checkpoints.committed import COMMITTED_FILE
from rollmesh.checkpoints.manifest import MANIFEST_FILE, Manifest, ManifestFile
from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.errors import CheckpointError
from rollmesh.types import PolicyRecord

MOST_BYTES = 64 << 30
"""Maximum number of bytes that one check reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredCopy:
    """The objects of one policy, trainer state or batch file."""

    name: str
    marker: str
    """Key that is written last and deleted first."""
    parts: list[tuple[str, int, int, str]]
    """Key, first byte and length of a range of an object, and its recorded digest."""


def check_copies(objects: ObjectStore, copies: Iterable[StoredCopy]) -> CopyCheck:
    """Compare copies with their digests, in order, as far as ``MOST_BYTES`` allow; ignore those pruned meanwhile."""
    compared, total = 0, 0
    skipped: list[str] = []
    damaged: dict[str, str] = {}
    for copy in copies:
        size = sum(length for _, _, length, _ in copy.parts)
        if total + size > MOST_BYTES:
            skipped.append(copy.name)
            continue
        found = objects.sha256_all([(key, start, start + length) for key, start, length, _ in copy.parts])
        wrong = [key for (key, _, _, wanted), digest in zip(copy.parts, found, strict=True) if digest != wanted]
        if wrong and not objects.sizes(copy.marker):
            continue
        compared, total = compared + 1, total + size
        if wrong:
            damaged[copy.name] = f"missing, or different from the recorded digest: {', '.join(wrong)}"
    return CopyCheck(compared=compared, compared_bytes=total, skipped=tuple(skipped), damaged=damaged)


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
            part = (key, batches.PAYLOAD_START, footer.payload_bytes, footer.payload_sha256)
            yield StoredCopy(name=key, marker=key, parts=[part])


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
    parts = [(f"{path}/{f.path}", 0, f.size_bytes, f.sha256) for f in files]
    return StoredCopy(name=path, marker=f"{path}/{marker}", parts=parts)
