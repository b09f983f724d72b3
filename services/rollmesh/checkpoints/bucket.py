"""A checkpoint store in an object store: the bucket is authoritative, and the folder of a node is a cache.

publish     files first, the manifest last; a policy is announced only after its upload is complete
open        by the paths in manifest and record, without listing: the manifest is compared with the record, then files
            are pulled into a temporary folder with bounded concurrency and moved together. One process of a node pulls
            a policy, the others wait for it
batch file  one put after the local write; the batch is confirmed after it
state       every file, then COMMITTED
restart     the listing of the bucket decides. Local files that were not uploaded are ignored and written again
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from rollmesh.checkpoints import batches, committed, policies
from rollmesh.checkpoints.batches import BatchFooter, batch_path
from rollmesh.checkpoints.committed import COMMITTED_FILE, CommittedState, JudgedStates
from rollmesh.checkpoints.durable import confined, make_folder, regular_files, remove_tree, sha256_of, sync_folder
from rollmesh.checkpoints.manifest import MANIFEST_FILE, MAX_MANIFEST_BYTES, Manifest, ManifestFile, parse_manifest
from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.checkpoints.policies import ANNOUNCED_FILE, FoundManifest
from rollmesh.checkpoints.reasons import Reason
from rollmesh.checkpoints.sealing import LINEAGE_FILE, lineage
from rollmesh.errors import CheckpointError, ConfigError, RollmeshError
from rollmesh.types import Group, PolicyRecord

_MAX_RECORD_BYTES = 64 << 20
_IN_USE_SECONDS = 600.0
_LOCKS = ".pulls"


class ObjectMirror:
    """Synchronization of the local folder ``root`` of one process with the bucket. Calls block."""

    def __init__(self, objects: ObjectStore, root: Path, secret: bytes, *, cache_policies: int) -> None:
        _reject_several_nodes(objects.url)
        self.objects = objects
        self._root = root
        self._secret = secret
        self._cache_policies = cache_policies

    def lineage(self) -> str:
        """Return the identity of the store in the bucket; the first use creates it."""
        try:
            return self.objects.read(LINEAGE_FILE, 1024).decode("ascii").strip()
        except FileNotFoundError:
            self.objects.write(LINEAGE_FILE, lineage(self._root).encode())
            return self.objects.read(LINEAGE_FILE, 1024).decode("ascii").strip()

    # policies

    def push_policy(self, path: str) -> None:
        """Upload a published folder, its manifest last."""
        self._push_folder(path, last=MANIFEST_FILE)

    def push_announced(self, path: str) -> None:
        """Mark the policy as accepted by the registry, in the bucket."""
        self.objects.write(f"{path}/{ANNOUNCED_FILE}", b"")

    def fetch_policy(self, record: PolicyRecord) -> None:
        """Pull a policy unless it is in the local folder. CheckpointError if it is missing or its manifest differs."""
        folder = confined(self._root, record.path)
        with self._locked(folder.name):
            if _digest(folder / MANIFEST_FILE) != record.manifest_digest:
                self._pull_policy(record, folder)
            self._evict_old_policies(folder.name)

    def fetch_policy_again(self, record: PolicyRecord) -> None:
        """Pull a policy whose local copy is damaged."""
        folder = confined(self._root, record.path)
        with self._locked(folder.name):
            self._pull_policy(record, folder)

    def manifests(self) -> list[FoundManifest]:
        """Return every manifest in the bucket, and an entry for every announced folder without one."""
        sizes = self.objects.sizes(policies.FOLDER)
        announced = {key.rpartition("/")[0] for key in sizes if key.endswith("/" + ANNOUNCED_FILE)}
        written = {key.rpartition("/")[0] for key in sizes if key.endswith("/" + MANIFEST_FILE)}
        found = []
        for path in sorted(announced | written):
            if not policies.is_folder_name(path.rpartition("/")[2]):
                continue
            data = None
            if path in written:
                try:
                    data = self.objects.read(f"{path}/{MANIFEST_FILE}", MAX_MANIFEST_BYTES + 1)
                except FileNotFoundError:  # pruned in between
                    continue
            found.append(FoundManifest(path=path, data=data, announced=path in announced))
        return found

    def prune_policies(
        self, records: Sequence[PolicyRecord], *, keep_last: int, keep_versions: Collection[int], session: str
    ) -> list[str]:
        """Delete old policies from the bucket like ``policies.prune``."""
        paths = [f"{policies.FOLDER}/{name}" for name in self._folders(policies.FOLDER)]
        removed = policies.prunable(paths, records, keep_last=keep_last, keep_versions=keep_versions, session=session)
        for path in removed:
            self.objects.delete([f"{path}/{ANNOUNCED_FILE}"])  # announced without a manifest means damage
            self._delete_folder(path, first=MANIFEST_FILE)
        return removed

    # batch files

    def before_batch(self, train_step: int) -> None:
        """Make the local batch file of this step equal to the bucket's; delete it if the bucket has none."""
        path = batch_path(self._root, train_step)
        try:
            self.objects.get(_batch_key(train_step), path)
        except FileNotFoundError:
            path.unlink(missing_ok=True)

    def push_batch(self, train_step: int) -> str:
        """Upload a batch file unless the bucket has one; return the digest of the file in the bucket.

        Raises CheckpointError if another trainer has already uploaded other groups.
        """
        path, key = batch_path(self._root, train_step), _batch_key(train_step)
        local = batches.read_footer(self._root, self._secret, train_step)
        if self.objects.put_new(path, key):
            return local.payload_sha256
        try:
            stored = self.footer(train_step)
        except CheckpointError:
            self.objects.put(path, key)  # damaged, so no trainer has used it
            return local.payload_sha256
        if stored.group_ids != local.group_ids:
            raise CheckpointError(
                f"{self.objects.url}/{key}: train step {train_step} already has a batch of other groups",
                reason=Reason.MISMATCH,
            )
        return stored.payload_sha256

    def fetch_batch(self, train_step: int) -> None:
        """Pull the batch file of this step unless the local copy matches. Raises CheckpointError if it is missing.

        A local file may differ: its upload failed, and the step was cut again for another trainer.
        """
        stored = self.footer(train_step)
        try:
            if batches.read_footer(self._root, self._secret, train_step).payload_sha256 == stored.payload_sha256:
                return
        except CheckpointError:
            pass  # missing or damaged local copy
        self.fetch_batch_again(train_step)

    def fetch_batch_again(self, train_step: int) -> None:
        """Pull a batch file and replace the local copy."""
        key = _batch_key(train_step)
        try:
            self.objects.get(key, batch_path(self._root, train_step))
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.objects.url}/{key}: missing", reason=Reason.MISSING) from error

    def footer(self, train_step: int) -> BatchFooter:
        """Read the footer of a batch file in the bucket, without the trajectories."""
        with self._batch_file(train_step) as (file, where):
            return batches.footer_of(file, where, self._secret, train_step)

    def group(self, train_step: int, group_id: str) -> Group | None:
        """Read one group of a batch file in the bucket, without the rest and without a local copy."""
        with self._batch_file(train_step) as (file, where):
            return batches.group_of(file, where, self._secret, train_step, group_id)

    @contextlib.contextmanager
    def _batch_file(self, train_step: int) -> Iterator[tuple[BinaryIO, str]]:
        """Open a batch file in the bucket; yield it with its name for error messages."""
        where = f"{self.objects.url}/{_batch_key(train_step)}"
        try:
            with self.objects.open(_batch_key(train_step)) as file:
                yield file, where
        except FileNotFoundError as error:
            raise CheckpointError(f"{where}: missing", reason=Reason.MISSING) from error
        except RollmeshError:
            raise
        except Exception as error:  # clients of object stores have no common base class for an outage
            message = f"{where}: {str(error) or type(error).__name__}"
            raise CheckpointError(message, reason=Reason.UNREACHABLE) from error

    def batch_steps(self) -> list[int]:
        """Return the train steps with a batch file in the bucket, ascending."""
        return batches.steps_of(key.rpartition("/")[2] for key in self.objects.sizes(batches.FOLDER))

    # trainer states

    def push_state(self, state: CommittedState) -> None:
        """Upload a locally committed state, COMMITTED last."""
        self._push_folder(f"{committed.FOLDER}/{state.folder.name}", last=COMMITTED_FILE)

    def states(self) -> JudgedStates:
        """Return the sound and the unsound committed states in the bucket."""
        sizes = self.objects.sizes(committed.FOLDER)
        sound: list[CommittedState] = []
        unsound: dict[str, str] = {}
        for key in sizes:
            folder, _, name = key.rpartition("/")
            label = folder.rpartition("/")[2]
            if name != COMMITTED_FILE or not policies.is_folder_name(label):
                continue
            with contextlib.suppress(FileNotFoundError):  # pruned in between
                data = self.objects.read(key, _MAX_RECORD_BYTES)
                try:
                    record = committed.parse_record(data, f"{self.objects.url}/{key}", self._secret)
                except CheckpointError as error:
                    unsound[label] = str(error)
                    continue
                wrong = [f.path for f in record.files if sizes.get(f"{folder}/{f.path}") != f.size_bytes]
                if wrong:
                    unsound[label] = f"{self.objects.url}/{folder}: missing or of wrong size: {', '.join(wrong)}"
                else:
                    sound.append(CommittedState(folder=confined(self._root, folder), record=record))
        return JudgedStates(sound=committed.newest_first(sound), unsound=unsound)

    def fetch_state(self, state: CommittedState) -> None:
        """Pull the files of a state that are missing or of wrong size. Loading the state verifies them."""
        self._pull_state(state, lambda file, path: _size(path) == file.size_bytes)

    def fetch_state_again(self, state: CommittedState) -> None:
        """Pull the files of a state whose local copies are damaged."""
        self._pull_state(state, lambda file, path: _size(path) == file.size_bytes and sha256_of(path) == file.sha256)

    def _pull_state(self, state: CommittedState, is_local: Callable[[ManifestFile, Path], bool]) -> None:
        path = f"{committed.FOLDER}/{state.folder.name}"
        with self._locked(state.folder.name):
            wanted = [(f"{path}/{file.path}", file, confined(state.folder, file.path)) for file in state.record.files]
            try:
                self.objects.get_all([(key, target) for key, file, target in wanted if not is_local(file, target)])
            except FileNotFoundError as error:
                raise CheckpointError(f"{self.objects.url}/{path}: {error}", reason=Reason.MISSING) from error

    def prune_states(self, *, keep_last: int, session: str) -> list[str]:
        """Delete old states from the bucket like ``committed.prune_states``."""
        sizes = self.objects.sizes(committed.FOLDER)
        folders = {
            name: f"{committed.FOLDER}/{name}/{COMMITTED_FILE}" in sizes for name in self._folders(committed.FOLDER)
        }
        removed = committed.prunable(folders, self.states().sound, keep_last=keep_last, session=session)
        for name in removed:
            self._delete_folder(f"{committed.FOLDER}/{name}", first=COMMITTED_FILE)
        return removed

    # helpers

    def _push_folder(self, path: str, *, last: str) -> None:
        folder = self._root / path
        names = [name for name in regular_files(folder) if name != last]
        self.objects.put_all([(folder / name, f"{path}/{name}") for name in names])
        self.objects.put(folder / last, f"{path}/{last}")

    def _delete_folder(self, path: str, *, first: str) -> None:
        self.objects.delete([f"{path}/{first}"])
        self.objects.delete(sorted(self.objects.sizes(path)))

    def _folders(self, parent: str) -> list[str]:
        names = {key.split("/")[1] for key in self.objects.sizes(parent) if key.count("/") >= 2}
        return sorted(name for name in names if policies.is_folder_name(name))

    def _pull_policy(self, record: PolicyRecord, folder: Path) -> None:
        manifest = self._manifest(record)
        temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
        try:
            pairs = [(f"{record.path}/{f.path}", confined(temporary, f.path)) for f in manifest.files]
            self.objects.get_all([*pairs, (f"{record.path}/{MANIFEST_FILE}", temporary / MANIFEST_FILE)])
            remove_tree(folder, first=[MANIFEST_FILE])
            os.replace(temporary, folder)
            sync_folder(folder.parent)
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.objects.url}/{record.path}: {error}", reason=Reason.MISSING) from error
        finally:
            remove_tree(temporary)

    def _manifest(self, record: PolicyRecord) -> Manifest:
        where = f"{self.objects.url}/{record.path}/{MANIFEST_FILE}"
        try:
            data = self.objects.read(f"{record.path}/{MANIFEST_FILE}", MAX_MANIFEST_BYTES + 1)
        except FileNotFoundError as error:
            raise CheckpointError(f"{where}: missing", reason=Reason.MISSING) from error
        manifest = parse_manifest(data, where)
        if hashlib.sha256(data).hexdigest() != record.manifest_digest:
            raise CheckpointError(
                f"{where}: differs from the manifest announced as policy_version {record.policy_version}",
                reason=Reason.TAMPERED,
            )
        return manifest

    def _evict_old_policies(self, name: str) -> None:
        """Delete pulled policies but ``name``, the most recently used, and those that were opened recently."""
        locks = self._root / _LOCKS
        used = {lock.name: _last_used(lock) for lock in locks.iterdir() if policies.is_folder_name(lock.name)}
        newest = sorted(used, key=lambda each: used[each], reverse=True)[: self._cache_policies]
        for each, when in used.items():
            if each not in (name, *newest) and time.time() - when > _IN_USE_SECONDS:
                self._evict(each)

    def _evict(self, name: str) -> None:
        """Delete one pulled folder and its lock, unless a process has the lock or used the folder recently."""
        path = self._root / _LOCKS / name
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_file_at(lock.fileno(), path) and time.time() - _last_used(path) > _IN_USE_SECONDS:
                remove_tree(self._root / policies.FOLDER / name, first=[MANIFEST_FILE])
                path.unlink()

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[None]:
        """Hold this node's lock on a folder name. The modification time of the lock is the time of last use."""
        path = self._root / _LOCKS / name
        make_folder(path.parent)
        while True:
            with path.open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # The previous holder may have evicted the folder and deleted the lock file. Then this lock is void.
                if not _is_file_at(lock.fileno(), path):
                    continue
                os.utime(path)
                yield
                return


def _reject_several_nodes(url: str) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    if world > local:
        raise ConfigError(
            f"checkpoints.folder={url}: a trainer over several nodes ({world} ranks, {local} here) requires a shared "
            "folder for its state; set checkpoints.folder to a shared folder, or run the trainer on one node"
        )


def _batch_key(train_step: int) -> str:
    return f"{batches.FOLDER}/{train_step:08d}.pb"


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def _last_used(lock: Path) -> float:
    try:
        return lock.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _is_file_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _size(file: Path) -> int:
    try:
        return file.lstat().st_size
    except OSError:
        return -1
