"""``rollmesh explain`` without a train step: place and history of a trajectory, or of the members of a group."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.errors import CheckpointError, Conflict, DataError
from rollmesh.store import TrajectoryStore
from rollmesh.types import Trajectory, TrajectoryState


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
    round: int | None = None
    """Round that launched it; None without rounds, and where it is not in the queue."""
    plan: Mapping[str, Any] | None = None
    """Plan of this round."""
    outcome: float | None = None
    """Value of the verifier; None before it is scored, and without a value."""
    reward: float | None = None
    """Reward after shaping, of a scored trajectory."""
    history: tuple[str, ...] = ()
    """Round, reward, restarts, rests, cut-off, or reason of the drop, one sentence each."""

    def line(self) -> str:
        """Return the status as one line of text."""
        tokens = "" if self.token_count is None else f", {self.token_count} tokens saved"
        batch = "" if self.train_step is None else f", batch of train step {self.train_step}"
        return f"{self.name}: {'; '.join((f'{self.state}{tokens}{batch}', *self.history))}"


async def trajectory_statuses(
    store: TrajectoryStore, checkpoints: CheckpointStore, name: str
) -> list[TrajectoryStatus]:
    """Return the status of a trajectory (``<group>.<member>``), or of every member of a group.

    Raises DataError for a name that queue, ledger, dead letters and batch files do not know, CheckpointError if a batch
    file that may have it cannot be read.
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
    trained = (await store.training.state()).trained_step
    status = TrajectoryStatus(name=name, state="trained" if step <= trained else "cut", train_step=step)
    if not has_member:
        return [status]
    group = checkpoints.read_group(step, group_id)
    members = {t.trajectory_id: t for t in group.trajectories} if group is not None else {}
    if (member_of_batch := members.get(name)) is None:
        reason = "the batch has its group without it: cut off, unscorable, dead, or no such member"
        return [replace(status, state="not trained", history=(reason,))]
    verdict, reward = _verdict(member_of_batch), member_of_batch.shaped_reward
    return [replace(status, outcome=verdict, reward=reward, history=tuple(_reward_sentences(member_of_batch)))]


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
        mark, found = inspected.mark, inspected.round
        scored = inspected.trajectory if mark.state == TrajectoryState.SCORED else None
        rounds = () if found is None else (found.sentence(),)
        rewards = () if scored is None else _reward_sentences(scored)
        yield TrajectoryStatus(
            name=mark.trajectory_id,
            state=mark.state,
            token_count=mark.token_count,
            train_step=mark.train_step,
            round=None if found is None else found.number,
            plan=None if found is None else found.plan,
            outcome=None if scored is None else _verdict(scored),
            reward=None if scored is None else scored.shaped_reward,
            history=(*rounds, *rewards, *inspected.history.sentences()),
        )
        at += 1


def _batch_of(checkpoints: CheckpointStore, group_id: str) -> int | None:
    """Return the train step whose batch file has a group, the newest file first; None without one.

    Raises CheckpointError if no file has it and one, which may, cannot be read.
    """
    unread: CheckpointError | None = None
    for step in reversed(checkpoints.batch_steps()):
        try:
            if group_id in checkpoints.batch_footer(step).group_ids:
                return step
        except CheckpointError as error:
            unread = error
    if unread is not None:
        raise unread
    return None


def _verdict(trajectory: Trajectory) -> float | None:
    return None if trajectory.outcome is None else trajectory.outcome.verdict


def _reward_sentences(trajectory: Trajectory) -> list[str]:
    """Return the reward beside the outcome of the verifier, and how much of the answer a group shaper left out."""
    verdict, reward = _verdict(trajectory), trajectory.shaped_reward
    if verdict is None:
        sentences = [f"reward {reward:g}, without an outcome of the verifier"]
    elif verdict == reward:
        sentences = [f"outcome {verdict:g}, which is its reward"]
    else:
        sentences = [f"outcome {verdict:g}, reward {reward:g} after shaping"]
    if trajectory.cut_token_count:
        sentences.append(f"the group shaper left out its last {trajectory.cut_token_count} tokens")
    return sentences
