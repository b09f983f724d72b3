"""The checkpoint store: policies, batch files and trainer state of one run under one root folder.

    <root>/policies/<step>-<session>/   Hugging Face folder and manifest.json, written last
    <root>/batches/<step>.pb            batch of each train step
    <root>/states/<step>-<session>/     trainer state, valid only with COMMITTED
    <root>/latest                       link to the newest policy, for people; a bucket has none
    <root>/lineage                      identity of the store, which the queue records

``CheckpointStore`` is a folder that all services share. ``BucketStore`` (``bucket.py``) is the same store in an object
store: the paths are its keys, and the root folder is the cache of one node. ``open_checkpoints`` chooses. All methods
block on the file system or the network; asyncio callers use a thread.
"""

import errno
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from rollmesh.checkpoints import batches, committed, policies
from rollmesh.checkpoints.batches import BatchFooter, ReplayDraw, StepSettings, StoredBatch, training_batch
from rollmesh.checkpoints.committed import COMMITTED_FILE, CommittedState, JudgedStates
from rollmesh.checkpoints.durable import make_folder, remove_tree, session_folders
from rollmesh.checkpoints.manifest import MANIFEST_FILE, CanarySequence, Manifest, WeightDelta
from rollmesh.checkpoints.policies import (
    FetchedPolicy,
    FoundManifest,
    PolicyDraft,
    UnsoundPolicy,
    VerifiedPolicy,
    WriteFolder,
)
from rollmesh.checkpoints.sealing import lineage
from rollmesh.errors import CheckpointError, ConfigError
from rollmesh.mesh import Cursor
from rollmesh.prompt_history import PromptOutcome
from rollmesh.types import Batch, Group, PolicyRecord, rollbacks_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCheck:
    """Result of a comparison."""

    compared: int
    compared_bytes: int
    skipped: tuple[str, ...]
    """Copies that were not read because of ``bucket_copies.MOST_BYTES``."""
    damaged: Mapping[str, str]
    """Reason by name."""


class CheckpointStore:
    """Checkpoint store of one run, with any number of readers and one fenced writer (the trainer)."""

    def __init__(self, root: Path, secret: bytes) -> None:
        try:
            make_folder(root)
        except OSError as error:
            # A reader with a read-only mount may start before the writer creates the folder.
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM):
                raise ConfigError(
                    f"checkpoint folder {root}: {error.strerror}; name one that can be created"
                ) from error
            if error.errno != errno.EROFS:
                raise
        self.root = root.resolve()
        self._secret = secret
        self._base: tuple[PolicyRecord, VerifiedPolicy] | None = None

    def at(self, root: Path) -> "CheckpointStore":
        """Return a store with the same secret in another folder."""
        return CheckpointStore(root, self._secret)

    def lineage(self) -> str:
        """Return the identity of this store; the first use creates it. CheckpointError if its file is damaged."""
        return lineage(self.root)

    def publish(
        self,
        *,
        session: str,
        policy_version: int,
        train_step: int,
        parent: int | None,
        write: WriteFolder,
        canary: Sequence[CanarySequence],
        base: PolicyRecord | None = None,
    ) -> PolicyRecord:
        """Write a policy folder; it is a policy only after the registry accepts the returned record.

        ``write`` fills the given empty folder: with a PEFT adapter if there is a base. The folder is deleted on an
        error. Raises CheckpointError.
        """
        manifest = None if base is None else self._fetched(base).manifest
        draft = PolicyDraft(session, policy_version, train_step, parent, base, manifest)
        record = policies.publish(self.root, self._secret, draft, write, canary, self._encode_delta)
        self._share_policy(record)
        return record

    def _encode_delta(self, draft: PolicyDraft, folder: Path) -> WeightDelta | None:
        """Return the deltas in place of a new folder's weights; a shared folder has the weights themselves."""
        return None

    def _share_policy(self, record: PolicyRecord) -> None:
        """Make a complete policy visible to every reader; in a shared folder it is."""

    def open(self, record: PolicyRecord, *, like: Manifest | None = None) -> VerifiedPolicy:
        """Verify a published policy byte for byte, and against the architecture and tokenizer of ``like``.

        Raises CheckpointError whose ``reason`` is a ``Reason``; the caller keeps its current policy.
        """
        policy = self._verified(record)
        if like is not None:
            like.check_compatible(policy.manifest)
        return self._with_base(policy)

    def check_copy(self, record: PolicyRecord) -> None:
        """Compare a policy's copy in a bucket with its record; ``open`` verifies the only copy of a folder."""

    def _with_base(self, policy: VerifiedPolicy) -> VerifiedPolicy:
        """Add the base of an adapter, which is verified once for all adapters that this store opens above it."""
        if (base := policy.manifest.base) is None:
            return policy
        if self._base is None or self._base[0] != base or not self._base[1].folder.is_dir():
            self._base = base, self._verified(base)
        return replace(policy, base=self._base[1])

    def _verified(self, record: PolicyRecord) -> VerifiedPolicy:
        """Compare a published policy with its record, byte for byte."""
        return policies.verify_files(policies.fetched(self.root, self._secret, record))

    def fetch(self, record: PolicyRecord, *, like: Manifest | None = None) -> FetchedPolicy:
        """Bring a published policy to this node, unless it is here, without verifying its files.

        Raises CheckpointError like ``open``.
        """
        policy = self._fetched(record)
        if like is not None:
            like.check_compatible(policy.manifest)
        return policy

    def verify(self, policy: FetchedPolicy) -> VerifiedPolicy:
        """Compare every file of a fetched policy with its manifest. Raises CheckpointError with the ``reason``."""
        return self._with_base(policies.verify_files(policy))

    def _fetched(self, record: PolicyRecord) -> FetchedPolicy:
        """Return a policy whose folder is on this node; a shared folder is."""
        return policies.fetched(self.root, self._secret, record)

    def mark_announced(self, record: PolicyRecord) -> None:
        """Mark the policy as accepted by the registry, and let ``latest`` name it."""
        policies.mark_announced(self.root, record)
        policies.link_latest(self.root, record)

    def _manifests(self) -> Iterable[FoundManifest]:
        """Return every manifest, and an entry for every announced folder without one."""
        return policies.found_manifests(self.root)

    def unsound_policies(self) -> list[UnsoundPolicy]:
        """Return the folders with a manifest or an announcement, but without a sound policy."""
        return policies.unsound_policies(self._manifests(), self._secret)

    def complete_policies(self, *, announced_only: bool = False) -> list[PolicyRecord]:
        """Return the records of all complete folders, one per version, ascending; for a recovering trainer."""
        return policies.sound_records(self._manifests(), self._secret, announced_only=announced_only)

    def newest_policy(self) -> PolicyRecord | None:
        """Return the record of the newest announced policy; None without one. Raises CheckpointError if it is damaged.

        Its files are compared with its manifest only by ``open``.
        """
        manifests = list(self._manifests())
        sound = policies.sound_records(manifests, self._secret, announced_only=True)
        newest = sound[-1] if sound else None
        reached = (-1, 0) if newest is None else (newest.train_step, newest.rollback_count)
        for policy in policies.unsound_policies(manifests, self._secret):
            # A damaged policy of the same step is one that the trainer has published again.
            if policy.announced and (policy.train_step, rollbacks_of(policy.path)) > reached:
                kept = "none is sound" if newest is None else f"the newest sound version is {newest.policy_version}"
                raise CheckpointError(f"the newest policy is damaged, {kept}: {policy.reason}")
        return newest

    def prune(
        self, records: Sequence[PolicyRecord], *, keep_last: int, keep_versions: Collection[int], session: str
    ) -> list[str]:
        """Delete announced folders but the ``keep_last`` newest and ``keep_versions``, and leftovers of ended sessions.

        ``records`` is the complete registry. ``keep_versions`` are the pinned versions and those that readers serve or
        load. A folder without a record is deleted only if another session wrote it for a train step that is already
        published: it can never be announced. Returns the deleted paths.
        """
        paths = [f"{policies.FOLDER}/{folder.name}" for folder in session_folders(self.root / policies.FOLDER)]
        removed = policies.prunable(paths, records, keep_last=keep_last, keep_versions=keep_versions, session=session)
        for path in removed:
            # Announced without a manifest means damage.
            remove_tree(self.root / path, first=[policies.ANNOUNCED_FILE, MANIFEST_FILE])
        return removed

    def write_batch(
        self,
        batch: Batch,
        cursor: Cursor,
        train_steps: Mapping[int, int],
        settings: StepSettings,
        outcomes: Sequence[PromptOutcome] = (),
        replay: ReplayDraw | None = None,
    ) -> str:
        """Write and flush the batch file of ``batch.train_step``, once; return its digest.

        ``train_steps`` maps each policy version that wrote tokens of the batch to its train step. ``settings`` are the
        settings that the step is trained with, ``outcomes`` those of the groups that ended since the last batch,
        ``replay`` the groups of earlier files that the step trains on too.
        """
        return self._write_batch(batch, batches.footer_draft(batch, cursor, train_steps, settings, outcomes, replay))

    def _write_batch(self, batch: Batch, draft: BatchFooter) -> str:
        return batches.write_batch(self.root, self._secret, batch, draft)

    def read_batch(self, train_step: int) -> Batch:
        """Read and verify a batch file."""
        return self.stored_batch(train_step).batch

    def training_batch(self, train_step: int) -> Batch:
        """Read the batch of a train step with its replayed groups, which are in earlier batch files."""
        return training_batch(self.stored_batch(train_step), self.stored_batch)

    def stored_batch(self, train_step: int) -> StoredBatch:
        """Read and verify a batch file, with its footer."""
        return batches.read_batch(self.root, self._secret, train_step)

    def read_group(self, train_step: int, group_id: str) -> Group | None:
        """Read one group of a batch file, for display only; None if the file does not contain it."""
        with self._batch_file(train_step) as (file, path):
            return next(batches.groups_of(file, path, self._secret, train_step, group_id), None)

    def groups(self, train_step: int) -> Iterator[Group]:
        """Read the groups of a batch file one by one, for display (``batches.groups_of``). Raises CheckpointError."""
        with self._batch_file(train_step) as (file, path):
            yield from batches.groups_of(file, path, self._secret, train_step)

    def batch_footer(self, train_step: int) -> BatchFooter:
        """Read ids, cursor and digest of a batch file, without the trajectories."""
        with self._batch_file(train_step) as (file, path):
            return batches.footer_of(file, path, self._secret, train_step)

    @contextmanager
    def _batch_file(self, train_step: int) -> Iterator[tuple[BinaryIO, str]]:
        """Open a batch file; yield it with its path for error messages."""
        path = batches.batch_path(self.root, train_step)
        with batches.opened(path) as file:
            yield file, str(path)

    def batch_steps(self) -> list[int]:
        """Return the train steps that have a batch file, ascending. The files are not verified."""
        folder = self.root / batches.FOLDER
        return batches.steps_of(os.listdir(folder) if folder.exists() else [])

    def remove_unfinished_batches(self) -> int:
        """Delete the unfinished batch files of crashed trainers; return their number.

        A superseded writer that still runs then fails at its replace.
        """
        leftovers = list((self.root / batches.FOLDER).glob(".*.pb.*"))
        for path in leftovers:
            path.unlink(missing_ok=True)
        return len(leftovers)

    def save_state(
        self,
        *,
        session: str,
        train_step: int,
        rollback_count: int,
        tensors: "Mapping[str, torch.Tensor]",
        extra: Mapping[str, Any],
    ) -> CommittedState:
        """Save and commit a trainer state. Every rank must call this."""
        from rollmesh.checkpoints.states import save_state

        state = save_state(self.root, self._secret, session, train_step, rollback_count, tensors, extra)
        self._share_state(state)
        return state

    def _share_state(self, state: CommittedState) -> None:
        """Make a committed state visible to every reader; in a shared folder it is."""

    def load_state(self, state: CommittedState, tensors: "Mapping[str, torch.Tensor]") -> dict[str, Any]:
        """Fill ``tensors`` in place from a committed state; return its ``extra``."""
        from rollmesh.checkpoints.states import load_state

        return load_state(state, tensors)

    def committed_states(self) -> list[CommittedState]:
        """Return the committed trainer states, newest first."""
        return self.judged_states().sound

    def judged_states(self) -> JudgedStates:
        """Return the sound committed trainer states, and the unsound ones."""
        return committed.judge_states(self.root, self._secret)

    def verify_state(self, state: CommittedState) -> None:
        """Compare every file of a state with its digest. Raises CheckpointError with the reason."""
        committed.verify_files(state)

    def latest_committed(self) -> CommittedState | None:
        """Return the newest committed trainer state, which determines the consumed batches."""
        return next(iter(self.committed_states()), None)

    def prune_states(self, *, keep_last: int, session: str) -> list[Path]:
        """Delete old committed states, and uncommitted states of other sessions; return their folders.

        The ``keep_last`` newest committed states and the newest one of ``session`` stay.
        """
        parent = self.root / committed.FOLDER
        folders = {folder.name: (folder / COMMITTED_FILE).exists() for folder in session_folders(parent)}
        states = committed.judge_states(self.root, self._secret).sound
        removed = [parent / name for name in committed.prunable(folders, states, keep_last=keep_last, session=session)]
        for folder in removed:
            remove_tree(folder, first=[COMMITTED_FILE])
        return removed

    def check_copies(self) -> CopyCheck | None:
        """Compare the copies in a bucket with their digests. None for a folder: readers verify its only copy."""
        return None
