"""Parts of a batch: groups whose gradient is computed before the batch is cut, at the weights of its train step.

The gradients of the parts are in the parameters, not yet divided by the divisor of the batch. The batch may use them
only if it has the same groups with the same contents and settings: a queue that came back with an earlier state may
have generated a group again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollmesh.algorithms.old_logprobs import OldLogprobs
from rollmesh.checkpoints.batch_frames import encode_groups
from rollmesh.checkpoints.batches import StepSettings
from rollmesh.trainer.learner.forward_backward import GradientPass, TokenColumns
from rollmesh.trainer.learner.train_batch import Float64Array, Int64Array, TrainBatch
from rollmesh.types import Batch, Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Groups of one batch, and the results of their gradient pass with the divisor 1."""

    digests: Mapping[str, bytes]
    """Digest of the contents of each group, by group id."""
    flat: TrainBatch
    columns: TokenColumns
    old: OldLogprobs
    done: GradientPass
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeBatch:
    """Results of all parts, per token in the order of the flat batch."""

    old: OldLogprobs
    policy_share: Tensor  # float64 [tokens]
    reference_logprobs: Tensor | None  # float64 [tokens]
    done: GradientPass


class Parts:
    """Parts of the next batch, in order."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._settings: StepSettings | None = None

    @property
    def group_ids(self) -> tuple[str, ...]:
        """Groups in the parts."""
        return tuple(self._known())

    @property
    def seconds(self) -> float:
        """Wall time of the gradient passes."""
        return sum(part.seconds for part in self._parts)

    def add(self, part: Part, settings: StepSettings) -> None:
        """Add a part that was computed with these settings."""
        self._settings = settings
        self._parts.append(part)

    def clear(self) -> None:
        """Forget all parts; the caller clears the gradients."""
        self._parts.clear()

    def fit(self, batch: Batch, settings: StepSettings) -> bool:
        """Tell whether every part belongs to this batch, with equal contents and settings; False without a part."""
        if settings != self._settings or any(part.flat.train_step != batch.train_step for part in self._parts):
            return False
        known = self._known()
        return known.items() <= digests(g for g in batch.groups if g.group_id in known).items()

    def rest(self, batch: Batch) -> tuple[Group, ...]:
        """Return the groups of the batch that are in no part."""
        known = self._known()
        return tuple(group for group in batch.groups if group.group_id not in known)

    def whole(self, flat: TrainBatch) -> WholeBatch:
        """Join the results of the parts, which together are this batch. The loss is divided, the gradient is not."""
        places = [_places(flat, part.flat) for part in self._parts]
        passes = [part.done for part in self._parts]
        weight = sum(done.weight for done in passes)
        references = [part.columns.reference_logprobs for part in self._parts]

        def join(columns: Sequence[Tensor]) -> Tensor:
            joined = torch.zeros(len(flat.token_ids), dtype=columns[0].dtype)
            for place, column in zip(places, columns, strict=True):
                joined[place] = column
            return joined

        def join_floats(columns: Iterable[Float64Array]) -> Float64Array:
            return join([torch.from_numpy(column) for column in columns]).numpy()

        return WholeBatch(
            old=OldLogprobs(
                values=join([part.old.values for part in self._parts]),
                from_trainer=join([part.old.from_trainer for part in self._parts]),
                fell_back={
                    reason: join([part.old.fell_back[reason] for part in self._parts])
                    for reason in self._parts[0].old.fell_back
                },
            ),
            policy_share=join([part.columns.policy_share for part in self._parts]),
            reference_logprobs=join([r for r in references if r is not None]) if references[0] is not None else None,
            done=GradientPass(
                loss=sum(done.loss for done in passes) / max(1.0, weight),
                weight=weight,
                logprobs=join_floats(done.logprobs for done in passes),
                entropy=join_floats(done.entropy for done in passes),
                microbatches=sum(done.microbatches for done in passes),
                forward_tokens=sum(done.forward_tokens for done in passes),
            ),
        )

    def _known(self) -> dict[str, bytes]:
        return {group_id: digest for part in self._parts for group_id, digest in part.digests.items()}


def digests(groups: Iterable[Group]) -> dict[str, bytes]:
    """Return a digest of the contents of each group, by group id."""

    def digest(group: Group) -> bytes:
        contents = b"".join(encode_groups(Batch(train_step=0, groups=(group,))))
        return hashlib.blake2b(contents, digest_size=16).digest()

    return {group.group_id: digest(group) for group in groups}


def _places(flat: TrainBatch, part: TrainBatch) -> Int64Array:
    """Return the position in ``flat`` of every token of a part."""
    at = {trajectory_id: i for i, trajectory_id in enumerate(flat.trajectory_ids)}
    rows = [at[trajectory_id] for trajectory_id in part.trajectory_ids]
    return np.concatenate([np.arange(flat.starts[row], flat.starts[row + 1]) for row in rows])
