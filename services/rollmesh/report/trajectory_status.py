"""``rollmesh explain`` without a train step: place and history of a trajectory, or of the members of a group."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.errors import CheckpointError, Conflict, DataError
from rollmesh.store import TrajectoryStore


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryStatus:
    """Place of one trajectory, or of a group whose members the queue no longer knows."""

    name: str
    state: str
    """State in the queue; else ``dead``, ``dropped``, ``cut`` (in a batch file), ``trained`` or ``not trained``."""
    token_count: int | None = None
    """Saved tokens; None where they are not in the queue."""
    train_step: int | None = None
    """Train step of its batch; None without one."""
    history: tuple[str, ...] = ()
    """Restarts, rests, cut-off, or reason of the drop, one sentence each."""

    def line(self) -> str:
        """Return the status as one line of text."""
        tokens = "" if self.token_count is None else f", {self.token_count} tokens saved"
        batch = "" if self.train_step is None else f", batch of train step {self.train_step}"
        return f"{self.name}: {'; '.join((f'{self.state}{tokens}{batch}', *self.history))}"


async def trajectory_statuses(
    store: TrajectoryStore, checkpoints: CheckpointStore, name: str
) -> list[TrajectoryStatus]:
    """Return the status of a trajectory (``<group>.<member>``), or of every member of a group.

    Raises DataError for a name that queue, ledger, dead letters and batch files do not know.
    """
    group_id, has_member, member = name.rpartition(".") if "." in name else (name, "", "")
    if has_member and not (member.isascii() and member.isdigit()):
        raise _unknown(name)
    found = [status async for status in _in_queue(store, group_id, member)]
    if found:
        return found
    # A dead member is in no batch file, but its group may be.
    try:
        letter = await store.dead_letters.get(name)
    except Conflict:
        pass
    else:
        return [TrajectoryStatus(name=name, state="dead", history=(f"dead letter, reason {letter.reason}",))]
    if (drop := await store.ledger.newest_drop(group_id)) is not None:
        reason = f"reason {drop.reason}, {drop.token_count} saved tokens of the group"
        return [TrajectoryStatus(name=group_id, state="dropped", history=(reason,))]
    if (step := _batch_of(checkpoints, group_id)) is None:
        raise _unknown(name)
    if has_member and not _has_member(checkpoints, step, group_id, name):
        reason = "the batch has its group without it: cut off, unscorable, dead, or no such member"
        return [TrajectoryStatus(name=name, state="not trained", train_step=step, history=(reason,))]
    trained = (await store.training.state()).trained_step
    return [TrajectoryStatus(name=name, state="trained" if step <= trained else "cut", train_step=step)]


def _unknown(name: str) -> DataError:
    return DataError(
        f"{name}: neither in the queue, nor in a batch file, the ledger of drops or the dead letters; names are "
        "<group> or <group>.<member>, for example e0-17.0"
    )


async def _in_queue(store: TrajectoryStore, group_id: str, member: str) -> AsyncIterator[TrajectoryStatus]:
    at, last = (int(member), int(member)) if member else (0, None)
    while last is None or at <= last:
        inspected = await store.inspection.inspect(f"{group_id}.{at}")
        if inspected is None:
            return
        mark = inspected.mark
        yield TrajectoryStatus(
            name=mark.trajectory_id,
            state=mark.state,
            token_count=mark.token_count,
            train_step=mark.train_step,
            history=tuple(inspected.history.sentences()),
        )
        at += 1


def _batch_of(checkpoints: CheckpointStore, group_id: str) -> int | None:
    """Return the train step whose batch file has a group, the newest file first; None without one."""
    for step in reversed(checkpoints.batch_steps()):
        try:
            if group_id in checkpoints.batch_footer(step).group_ids:
                return step
        except CheckpointError:
            continue  # an incomplete file is no batch
    return None


def _has_member(checkpoints: CheckpointStore, train_step: int, group_id: str, name: str) -> bool:
    group = checkpoints.read_group(train_step, group_id)
    return group is not None and any(each.trajectory_id == name for each in group.trajectories)
