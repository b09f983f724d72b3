"""``CheckpointStore``: policies, batch files and trainer state of one run under one root folder.

    <root>/policies/<step>-<session>/   Hugging Face folder and manifest.json, written last
    <root>/batches/<step>.pb            what each train step was trained on
    <root>/states/<step>-<session>/     trainer state, valid only with COMMITTED
    <root>/lineage                      identity of the store, which the queue remembers

The root may mirror an object store (``mirror``): the same paths are its keys then, and it is what counts.
All methods block on the file system or the network; asyncio callers use a thread.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rollmesh.checkpoints import batches, committed, ledger, policies
from rollmesh.checkpoints.batches import BatchFooter, StepSettings, StoredBatch
from rollmesh.checkpoints.bucket import ObjectMirror
from rollmesh.checkpoints.committed import CommittedState, JudgedStates
from rollmesh.checkpoints.durable import make_folder, remove_tree
from rollmesh.checkpoints.ledger import Ledger
from rollmesh.checkpoints.manifest import MANIFEST_FILE, CanarySequence, Manifest
from rollmesh.checkpoints.objects import ObjectStore
from rollmesh.checkpoints.policies import PolicyDraft, UnsoundPolicy, VerifiedPolicy
from rollmesh.checkpoints.sealing import lineage, run_secret
from rollmesh.config import RunConfig
from rollmesh.config.services import CheckpointConfig
from rollmesh.errors import CheckpointError, ConfigError
from rollmesh.mesh import Cursor
from rollmesh.types import Batch, Group, PolicyRecord

if TYPE_CHECKING:
    import torch


class CheckpointStore:
    """The checkpoint store of one run; any number of readers, one fenced writer (the trainer)."""

    def __init__(self, root: Path, secret: bytes) -> None:
        try:
            make_folder(root)
        except OSError as error:
            # A reader whose mount is read-only may be here before the writer has made the folder.
            if error.errno != errno.EROFS:
                raise
        self.root = root.resolve()
        self._secret = secret
        self.mirror: ObjectMirror | None = None

    @classmethod
    def open_location(cls, section: CheckpointConfig, run_folder: Path, secret: bytes) -> Self:
        """The store at the run file's location, a folder or an object store."""
        if not section.remote:
            return cls(Path(section.folder) if section.folder else run_folder / "checkpoints", secret)
        store = cls(Path(section.cache_folder) if section.cache_folder else run_folder / "checkpoints", secret)
        objects = ObjectStore(str(section.folder), section.object_store, parallel=section.parallel_transfers)
        store.mirror = ObjectMirror(objects, store.root, secret, cache_policies=section.cache_policies)
        return store

    @classmethod
    def from_config(cls, config: RunConfig) -> Self:
        """The store that the run file names; makes the run's secret when the file brings none.

        Raises ConfigError when services that share no run folder would each make one of their own.
        """
        section = config.checkpoints
        if not config.network.shared_folder:
            for field, example in (("folder", "FOLDER"), ("secret", "SECRET")):
                if not getattr(section, field):
                    raise ConfigError(
                        f"checkpoints.{field} is missing: services that share no run folder (network.shared_folder="
                        f"false) need the same one, for example by ROLLMESH_CHECKPOINTS__{example}"
                    )
        folder, given = Path(config.folder), section.secret
        return cls.open_location(section, folder, given.get_secret_value().encode() if given else run_secret(folder))

    def at(self, root: Path) -> Self:
        """A copy of this store in another folder, sealed with the same secret."""
        return type(self)(root, self._secret)

    def lineage(self) -> str:
        """Identity of this checkpoint store, made with its first use; CheckpointError when its file is damaged."""
        return lineage(self.root) if self.mirror is None else self.mirror.lineage()

    def publish(
        self,
        *,
        session: str,
        policy_version: int,
        train_step: int,
        parent: int | None,
        write: Callable[[Path], None],
        canary: Sequence[CanarySequence],
    ) -> PolicyRecord:
        """Write a policy folder; it becomes a policy only when the registry accepts the returned record.

        ``write`` fills the given empty folder. Raises CheckpointError; the folder is gone then.
        """
        draft = PolicyDraft(session=session, policy_version=policy_version, train_step=train_step, parent=parent)
        record = policies.publish(self.root, self._secret, draft, write, canary)
        if self.mirror is not None:
            try:
                self.mirror.push_policy(record.path)
            except BaseException:
                remove_tree(self.root / record.path, first=[MANIFEST_FILE])
                raise
        return record

    def open(self, record: PolicyRecord, *, like: Manifest | None = None) -> VerifiedPolicy:
        """Verify a published policy byte for byte, and against the architecture and tokenizer of ``like``.

        Raises CheckpointError whose ``reason`` is a ``Reason``; the caller keeps what it has.
        """
        policy = self._verified(record)
        if like is not None:
            like.check_compatible(policy.manifest)
        return policy

    def _verified(self, record: PolicyRecord) -> VerifiedPolicy:
        if self.mirror is None:
            return policies.verify(self.root, self._secret, record)
        self.mirror.fetch_policy(record)
        try:
            return policies.verify(self.root, self._secret, record)
        except CheckpointError:
            # What this node keeps may have been damaged since; what the bucket has is judged a second time.
            self.mirror.fetch_policy_again(record)
            return policies.verify(self.root, self._secret, record)

    def mark_announced(self, record: PolicyRecord) -> None:
        """Note that the registry accepted the record."""
        if self.mirror is not None:
            self.mirror.push_announced(record.path)
        if self.mirror is None or (self.root / record.path).exists():
            policies.mark_announced(self.root, record)

    def unsound_policies(self) -> list[UnsoundPolicy]:
        """Folders that hold no sound policy although a manifest was written or the registry accepted them."""
        found = policies.found_manifests(self.root) if self.mirror is None else self.mirror.manifests()
        return policies.unsound_policies(found, self._secret)

    def complete_policies(self, *, announced_only: bool = False) -> list[PolicyRecord]:
        """Records of all complete folders, one per version, ascending; only for a trainer that recovers."""
        if self.mirror is not None:
            return policies.sound_records(self.mirror.manifests(), self._secret, announced_only=announced_only)
        return policies.complete_records(self.root, self._secret, announced_only=announced_only)

    def prune(
        self,
        records: Sequence[PolicyRecord],
        *,
        keep_last: int,
        pinned: Collection[int],
        in_use: Collection[int],
        session: str,
    ) -> list[str]:
        """Delete old policies of the registry ``records``; newest, pinned and in-use versions stay."""
        keep = {*pinned, *in_use}
        removed = policies.prune(self.root, records, keep_last=keep_last, keep_versions=keep, session=session)
        if self.mirror is None:
            return removed
        return self.mirror.prune_policies(records, keep_last=keep_last, keep_versions=keep, session=session)

    def write_batch(
        self,
        batch: Batch,
        cursor: Cursor,
        train_steps: Mapping[int, int] | None = None,
        settings: StepSettings | None = None,
    ) -> str:
        """Write and flush the batch file of ``batch.train_step``, once; returns its digest.

        ``train_steps`` has the train step of each policy version that wrote tokens of the batch, ``settings`` is what
        the step will be trained with.
        """
        if self.mirror is not None:
            self.mirror.before_batch(batch.train_step)
        digest = batches.write_batch(self.root, self._secret, batch, cursor, train_steps, settings)
        return digest if self.mirror is None else self.mirror.push_batch(batch.train_step)

    def read_batch(self, train_step: int) -> Batch:
        """Read and verify a batch file."""
        return self.stored_batch(train_step).batch

    def stored_batch(self, train_step: int) -> StoredBatch:
        """Read and verify a batch file, with its footer."""
        if self.mirror is None:
            return batches.read_batch(self.root, self._secret, train_step)
        self.mirror.fetch_batch(train_step)
        try:
            return batches.read_batch(self.root, self._secret, train_step)
        except CheckpointError:
            self.mirror.fetch_batch_again(train_step)  # what this node keeps may have been damaged since
            return batches.read_batch(self.root, self._secret, train_step)

    def read_group(self, train_step: int, group_id: str) -> Group | None:
        """One group of a batch file, for people who look; None when it is not in it."""
        if self.mirror is not None:
            return self.mirror.group(train_step, group_id)
        return batches.read_group(self.root, self._secret, train_step, group_id)

    def batch_footer(self, train_step: int) -> BatchFooter:
        """Ids, cursor and digest of a batch file."""
        if self.mirror is not None:
            return self.mirror.footer(train_step)
        return batches.read_footer(self.root, self._secret, train_step)

    def batch_steps(self) -> list[int]:
        """Train steps that have a batch file, ascending."""
        return batches.batch_steps(self.root) if self.mirror is None else self.mirror.batch_steps()

    def remove_unfinished_batches(self) -> int:
        """Delete what killed trainers left half-written; returns how many files."""
        return batches.remove_unfinished(self.root)

    def save_state(
        self,
        *,
        session: str,
        train_step: int,
        rollback_count: int,
        tensors: Mapping[str, torch.Tensor],
        extra: Mapping[str, Any],
    ) -> CommittedState:
        """Save and commit a trainer state; every rank calls this."""
        from rollmesh.checkpoints.states import save_state

        state = save_state(
            self.root,
            self._secret,
            session=session,
            train_step=train_step,
            rollback_count=rollback_count,
            tensors=tensors,
            extra=extra,
        )
        if self.mirror is not None and os.environ.get("RANK", "0") == "0":
            self.mirror.push_state(state)
        return state

    def load_state(self, state: CommittedState, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Fill ``tensors`` in place from a committed state; returns its ``extra``."""
        from rollmesh.checkpoints.states import load_state

        if self.mirror is None:
            return load_state(state, tensors)
        self.mirror.fetch_state(state)
        try:
            return load_state(state, tensors)
        except CheckpointError:
            # The local copy may have been damaged since. All ranks are here: load_state fails on every one of them.
            self.mirror.fetch_state_again(state)
            return load_state(state, tensors)

    def committed_states(self) -> list[CommittedState]:
        """Committed trainer states, newest first."""
        return self.judged_states().sound

    def judged_states(self) -> JudgedStates:
        """Committed trainer states, and those that were committed and are unsound now."""
        if self.mirror is not None:
            return self.mirror.states()
        return committed.judge_states(self.root, self._secret)

    def verify_state(self, state: CommittedState) -> None:
        """Compare every file of a state with its digest; raises CheckpointError with the reason."""
        if self.mirror is not None:
            # A damaged local copy is pulled again, as a trainer that loads the state would do.
            self.mirror.fetch_state_again(state)
        committed.verify_files(state)

    def latest_committed(self) -> CommittedState | None:
        """The newest committed trainer state: it decides what is consumed."""
        return next(iter(self.committed_states()), None)

    def prune_states(self, *, keep_last: int, session: str) -> list[Path]:
        """Delete old trainer states."""
        if self.mirror is not None:
            self.mirror.prune_states(keep_last=keep_last, session=session)
        return committed.prune_states(self.root, self._secret, keep_last=keep_last, session=session)

    def ledger(self) -> Ledger:
        """What was trained, and what contradicts "each group once"."""
        return ledger.read_ledger(self.committed_states(), self.batch_footer)

    def trained_groups(self) -> dict[int, list[str]]:
        """Group ids in training order by train step, up to the newest committed state."""
        return {step: list(ids) for step, ids in self.ledger().groups.items()}
