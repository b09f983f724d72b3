"""Batch of a train step: the fresh groups of its file, and the replayed ones in the files of their own batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from rollmesh.checkpoints.batches import StoredBatch
from rollmesh.checkpoints.reasons import Reason
from rollmesh.checkpoints.replay_draw import ReplayDraw
from rollmesh.errors import CheckpointError
from rollmesh.types import Batch, Group


def training_batch(stored: StoredBatch, read: Callable[[int], StoredBatch]) -> Batch:
    """Return the batch of a train step: its fresh groups with the replayed ones spread among them.

    ``read`` returns an earlier batch. Raises CheckpointError if the file of a replayed group is missing, damaged or not
    the one that was drawn from: without it the step cannot be trained again with the same result.
    """
    draw = stored.footer.replay
    if draw is None or not draw.groups:
        return stored.batch
    groups: dict[int, Mapping[str, Group]] = {}
    for step in sorted({step for step, _ in draw.groups}):
        groups[step] = _source_groups(stored.batch.train_step, step, draw, read)
    replayed = tuple(groups[step][group_id] for step, group_id in draw.groups)
    return replace(stored.batch, groups=_spread(stored.batch.groups, replayed))


def _source_groups(
    train_step: int, source: int, draw: ReplayDraw, read: Callable[[int], StoredBatch]
) -> Mapping[str, Group]:
    try:
        stored = read(source)
    except CheckpointError as error:
        raise CheckpointError(
            f"train step {train_step} replays groups of batch {source}: {error}", reason=error.reason
        ) from error
    found = {group.group_id: group for group in stored.batch.groups}
    missing = [group_id for step, group_id in draw.groups if step == source and group_id not in found]
    if missing or stored.footer.payload_sha256 != draw.sources.get(source):
        raise CheckpointError(
            f"train step {train_step} replays groups of batch {source}, whose file has other trajectories now",
            reason=Reason.MISMATCH,
        )
    return found


def _spread(fresh: tuple[Group, ...], replayed: tuple[Group, ...]) -> tuple[Group, ...]:
    """Merge two lists evenly and in order, so that every minibatch has its share of both."""
    places = [((i + 0.5) / len(part), part[i]) for part in (fresh, replayed) for i in range(len(part))]
    return tuple(group for _, group in sorted(places, key=lambda place: place[0]))
