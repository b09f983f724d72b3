"""What the trainer state holds beside tensors, and finding the state to go on from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.errors import CheckpointError
from rollmesh.runtime.logging import get_logger
from rollmesh.trainer.records.goodput import GeneratedTokens
from rollmesh.trainer.records.trained_lengths import DECILES
from rollmesh.trainer.service.ranks import RankCoordinator


@dataclass(slots=True, kw_only=True)
class Progress:
    """Totals of the run and its rollbacks; saved with every state, so that they are as old as its weights."""

    trained_token_total: int = 0
    """Tokens in the numerators of all losses."""
    trained_groups_by_length_decile: list[int] = field(default_factory=lambda: [0] * DECILES)
    """Groups trained on, by the length decile of their longest trajectory."""
    rollback_count: int = 0
    """Rollbacks carried out; a state after one outranks every state before it."""
    rollback_id: str = ""
    """The newest request carried out."""
    rolled_back_to: int | None = None
    """Policy version that the newest rollback went back to."""
    nonfinite_updates_in_a_row: int = 0
    """Updates with a gradient that is not finite since the last one that was made."""
    generated: GeneratedTokens = field(default_factory=GeneratedTokens)
    """What the generators have sampled."""

    def to_extra(self) -> dict[str, Any]:
        """JSON values for the trainer state."""
        progress = asdict(self)
        del progress["generated"]
        # Beside the rest, where a trainer of an older release passes over it.
        return {"progress": progress, "generated_tokens": self.generated.to_json()}

    @classmethod
    def from_extra(cls, extra: Mapping[str, Any]) -> Self:
        """Back from ``to_extra``; a fresh one for the initial model."""
        progress = cls(**extra.get("progress", {}))
        progress.generated = GeneratedTokens.from_json(
            extra.get("generated_tokens"), trained_tokens=progress.trained_token_total
        )
        return progress

    def count_updates(self, made: int, trailing_skipped: int) -> None:
        """Take in the updates of one train step."""
        before = 0 if made else self.nonfinite_updates_in_a_row
        self.nonfinite_updates_in_a_row = before + trailing_skipped

    def label(self, session: str) -> str:
        """Session part of folder names: a rollback publishes and saves a train step anew."""
        return f"{session}r{self.rollback_count}" if self.rollback_count else session

    def published(self, path: str) -> bool:
        """Whether a policy folder was written after as many rollbacks as this trainer knows (tokens are hex)."""
        _, mark, count = path.rpartition("-")[2].partition("r")
        return int(count) == self.rollback_count if mark else self.rollback_count == 0


def load_newest_state(crew: RankCoordinator, checkpoints: CheckpointStore) -> Progress:
    """Take over the newest committed state that can be read; a fresh Progress for the initial model.

    An older state is no loss: the batch files after it are replayed. Raises CheckpointError when states exist and
    none after the last rollback can be read.
    """
    log = get_logger("training")
    states = checkpoints.committed_states()
    refused: list[str] = []
    for state in states:
        if state.record.rollback_count < states[0].record.rollback_count:
            break
        try:
            extra = crew.load(state)
        except CheckpointError as error:
            if crew.gang.world > 1:
                raise
            refused.append(str(error))
            log.error("state_refused", folder=state.folder.name, reason=error.reason, message=str(error))
            continue
        log.info("state_loaded", train_step=state.train_step, folder=state.folder.name)
        return Progress.from_extra(extra)
    if refused and states[0].record.rollback_count > 0:
        raise CheckpointError(f"no trainer state after the last rollback can be read: {'; '.join(refused)}")
    return Progress()
