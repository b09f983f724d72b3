"""Order of the rows, and a batch of them as flat columns."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rollmesh.sft.training_rows import SftRow
from rollmesh.tasks.sources.rows import epoch_order
from rollmesh.trainer.learner.train_batch import Int64Array, TokenBatch


@dataclass(slots=True)
class EpochOrder:
    """Batches of rows by step. An epoch has every row once; its last batch has the rest of them."""

    size: int
    """Number of rows."""
    batch_rows: int
    seed: int
    shuffle: bool
    _epoch: tuple[int, Int64Array] = field(default=(-1, np.empty(0, np.int64)), init=False, repr=False)
    """(epoch, order) used last."""

    @property
    def epoch_steps(self) -> int:
        """Number of batches of an epoch."""
        return -(-self.size // self.batch_rows)

    def rows(self, train_step: int) -> Int64Array:
        """Return the numbers of the rows of a train step, from 1 on, int64 [at most batch_rows]."""
        epoch, index = divmod(train_step - 1, self.epoch_steps)
        if not self.shuffle:
            epoch = 0
        if self._epoch[0] != epoch:
            order = epoch_order(self.size, self.seed, epoch) if self.shuffle else np.arange(self.size, dtype=np.int64)
            self._epoch = epoch, order
        return self._epoch[1][index * self.batch_rows : (index + 1) * self.batch_rows]


def token_batch(rows: Sequence[SftRow]) -> TokenBatch:
    """Concatenate rows. The first token of a row is no target, because nothing predicts it."""
    masks = [row.loss_mask & (np.arange(len(row.loss_mask)) > 0) for row in rows]
    token_ids = np.concatenate([row.token_ids for row in rows])
    return TokenBatch(
        starts=np.cumsum([0, *(len(row.token_ids) for row in rows)], dtype=np.int64),
        token_ids=token_ids,
        policy_mask=np.concatenate(masks),
        temperatures=np.ones(len(token_ids), np.float32),
        kept_sets=None,
    )


def rows_digest(rows: Sequence[SftRow]) -> str:
    """Return a digest of tokens and targets, in order, by which a continued run knows its rows."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(len(row.token_ids).to_bytes(8, "little"))
        digest.update(row.token_ids.astype("<i4").tobytes())
        digest.update(row.loss_mask.tobytes())
    return digest.hexdigest()
