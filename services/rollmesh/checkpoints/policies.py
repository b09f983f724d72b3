"""Published policies: folders with unique names, never renamed, whose manifest is written last."""

import contextlib
import hashlib
import os
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rollmesh.checkpoints.describe import describe_folder
from rollmesh.checkpoints.durable import (
    confined,
    is_folder_name,
    make_folder,
    naming_full_disk,
    regular_files,
    remove_tree,
    session_folders,
    sync_folder,
    sync_tree,
    write_new_file,
)
from rollmesh.checkpoints.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    CanarySequence,
    Manifest,
    WeightDelta,
    check_files,
    manifest_files,
    parse_manifest,
)
from rollmesh.errors import CheckpointError, Reason
from rollmesh.runtime.logging import get_logger
from rollmesh.types import PolicyRecord

FOLDER = "policies"
LATEST_LINK = "latest"
"""Name of the symbolic link, in the store's folder, to the newest announced policy: for people, not for readers."""
ANNOUNCED_FILE = "ANNOUNCED"
"""Name of the empty marker of an accepted folder: a hint for recovery, which readers do not require."""

WriteFolder = Callable[[Path], Mapping[str, str] | None]
"""Function that fills an empty folder; may return the digests, by path, of files that it digested while writing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifiedPolicy:
    """A policy folder in which every byte was compared with its manifest."""

    folder: Path
    manifest: Manifest
    base: "VerifiedPolicy | None" = None
    """Policy that an adapter is applied above; None for full weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchedPolicy:
    """A policy folder on this node whose manifest matches its record; its files are not verified."""

    folder: Path
    manifest: Manifest
    inode: int
    """Inode of the folder, which changes if the folder is replaced."""


@dataclass(frozen=True, slots=True)
class PolicyDraft:
    """Identity of a policy before its publication."""

    session: str
    """Trainer session, letters and digits."""
    policy_version: int
    train_step: int
    parent: int | None
    base: PolicyRecord | None
    """Policy that an adapter is applied above; None publishes full weights."""
    base_manifest: Manifest | None


def folder_name(train_step: int, session: str) -> str:
    """Return ``<step>-<session>``. Raises CheckpointError for a session that is not valid in a file name."""
    name = f"{train_step:08d}-{session}"
    if not is_folder_name(name):
        raise CheckpointError(f"trainer session {session!r}: expected 1 to 64 letters and digits")
    return name


def publish(
    root: Path,
    secret: bytes,
    draft: PolicyDraft,
    write: WriteFolder,
    canary: Sequence[CanarySequence],
    encode: Callable[[PolicyDraft, Path], WeightDelta | None],
) -> PolicyRecord:
    """Write a policy folder and its manifest; return the record to announce.

    ``write`` fills the empty folder with a Hugging Face model and its tokenizer, or with a PEFT adapter if the draft
    has a base; ``encode`` returns the deltas that a bucket gets for its weights. The folder is deleted on an error. A
    full disk raises CheckpointError (disk_full) with the folder and the number of free bytes.
    """
    path = f"{FOLDER}/{folder_name(draft.train_step, draft.session)}"
    folder = root / path
    if (folder / MANIFEST_FILE).exists():
        raise CheckpointError(f"{folder}: this session has already published train step {draft.train_step}")
    try:
        with naming_full_disk(folder, "a policy"):
            remove_tree(folder)
            make_folder(folder)
            digests = write(folder)
            manifest = _manifest(folder, digests or {}, draft, canary)
            manifest = manifest.model_copy(update={"delta": encode(draft, folder)}).signed(secret)
            sync_tree(folder)
            data = manifest.to_bytes()
            write_new_file(folder / MANIFEST_FILE, data)
    except BaseException:
        remove_tree(folder, first=[MANIFEST_FILE])
        raise
    return PolicyRecord(
        policy_version=draft.policy_version,
        train_step=draft.train_step,
        path=path,
        manifest_digest=hashlib.sha256(data).hexdigest(),
    )


def fetched(root: Path, secret: bytes, record: PolicyRecord) -> FetchedPolicy:
    """Compare the manifest of a published folder with its record. Raises CheckpointError with the ``reason``."""
    folder = confined(root, record.path)
    data = _read_manifest(folder)
    manifest = parse_manifest(data, str(folder / MANIFEST_FILE))  # an incomplete one is a torn write
    if hashlib.sha256(data).hexdigest() != record.manifest_digest:
        raise CheckpointError(
            f"{folder}: the manifest differs from the one announced as policy_version {record.policy_version}",
            reason=Reason.TAMPERED,
        )
    manifest.check_signature(secret)
    if (manifest.policy_version, manifest.train_step) != (record.policy_version, record.train_step):
        raise CheckpointError(
            f"{folder}: contains policy_version {manifest.policy_version} of train step {manifest.train_step}, but is "
            f"announced as policy_version {record.policy_version} of train step {record.train_step}",
            reason=Reason.MISMATCH,
        )
    return FetchedPolicy(folder=folder, manifest=manifest, inode=_inode(folder))


def verify_files(policy: FetchedPolicy) -> VerifiedPolicy:
    """Compare every file with the manifest. Raises CheckpointError with the ``reason`` of the first difference."""
    folder, manifest = policy.folder, policy.manifest
    check_files(folder, manifest.files)
    listed = {MANIFEST_FILE, ANNOUNCED_FILE, *(f.path for f in manifest.files)}
    if unlisted := [name for name in regular_files(folder) if name not in listed]:
        raise CheckpointError(f"{folder}: files that the manifest does not list: {unlisted}", reason=Reason.TAMPERED)
    if _inode(folder) != policy.inode:
        raise CheckpointError(f"{folder}: replaced while it was read", reason=Reason.INVALID)
    return VerifiedPolicy(folder=folder, manifest=manifest)


def _inode(folder: Path) -> int:
    try:
        return folder.stat().st_ino
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder}: deleted while it was read", reason=Reason.MISSING) from error


def mark_announced(root: Path, record: PolicyRecord) -> None:
    """Mark the policy as accepted by the registry, on disk. Idempotent. CheckpointError (disk_full) on a full disk."""
    folder = confined(root, record.path)
    if not (folder / ANNOUNCED_FILE).exists():
        with naming_full_disk(folder, ANNOUNCED_FILE):
            write_new_file(folder / ANNOUNCED_FILE, b"")


def link_latest(root: Path, record: PolicyRecord) -> None:
    """Let ``latest`` name this policy, unless it names a newer one. Atomic and idempotent.

    The link is for people: where it cannot be made, the folder has none. Raises CheckpointError (disk_full) on a full
    disk.
    """
    link = root / LATEST_LINK
    with contextlib.suppress(OSError, CheckpointError):  # without a readable policy it is made anew
        if parse_manifest((link / MANIFEST_FILE).read_bytes(), str(link)).policy_version >= record.policy_version:
            return
    temporary = root / f".{LATEST_LINK}-{uuid.uuid4().hex}"
    try:
        with naming_full_disk(root, LATEST_LINK):
            temporary.symlink_to(record.path, target_is_directory=True)
            os.replace(temporary, link)
            sync_folder(root)
    except OSError as error:
        get_logger("checkpoints").warning("latest_not_linked", message=str(error))
    finally:
        temporary.unlink(missing_ok=True)


def found_manifests(root: Path) -> "Iterator[FoundManifest]":
    """Yield every manifest below ``root``, and an entry for every announced folder without one."""
    for folder in session_folders(root / FOLDER):
        announced = (folder / ANNOUNCED_FILE).exists()
        data = None
        with contextlib.suppress(CheckpointError):
            data = _read_manifest(folder)
        if data is not None or announced:
            yield FoundManifest(path=f"{FOLDER}/{folder.name}", data=data, announced=announced)


def prunable(
    paths: Iterable[str],
    records: Sequence[PolicyRecord],
    *,
    keep_last: int,
    keep_versions: Collection[int],
    session: str,
) -> list[str]:
    """Return the folders among ``paths`` that ``CheckpointStore.prune`` deletes."""
    if keep_last < 1:
        raise CheckpointError(f"keep_last={keep_last}: expected at least 1")
    newest = sorted(records, key=lambda r: r.policy_version)[-keep_last:]
    kept = {r.path for r in (*newest, *(r for r in records if r.policy_version in keep_versions))}
    announced = {r.path for r in records}
    published_step = max((r.train_step for r in records), default=-1)
    removed: list[str] = []
    for path in paths:
        step, _, owner = path.rpartition("/")[2].partition("-")
        orphan = path not in announced and owner != session and int(step) <= published_step
        if path not in kept and (path in announced or orphan):
            removed.append(path)
    return removed


def _read_manifest(folder: Path) -> bytes:
    path = folder / MANIFEST_FILE
    if path.is_symlink():
        raise CheckpointError(f"{path}: symbolic links are not followed", reason=Reason.PATH_ESCAPE)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError as error:
        reason = Reason.TORN if folder.is_dir() else Reason.MISSING
        raise CheckpointError(f"{path}: missing", reason=reason) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{path}: more than {MAX_MANIFEST_BYTES} bytes", reason=Reason.TAMPERED)
    return data


def _manifest(
    folder: Path, digests: Mapping[str, str], draft: PolicyDraft, canary: Sequence[CanarySequence]
) -> Manifest:
    return Manifest(
        kind="full" if draft.base is None else "adapter",
        base=draft.base,
        policy_version=draft.policy_version,
        train_step=draft.train_step,
        parent=draft.parent,
        session=draft.session,
        files=manifest_files(folder, digests),
        **describe_folder(folder, draft.base_manifest),
        canary=list(canary),
        create_time=datetime.now(UTC),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundManifest:
    """A manifest in a store, sound or unsound."""

    path: str
    """Path of its folder, relative to the store."""
    data: bytes | None
    """Content of the file; None if an announced folder has no readable manifest."""
    announced: bool

    def manifest(self, secret: bytes) -> Manifest:
        """Parse the manifest. Raises CheckpointError unless it is complete and sealed with this secret."""
        if self.data is None:
            raise CheckpointError(f"{self.path}/{MANIFEST_FILE}: missing or unreadable", reason=Reason.TORN)
        manifest = parse_manifest(self.data, self.path)
        manifest.check_signature(secret)
        return manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsoundPolicy:
    """A published folder without a sound policy."""

    path: str
    """Path of the folder, relative to the store."""
    train_step: int
    """Train step in the folder name."""
    policy_version: int | None
    """Version in the manifest; None if it is unreadable."""
    announced: bool
    """True if the registry accepted the policy."""
    reason: str


def sound_records(
    manifests: Iterable[FoundManifest], secret: bytes, *, announced_only: bool = False
) -> list[PolicyRecord]:
    """Return records of all complete folders, one per policy_version, ascending, to restore a registry.

    Of two folders with the same version, the announced folder is preferred, then the newer one. Folders without a valid
    manifest are not policies and are skipped. ``announced_only`` also skips folders without the marker.
    """
    best: dict[int, tuple[bool, datetime, PolicyRecord]] = {}
    for found in manifests:
        with contextlib.suppress(CheckpointError):
            manifest = found.manifest(secret)
            record = PolicyRecord(
                policy_version=manifest.policy_version,
                train_step=manifest.train_step,
                path=found.path,
                manifest_digest=hashlib.sha256(found.data or b"").hexdigest(),
            )
            entry = (found.announced, manifest.create_time, record)
            known = best.get(manifest.policy_version)
            if (found.announced or not announced_only) and (known is None or entry[:2] > known[:2]):
                best[manifest.policy_version] = entry
    return [best[version][2] for version in sorted(best)]


def unsound_policies(manifests: Iterable[FoundManifest], secret: bytes) -> list[UnsoundPolicy]:
    """Return the manifests that ``sound_records`` skips, with the reason."""
    unsound: list[UnsoundPolicy] = []
    for found in manifests:
        try:
            found.manifest(secret)
        except CheckpointError as error:
            claimed = None
            with contextlib.suppress(CheckpointError):
                claimed = parse_manifest(found.data or b"", found.path).policy_version
            step = int(found.path.rpartition("/")[2].partition("-")[0])
            unsound.append(
                UnsoundPolicy(
                    path=found.path,
                    train_step=step,
                    policy_version=claimed,
                    announced=found.announced,
                    reason=str(error),
                )
            )
    return unsound
