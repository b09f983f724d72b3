"""A checkpoint store in an object store: the bucket is authoritative, and the folder of a node is a cache.

publish     files first, the manifest last; a policy is announced only after its upload is complete
open        by the paths in manifest and record, without listing: the manifest is compared with the record, then files
            are pulled into a temporary folder with bounded concurrency and moved together. One process of a node pulls
            a policy, the others wait for it
batch file  one put after the local write; the batch is confirmed after it
state       every file, then COMMITTED
restart     the listing of the bucket decides. Local files that were not uploaded are ignored and written again
"""

import contextlib
import hashlib
import os
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rollmesh.checkpoints import batches, committed, policies
from rollmesh.checkpoints.batches import BatchFooter, StoredBatch, batch_path
from rollmesh.checkpoints.bucket_copies import batch_key, check_copies, policy_copy, stored_copies
from rollmesh.checkpoints.checkpoint_store import CheckpointStore, CopyCheck
from rollmesh.checkpoints.committed import COMMITTED_FILE, CommittedState, JudgedStates
from rollmesh.checkpoints.deltas import BasePaths, DeltaUploads, chain_of, is_stored, pull_chain, without_bases
from rollmesh.checkpoints.durable import (
    confined,
    is_folder_name,
    naming_full_disk,
    regular_files,
    remove_tree,
    sha256_of,
    size_of,
    sync_folder,
)
from rollmesh.checkpoints.manifest import (
    MANIFEST_FILE,
    MAX_MANIFEST_BYTES,
    Manifest,
    ManifestFile,
    WeightDelta,
    parse_manifest,
)
from rollmesh.checkpoints.objects import ObjectStore, store_error
from rollmesh.checkpoints.policies import ANNOUNCED_FILE, FetchedPolicy, FoundManifest, PolicyDraft, VerifiedPolicy
from rollmesh.checkpoints.pulled import PulledFolders
from rollmesh.checkpoints.sealing import LINEAGE_FILE, run_secret
from rollmesh.config import RunConfig
from rollmesh.config.store import CheckpointConfig
from rollmesh.errors import CheckpointError, ConfigError, Reason, RollmeshError
from rollmesh.runtime.health import Waits
from rollmesh.types import Batch, PolicyRecord

if TYPE_CHECKING:
    import torch

_MAX_RECORD_BYTES = 64 << 20


class BucketStore(CheckpointStore):
    """Checkpoint store in a bucket, with the folder ``root`` of this node as its cache."""

    def __init__(
        self, root: Path, secret: bytes, objects: ObjectStore, *, cache_policies: int, anchor_every: int = 1
    ) -> None:
        super().__init__(root, secret)
        world = int(os.environ.get("WORLD_SIZE", "1"))
        local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
        if world > local:
            raise ConfigError(
                f"checkpoints.folder={objects.url}: a trainer over several nodes ({world} ranks, {local} here) "
                "requires a shared folder for its state; set checkpoints.folder to a shared folder, or run the "
                "trainer on one node"
            )
        self.objects = objects
        self._pulled = PulledFolders(self.root, keep_policies=cache_policies)
        self._deltas = DeltaUploads(self.root, anchor_every)
        self._base_paths = BasePaths(objects)

    def lineage(self) -> str:
        """Return the identity of the store in the bucket; the first use creates it."""
        try:
            return self.objects.read(LINEAGE_FILE, 1024).decode("ascii").strip()
        except FileNotFoundError:
            self.objects.write(LINEAGE_FILE, super().lineage().encode())
            return self.objects.read(LINEAGE_FILE, 1024).decode("ascii").strip()

    def _encode_delta(self, draft: PolicyDraft, folder: Path) -> WeightDelta | None:
        delta = self._deltas.encode(draft, folder)
        # A difference to what has vanished from the bucket reaches no new reader, until the next full version.
        stored = delta is not None and is_stored(self.objects, delta.base, self.manifest)
        return delta if stored else None

    def _share_policy(self, record: PolicyRecord) -> None:
        """Upload a published folder, its manifest last. A folder that cannot be uploaded is deleted."""
        folder = self.root / record.path
        try:
            manifest = parse_manifest((folder / MANIFEST_FILE).read_bytes(), record.path)
            files = self._deltas.sources(folder, manifest)
            self.objects.put_all([(path, f"{record.path}/{name}") for path, name in files])
            self.objects.put(folder / MANIFEST_FILE, f"{record.path}/{MANIFEST_FILE}")
        except BaseException:
            remove_tree(folder, first=[MANIFEST_FILE])
            raise
        self._deltas.uploaded(record, manifest)

    def _fetched(self, record: PolicyRecord) -> FetchedPolicy:
        folder = confined(self.root, record.path)
        with self._pulled.locked(folder.name):
            cached = None
            with contextlib.suppress(OSError):
                cached = sha256_of(folder / MANIFEST_FILE)
            if cached != record.manifest_digest:
                self._pull_policy(record, folder)
        policy = super()._fetched(record)
        base = policy.manifest.base
        self._pulled.evict_old_policies(
            {folder.name} if base is None else {folder.name, confined(self.root, base.path).name}
        )
        return policy

    def _verified(self, record: PolicyRecord) -> VerifiedPolicy:
        folder = self._fetched(record).folder
        try:
            return super()._verified(record)
        except CheckpointError:
            # The local copy may be damaged. Pull it again and verify the copy from the bucket.
            with self._pulled.locked(folder.name):
                self._pull_policy(record, folder)
            return super()._verified(record)

    def check_copy(self, record: PolicyRecord) -> None:
        chain, _ = chain_of(record, self.manifest, lambda _: None)
        damaged = check_copies(self.objects, (policy_copy(link.path, link.manifest) for link in chain)).damaged
        for path, reason in damaged.items():
            raise CheckpointError(f"{self.objects.url}/{path}: {reason}", reason=Reason.TAMPERED)

    def mark_announced(self, record: PolicyRecord) -> None:
        self.objects.write(f"{record.path}/{ANNOUNCED_FILE}", b"")
        if (self.root / record.path).exists():
            policies.mark_announced(self.root, record)

    def _manifests(self) -> Iterable[FoundManifest]:
        sizes = self.objects.sizes(policies.FOLDER)
        announced = {key.rpartition("/")[0] for key in sizes if key.endswith("/" + ANNOUNCED_FILE)}
        written = {key.rpartition("/")[0] for key in sizes if key.endswith("/" + MANIFEST_FILE)}
        for path in sorted(announced | written):
            if is_folder_name(path.rpartition("/")[2]):
                with contextlib.suppress(FileNotFoundError):  # pruned in between
                    data = None
                    if path in written:
                        data = self.objects.read(f"{path}/{MANIFEST_FILE}", MAX_MANIFEST_BYTES + 1)
                    yield FoundManifest(path=path, data=data, announced=path in announced)

    def prune(
        self, records: Sequence[PolicyRecord], *, keep_last: int, keep_versions: Collection[int], session: str
    ) -> list[str]:
        """Delete old policies from the cache and from the bucket; return those of the bucket."""
        super().prune(records, keep_last=keep_last, keep_versions=keep_versions, session=session)
        paths = [f"{policies.FOLDER}/{name}" for name in self._folders(policies.FOLDER)]
        removed = policies.prunable(paths, records, keep_last=keep_last, keep_versions=keep_versions, session=session)
        removed = without_bases(paths, removed, self._base_paths.of)
        for path in removed:
            self.objects.delete([f"{path}/{ANNOUNCED_FILE}"])  # announced without a manifest means damage
            self._delete_folder(path, first=MANIFEST_FILE)
        return removed

    def _write_batch(self, batch: Batch, draft: BatchFooter) -> str:
        """Write a batch file locally and upload it unless the bucket has one; return the digest of the bucket's file.

        Raises CheckpointError if another trainer has already uploaded other groups.
        """
        train_step = batch.train_step
        path, key = batch_path(self.root, train_step), batch_key(train_step)
        try:
            self.objects.get(key, path)
        except FileNotFoundError:
            path.unlink(missing_ok=True)  # of an upload that failed
        super()._write_batch(batch, draft)
        local = batches.read_footer(self.root, self._secret, train_step)
        if self.objects.put_new(path, key):
            return local.payload_sha256
        try:
            stored = self.batch_footer(train_step)
        except CheckpointError as error:
            if error.outside:
                raise
            self.objects.put(path, key)  # damaged, so no trainer has used it
            return local.payload_sha256
        if stored.group_ids != local.group_ids:
            raise CheckpointError(
                f"{self.objects.url}/{key}: train step {train_step} already has a batch of other groups",
                reason=Reason.MISMATCH,
            )
        return stored.payload_sha256

    def stored_batch(self, train_step: int) -> StoredBatch:
        """Pull the batch file of this step unless the local copy matches, and read it.

        A local file may differ: its upload failed, and the step was cut again for another trainer.
        """
        stored, local = self.batch_footer(train_step), None
        with contextlib.suppress(CheckpointError):  # missing or damaged local copy
            local = batches.read_footer(self.root, self._secret, train_step)
        if local != stored:  # also for the same groups, which may be trained with other settings
            self._pull_batch(train_step)
        try:
            return super().stored_batch(train_step)
        except CheckpointError:
            self._pull_batch(train_step)  # the local copy may be damaged
            return super().stored_batch(train_step)

    def _pull_batch(self, train_step: int) -> None:
        key = batch_key(train_step)
        with self._missing_as_error(key):
            self.objects.get(key, batch_path(self.root, train_step))

    @contextlib.contextmanager
    def _missing_as_error(self, path: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.objects.url}/{path}: missing", reason=Reason.MISSING) from error

    @contextlib.contextmanager
    def _batch_file(self, train_step: int) -> Iterator[tuple[BinaryIO, str]]:
        where = f"{self.objects.url}/{batch_key(train_step)}"
        try:
            with self._missing_as_error(batch_key(train_step)), self.objects.open(batch_key(train_step)) as file:
                yield file, where
        except RollmeshError:
            raise
        except Exception as error:  # clients of object stores have no common base class for an outage
            raise store_error(where, error) from error

    def batch_steps(self) -> list[int]:
        return batches.steps_of(key.rpartition("/")[2] for key in self.objects.sizes(batches.FOLDER))

    def _share_state(self, state: CommittedState) -> None:
        """Upload a locally committed state, COMMITTED last. Only rank 0 uploads."""
        if os.environ.get("RANK", "0") == "0":
            path = f"{committed.FOLDER}/{state.folder.name}"
            names = [name for name in regular_files(state.folder) if name != COMMITTED_FILE]
            self.objects.put_all([(state.folder / name, f"{path}/{name}") for name in names])
            self.objects.put(state.folder / COMMITTED_FILE, f"{path}/{COMMITTED_FILE}")

    def judged_states(self) -> JudgedStates:
        sizes = self.objects.sizes(committed.FOLDER)
        sound: list[CommittedState] = []
        unsound: dict[str, str] = {}
        for key in sizes:
            folder, _, name = key.rpartition("/")
            label = folder.rpartition("/")[2]
            if name != COMMITTED_FILE or not is_folder_name(label):
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
                    sound.append(CommittedState(folder=confined(self.root, folder), record=record))
        return JudgedStates(sound=committed.newest_first(sound), unsound=unsound)

    def load_state(self, state: CommittedState, tensors: "Mapping[str, torch.Tensor]") -> dict[str, Any]:
        """Pull the files of a state that are missing or of wrong size, and load it, which verifies them."""
        self._pull_state(state, lambda file, path: size_of(path) == file.size_bytes)
        try:
            return super().load_state(state, tensors)
        except CheckpointError:
            # The local copy may be damaged. load_state fails on every rank together, so all ranks reach this line.
            self._pull_damaged(state)
            return super().load_state(state, tensors)

    def verify_state(self, state: CommittedState) -> None:
        """Pull damaged files again, as a trainer does before it loads the state, and compare every file."""
        self._pull_damaged(state)
        super().verify_state(state)

    def _pull_damaged(self, state: CommittedState) -> None:
        self._pull_state(state, lambda file, path: size_of(path) == file.size_bytes and sha256_of(path) == file.sha256)

    def _pull_state(self, state: CommittedState, is_local: Callable[[ManifestFile, Path], bool]) -> None:
        path = f"{committed.FOLDER}/{state.folder.name}"
        with self._pulled.locked(state.folder.name):
            wanted = [(f"{path}/{file.path}", file, confined(state.folder, file.path)) for file in state.record.files]
            try:
                self.objects.get_all([(key, target) for key, file, target in wanted if not is_local(file, target)])
            except FileNotFoundError as error:
                raise CheckpointError(f"{self.objects.url}/{path}: {error}", reason=Reason.MISSING) from error

    def prune_states(self, *, keep_last: int, session: str) -> list[Path]:
        """Delete old states from the bucket and from the cache; return those of the cache."""
        sizes = self.objects.sizes(committed.FOLDER)
        folders = {
            name: f"{committed.FOLDER}/{name}/{COMMITTED_FILE}" in sizes for name in self._folders(committed.FOLDER)
        }
        for name in committed.prunable(folders, self.judged_states().sound, keep_last=keep_last, session=session):
            self._delete_folder(f"{committed.FOLDER}/{name}", first=COMMITTED_FILE)
        return super().prune_states(keep_last=keep_last, session=session)

    def check_copies(self) -> CopyCheck:
        """Compare the newest state, the policies and the batch files of the bucket with their digests, newest first."""
        damaged = {policy.path: policy.reason for policy in self.unsound_policies()}
        check = check_copies(self.objects, stored_copies(self, self.manifest))
        return replace(check, damaged={**damaged, **check.damaged})

    def _delete_folder(self, path: str, *, first: str) -> None:
        self.objects.delete([f"{path}/{first}"])
        self.objects.delete(sorted(self.objects.sizes(path)))

    def _folders(self, parent: str) -> list[str]:
        names = {key.split("/")[1] for key in self.objects.sizes(parent) if key.count("/") >= 2}
        return sorted(name for name in names if is_folder_name(name))

    def _pull_policy(self, record: PolicyRecord, folder: Path) -> None:
        self._pulled.remove_unfinished(folder.name)
        temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}")
        try:
            with naming_full_disk(folder, "a policy"):
                chain, base = chain_of(record, self.manifest, self._cached)
                pull_chain(self.objects, chain, base, temporary)
                remove_tree(folder, first=[MANIFEST_FILE])
                os.replace(temporary, folder)
                sync_folder(folder.parent)
        except FileNotFoundError as error:
            raise CheckpointError(f"{self.objects.url}/{record.path}: {error}", reason=Reason.MISSING) from error
        except OSError as error:
            raise CheckpointError(f"{folder}: cannot be written: {error}") from error
        finally:
            remove_tree(temporary)

    def _cached(self, record: PolicyRecord) -> Path | None:
        """Return the folder of a policy if this node has it, verified; the lock keeps it from eviction for a while."""
        folder = confined(self.root, record.path)
        if not (folder / MANIFEST_FILE).exists():
            return None
        # A base is older than the policy that is pulled: processes that wait for each other's locks form no circle.
        with self._pulled.locked(folder.name), contextlib.suppress(CheckpointError):
            return super()._verified(record).folder
        return None

    def manifest(self, record: PolicyRecord) -> Manifest:
        """Read the manifest of a policy in the bucket. Raises CheckpointError unless it is the announced one."""
        key = f"{record.path}/{MANIFEST_FILE}"
        where = f"{self.objects.url}/{key}"
        with self._missing_as_error(key):
            data = self.objects.read(key, MAX_MANIFEST_BYTES + 1)
        manifest = parse_manifest(data, where)
        if hashlib.sha256(data).hexdigest() != record.manifest_digest:
            raise CheckpointError(
                f"{where}: differs from the manifest announced as policy_version {record.policy_version}",
                reason=Reason.TAMPERED,
            )
        return manifest


def open_checkpoints(config: RunConfig, waits: Waits | None = None) -> CheckpointStore:
    """Open the store of a run file; ``waits`` shows an object store that does not answer.

    Generates the run's secret if the file has none. Raises ConfigError if the services share no run folder and the
    location or the secret is missing: each service would create its own.
    """
    section = config.checkpoints
    if not config.network.shared_folder:
        for field, example in (("folder", "FOLDER"), ("secret", "SECRET")):
            if not getattr(section, field):
                raise ConfigError(
                    f"checkpoints.{field} is missing: services without a shared run folder (network.shared_folder="
                    f"false) require the same value; set it, for example with ROLLMESH_CHECKPOINTS__{example}"
                )
    folder, given = Path(config.folder), section.secret
    return open_location(section, folder, given.get_secret_value().encode() if given else run_secret(folder), waits)


def open_location(
    section: CheckpointConfig, run_folder: Path, secret: bytes, waits: Waits | None = None
) -> CheckpointStore:
    """Open the store of a run folder with a known secret."""
    folder = section.on_this_node(run_folder)
    if not section.remote:
        return CheckpointStore(folder, secret)
    objects = ObjectStore(str(section.folder), section.object_store, parallel=section.parallel_transfers, waits=waits)
    keep, anchor = section.cache_policies, section.anchor_every_versions
    return BucketStore(folder, secret, objects, cache_policies=keep, anchor_every=anchor)
