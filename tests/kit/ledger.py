"""The ledger of a checkpoint store, from batch files and committed states only: an oracle for trainers in tests."""

from dataclasses import dataclass, field

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.errors import CheckpointError


@dataclass
class Ledger:
    committed_step: int
    """Train step of the newest committed state; -1 without one."""
    groups: dict[int, list[str]] = field(default_factory=dict)
    """Group ids in training order, by train step, up to the committed one."""
    damaged: dict[int, str] = field(default_factory=dict)
    trained_twice: dict[str, list[int]] = field(default_factory=dict)


def read_ledger(store: CheckpointStore) -> Ledger:
    """Read the footers of all batch files up to the newest committed state."""
    newest = store.latest_committed()
    ledger = Ledger(committed_step=-1 if newest is None else newest.train_step)
    steps: dict[str, list[int]] = {}
    for step in range(1, ledger.committed_step + 1):
        try:
            ledger.groups[step] = store.batch_footer(step).group_ids
        except CheckpointError as error:
            ledger.damaged[step] = str(error)
            continue
        for group_id in ledger.groups[step]:
            steps.setdefault(group_id, []).append(step)
    ledger.trained_twice = {group_id: found for group_id, found in steps.items() if len(found) > 1}
    return ledger
