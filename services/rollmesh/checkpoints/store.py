"""``CheckpointStore``: policies, batch files and trainer state of one run under one root folder.

    <root>/policies/<step>-<session>/   Hugging Face folder and manifest.json, written last
    <root>/batches/<step>.pb            what each train step was trained on
    <root>/states/<step>-<session>/     trainer state, valid only with COMMITTED
    <root>/lineage                      identity of the store, which the queue remembers

All methods block on the file system; asyncio callers use a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rollmesh.checkpoints import batches, committed, ledger, policies
from rollmesh.checkpoints.batches import BatchFooter
from rollmesh.checkpoints.committed import CommittedState
from rollmesh.checkpoints.durable import make_folder
from rollmesh.checkpoints.ledger import Ledger
from rollmesh.checkpoints.manifest import CanarySequence, Manifest
from rollmesh.checkpoints.policies import PolicyDraft, VerifiedPolicy
from rollmesh.checkpoints.sealing import lineage, run_secret
from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.mesh import Cursor
from rollmesh.types import Batch, Group, PolicyRecord

if TYPE_CHECKING:
    import torch


class CheckpointStore:
    """The checkpoint store of one run; any number of readers, one fenced writer (the trainer)."""

    def __init__(self, root: Path, secret: bytes) -> None:
        make_folder(root)
        self.root = root.resolve()
        self._secret = secret

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
        root = Path(section.folder) if section.folder else Path(config.folder) / "checkpoints"
        given = section.secret
        return cls(root, given.get_secret_value().encode() if given else run_secret(Path(config.folder)))

    def at(self, root: Path) -> Self:
        """A copy of this store in another folder, sealed with the same secret."""
        return type(self)(root, self._secret)

    def lineage(self) -> str:
        """Identity of this checkpoint store, made with its first use; CheckpointError when its file is damaged."""
        return lineage(self.root)

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
        return policies.publish(self.root, self._secret, draft, write, canary)

    def open(self, record: PolicyRecord, *, like: Manifest | None = None) -> VerifiedPolicy:
        """Verify a published policy byte for byte, and against the architecture and tokenizer of ``like``.

        Raises CheckpointError whose ``reason`` is a ``Reason``; the caller keeps what it has.
        """
        policy = policies.verify(self.root, self._secret, record)
        if like is not None:
            like.check_compatible(policy.manifest)
        return policy

    def mark_announced(self, record: PolicyRecord) -> None:
        """Note that the registry accepted the record."""
        policies.mark_announced(self.root, record)

    def complete_policies(self, *, announced_only: bool = False) -> list[PolicyRecord]:
        """Records of all complete folders, one per version, ascending; only for a trainer that recovers."""
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
        return policies.prune(self.root, records, keep_last=keep_last, keep_versions=keep, session=session)

    def write_batch(self, batch: Batch, cursor: Cursor, train_steps: Mapping[int, int] | None = None) -> str:
        """Write and flush the batch file of ``batch.train_step``, once; returns its digest.

        ``train_steps`` has the train step of each policy version that wrote tokens of the batch.
        """
        return batches.write_batch(self.root, self._secret, batch, cursor, train_steps)

    def read_batch(self, train_step: int) -> Batch:
        """Read and verify a batch file."""
        return batches.read_batch(self.root, self._secret, train_step)

    def read_group(self, train_step: int, group_id: str) -> Group | None:
        """One group of a batch file, for people who look; None when it is not in it."""
        return batches.read_group(self.root, self._secret, train_step, group_id)

    def batch_footer(self, train_step: int) -> BatchFooter:
        """Ids, cursor and digest of a batch file."""
        return batches.read_footer(self.root, self._secret, train_step)

    def batch_steps(self) -> list[int]:
        """Train steps that have a batch file, ascending."""
        return batches.batch_steps(self.root)

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

        return save_state(
            self.root,
            self._secret,
            session=session,
            train_step=train_step,
            rollback_count=rollback_count,
            tensors=tensors,
            extra=extra,
        )

    def load_state(self, state: CommittedState, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Fill ``tensors`` in place from a committed state; returns its ``extra``."""
        from rollmesh.checkpoints.states import load_state

        return load_state(state, tensors)

    def committed_states(self) -> list[CommittedState]:
        """Committed trainer states, newest first."""
        return committed.committed_states(self.root, self._secret)

    def latest_committed(self) -> CommittedState | None:
        """The newest committed trainer state: it decides what is consumed."""
        return next(iter(self.committed_states()), None)

    def prune_states(self, *, keep_last: int, session: str) -> list[Path]:
        """Delete old trainer states."""
        return committed.prune_states(self.root, self._secret, keep_last=keep_last, session=session)

    def ledger(self) -> Ledger:
        """What was trained, and what contradicts "each group once"."""
        return ledger.read_ledger(self.root, self._secret)

    def trained_groups(self) -> dict[int, list[str]]:
        """Group ids in training order by train step, up to the newest committed state."""
        return {step: list(ids) for step, ids in self.ledger().groups.items()}
