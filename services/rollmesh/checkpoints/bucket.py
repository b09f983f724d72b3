"""A checkpoint store in an object store: the folder of a node is what it has of it, the bucket is what counts.

publish     files first, the manifest last; nothing is announced before all of it is there
open        by the paths of manifest and record, never by listing: the manifest is compared with the record, then files
            are pulled beside their place, a few at once, and put there together. One process of a node pulls a policy,
            the others wait for it
batch file  one put after the local write; only then is the batch confirmed
state       every file, then COMMITTED
restart     what the bucket lists decides. Files of this node that never got there do not count and are written again
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
    """Keeps the local folder ``root`` of one process and the bucket in step. Blocking."""

    def __init__(self, objects: ObjectStore, root: Path, secret: bytes, *, cache_policies: int) -> None:
        _refuse_gangs_over_nodes(objects.url)
        self.objects = objects
        self._root = root
        self._secret = secret
        self._cache_policies = cache_policies

    def lineage(self) -> str:
        """Identity of the store in the bucket, made with its first use."""
        try:
            return self.objects.read(LINEAGE_FILE, 1024).decode("ascii").strip()
        except FileNotFoundError:
            self.objects.write(LINEAGE_FILE, lineage(self._root).encode())
            return self.objects.read(LINEAGE_FILE, 1024).decode("ascii").strip()

    # policies

    def push_policy(self, path: str) -> None:
        """Upload a published folder, its manifest last."""
        self._push_folder(path, last=MANIFEST_FILE)

    def drop_policy(self, path: str) -> None:
        """Take a policy out of the bucket that could not be uploaded whole."""
        self._delete_folder(path, first=MANIFEST_FILE)

    def push_announced(self, path: str) -> None:
        """Note in the bucket that the registry accepted the policy."""
        self.objects.write(f"{path}/{ANNOUNCED_FILE}", b"")

    def fetch_policy(self, record: PolicyRecord) -> None:
        """Have a policy in the local folder; CheckpointError when the bucket lacks it, or has another manifest."""
        folder = confined(self._root, record.path)
        with self._one_at_a_time(folder.name):
            if _digest(folder / MANIFEST_FILE) != record.manifest_digest:
                self._pull_policy(record, folder)
            self._forget_old_policies(folder.name)

    def fetch_policy_again(self, record: PolicyRecord) -> None:
        """Pull a policy whose local copy was found damaged."""
        folder = confined(self._root, record.path)
        with self._one_at_a_time(folder.name):
            self._pull_policy(record, folder)

    def manifests(self) -> list[FoundManifest]:
        """Every manifest of the bucket, and every announced folder without one."""
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
        """``policies.prune`` in the bucket."""
        paths = [f"{policies.FOLDER}/{name}" for name in self._folders(policies.FOLDER)]
        removed = policies.prunable(paths, records, keep_last=keep_last, keep_versions=keep_versions, session=session)
        for path in removed:
            self.objects.delete([f"{path}/{ANNOUNCED_FILE}"])  # announced without a manifest means damage
            self._delete_folder(path, first=MANIFEST_FILE)
        return removed

    # batch files

    def before_batch(self, train_step: int) -> None:
        """Have the bucket's batch file of this step here, or none: what never got there does not count."""
        path = batch_path(self._root, train_step)
        try:
            self.objects.get(_batch_key(train_step), path)
        except FileNotFoundError:
            path.unlink(missing_ok=True)

    def push_batch(self, train_step: int) -> str:
        """Upload a batch file unless the bucket has one; returns the digest of the one that counts.

        Raises CheckpointError when another trainer got there first with other groups.
        """
        path, key = batch_path(self._root, train_step), _batch_key(train_step)
        mine = batches.read_footer(self._root, self._secret, train_step)
        if self.objects.put_new(path, key):
            return mine.payload_sha256
        try:
            theirs = self.footer(train_step)
        except CheckpointError:
            self.objects.put(path, key)  # damaged: nobody trained on that
            return mine.payload_sha256
        if theirs.group_ids != mine.group_ids:
            raise CheckpointError(
                f"{self.objects.url}/{key}: train step {train_step} already has a batch of other groups",
                reason=Reason.MISMATCH,
            )
        return theirs.payload_sha256

    def fetch_batch(self, train_step: int) -> None:
        """Have the bucket's batch file of this step here; CheckpointError when there is none.

        A file of this node may have never got there, and another trainer have cut the step anew.
        """
        theirs = self.footer(train_step)
        try:
            if batches.read_footer(self._root, self._secret, train_step).payload_sha256 == theirs.payload_sha256:
                return
        except CheckpointError:
            pass  # none here, or a damaged one
        self.fetch_batch_again(train_step)

    def fetch_batch_again(self, train_step: int) -> None:
        """Pull a batch file, whatever is here."""
        key = _batch_key(train_step)
        try:
            self.objects.get(key, batch_path(self._root, train_step))
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.objects.url}/{key}: missing", reason=Reason.MISSING) from error

    def footer(self, train_step: int) -> BatchFooter:
        """Footer of a batch file of the bucket, without the trajectories."""
        with self._batch_file(train_step) as (file, where):
            return batches.footer_of(file, where, self._secret, train_step)

    def group(self, train_step: int, group_id: str) -> Group | None:
        """One group of a batch file of the bucket: no more of it is read, and nothing is kept here."""
        with self._batch_file(train_step) as (file, where):
            return batches.group_of(file, where, self._secret, train_step, group_id)

    @contextlib.contextmanager
    def _batch_file(self, train_step: int) -> Iterator[tuple[BinaryIO, str]]:
        """A batch file of the bucket, open, and its name for messages."""
        where = f"{self.objects.url}/{_batch_key(train_step)}"
        try:
            with self.objects.opened(_batch_key(train_step)) as file:
                yield file, where
        except FileNotFoundError as error:
            raise CheckpointError(f"{where}: missing", reason=Reason.MISSING) from error
        except RollmeshError:
            raise
        except Exception as error:  # clients of object stores share no base class for an outage
            message = f"{where}: {str(error) or type(error).__name__}"
            raise CheckpointError(message, reason=Reason.UNREACHABLE) from error

    def batch_steps(self) -> list[int]:
        """Train steps with a batch file in the bucket, ascending."""
        return batches.steps_of(key.rpartition("/")[2] for key in self.objects.sizes(batches.FOLDER))

    # trainer states

    def push_state(self, state: CommittedState) -> None:
        """Upload a state that is committed here, COMMITTED last."""
        self._push_folder(f"{committed.FOLDER}/{state.folder.name}", last=COMMITTED_FILE)

    def states(self) -> JudgedStates:
        """Committed states of the bucket, told from those that are unsound there."""
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
                    unsound[label] = f"{self.objects.url}/{folder}: missing or of another size: {', '.join(wrong)}"
                else:
                    sound.append(CommittedState(folder=confined(self._root, folder), record=record))
        return JudgedStates(sound=committed.newest_first(sound), unsound=unsound)

    def fetch_state(self, state: CommittedState) -> None:
        """Have the files of a state here; whether they are sound shows when they are loaded."""
        self._pull_state(state, lambda file, path: _size(path) == file.size_bytes)

    def fetch_state_again(self, state: CommittedState) -> None:
        """Pull the files of a state whose local copies are damaged."""
        self._pull_state(state, lambda file, path: _size(path) == file.size_bytes and sha256_of(path) == file.sha256)

    def _pull_state(self, state: CommittedState, is_here: Callable[[ManifestFile, Path], bool]) -> None:
        path = f"{committed.FOLDER}/{state.folder.name}"
        with self._one_at_a_time(state.folder.name):
            wanted = [(f"{path}/{file.path}", file, confined(state.folder, file.path)) for file in state.record.files]
            try:
                self.objects.get_all([(key, target) for key, file, target in wanted if not is_here(file, target)])
            except FileNotFoundError as error:
                raise CheckpointError(f"{self.objects.url}/{path}: {error}", reason=Reason.MISSING) from error

    def prune_states(self, *, keep_last: int, session: str) -> list[str]:
        """``committed.prune_states`` in the bucket."""
        sizes = self.objects.sizes(committed.FOLDER)
        folders = {
            name: f"{committed.FOLDER}/{name}/{COMMITTED_FILE}" in sizes for name in self._folders(committed.FOLDER)
        }
        removed = committed.prunable(folders, self.states().sound, keep_last=keep_last, session=session)
        for name in removed:
            self._delete_folder(f"{committed.FOLDER}/{name}", first=COMMITTED_FILE)
        return removed

    # how

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
                f"{where}: not the one that was announced as policy_version {record.policy_version}",
                reason=Reason.TAMPERED,
            )
        return manifest

    def _forget_old_policies(self, name: str) -> None:
        """Delete pulled policies but the newest few and those that some process of this node opened lately."""
        locks = self._root / _LOCKS
        used = {lock.name: _asked_at(lock) for lock in locks.iterdir() if policies.is_folder_name(lock.name)}
        newest = sorted(used, key=lambda each: used[each], reverse=True)[: self._cache_policies]
        for each, when in used.items():
            if each not in (name, *newest) and time.time() - when > _IN_USE_SECONDS:
                self._forget(each)

    def _forget(self, name: str) -> None:
        """Delete one pulled folder and its lock, unless somebody asks for it in this moment."""
        path = self._root / _LOCKS / name
        with contextlib.suppress(FileNotFoundError, BlockingIOError), path.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_file_at(lock.fileno(), path) and time.time() - _asked_at(path) > _IN_USE_SECONDS:
                remove_tree(self._root / policies.FOLDER / name, first=[MANIFEST_FILE])
                path.unlink()

    @contextlib.contextmanager
    def _one_at_a_time(self, name: str) -> Iterator[None]:
        """Hold this node's lock on a folder's name; its time says when the folder was last asked for."""
        path = self._root / _LOCKS / name
        make_folder(path.parent)
        while True:
            with path.open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                # Whoever had it may have forgotten the folder, and its lock: then this one guards nothing.
                if not _is_file_at(lock.fileno(), path):
                    continue
                os.utime(path)
                yield
                return


def _refuse_gangs_over_nodes(url: str) -> None:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    if world > local:
        raise ConfigError(
            f"checkpoints.folder={url}: a trainer gang over several nodes ({world} ranks, {local} here) needs a folder "
            "that all of them share for its state; use one, or run the trainer on one node"
        )


def _batch_key(train_step: int) -> str:
    return f"{batches.FOLDER}/{train_step:08d}.pb"


def _digest(file: Path) -> str:
    try:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    except OSError:
        return ""


def _asked_at(lock: Path) -> float:
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
